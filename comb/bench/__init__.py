"""`comb bench`: methods compared on the same work. What each command measures is in docs/benchmarks.md."""
