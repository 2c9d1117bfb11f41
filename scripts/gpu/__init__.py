"""What `scripts/bench-gpu` measures beside `comb bench`, and what it concludes."""
