"""`comb bench`: methods compared on the same work. What each command measures is in docs/benchmarks.md.

A benchmark is one file here: options in, rows out. `harness` makes a command of it and tables, JSON, Markdown and a
plot of its rows; `options` has the options that benchmarks share, `work` and `mac_stream` what they measure on.
Serving has a folder of its own, which the harness walks too.
"""
