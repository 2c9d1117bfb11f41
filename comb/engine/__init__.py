"""The embedded engine: questions and documents go in, answers with a report come out.

`engine.PICEngine` is what users hold; `steps` is what every answer is made of, `conversation` and `turns` compose the
same steps into turns that go on from one another, `decoding` runs ``generate`` and streams, `segmenter` cuts and keys
documents, `report` says where an answer came from. `workers` compiles the documents of one request side by side.
"""

DEFAULT_MAX_NEW_TOKENS = 256
