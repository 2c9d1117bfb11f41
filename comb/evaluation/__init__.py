"""Questions with right answers and methods in, one comparable table out.

`run.evaluate` answers in batches and scores, which training and the demo do. `compare.compare` asks several methods
question by question and holds them against full recompute, on the sets that `sets.read_sets` finds in a file, with a
`journal` to go on from and a `summary` at the end. `metrics` are functions of texts. `table`, `plot` and `record`
(JSON) know rows by the names of their columns, and are all that benchmarks of other things need.
"""
