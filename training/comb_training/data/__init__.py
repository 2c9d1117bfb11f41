"""From a configuration's data to token ids and batches.

A `DataConfig` enters; `TrainingExample`s and their `Counts` leave. On the way: `readers`, a file each (`side` has their
decorator, `records` and `hub` the rows, `grouping` splits and draws), `sources` and `mixture` the sets of a run in
their shares, `batches` token ids and batches.
Others use `mixture.read_tokenized` and `read_examples`, `batches`, `token_statistics`, and `sources.sources`.
"""
