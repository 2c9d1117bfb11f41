"""Questions with right answers and methods in, one comparable table out.

`compare.compare` asks several methods question by question and holds them against full recompute; its rows go to a
`journal`, which a run that was broken off goes on from, and `summary` makes a table's rows of them. A `setting` says
how questions are put, on the `sets` of a file or others. `metrics` are functions of texts. `table`, `plot` and `record`
(JSON) know rows by the names of their columns, and are all that benchmarks of other things need.
"""
