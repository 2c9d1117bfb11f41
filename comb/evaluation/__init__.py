"""Questions with right answers and methods in, one comparable table out.

A `setting` says what is asked and how. `compare.compare` asks several methods question by question and holds them
against full recompute; its rows go to a journal (`record`), which a run that was broken off goes on from, and `summary`
makes a table's rows of them. `metrics` are functions of texts. `table`, `plot` and `record` know rows by the names of
their columns, and are all that benchmarks of other things need; those of time have `random_prompts`. `placement` leaves
out a layer, `lm_eval` puts methods into lm-evaluation-harness.
"""
