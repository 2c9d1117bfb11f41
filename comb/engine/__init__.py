"""The embedded engine: questions and documents go in, answers with a report come out.

`engine.PICEngine` is what users hold; `steps` is what every answer is made of, also a `conversation`'s; `decoding` runs
``generate`` and streams, `report` says where an answer came from, `workers` compile documents side by side.
"""

DEFAULT_MAX_NEW_TOKENS = 256
