"""From a configuration's data to token ids and batches.

A `DataConfig` enters; `TrainingExample`s and their `Counts` leave. On the way: `readers` (`side` has their decorator,
splits and draws, `records` the rows of a file or the Hub), `sources` (where a run's sets are), `mixture` the sets of a
run in their shares, `batches` token ids and batches.
"""
