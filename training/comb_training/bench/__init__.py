"""`comb bench train`, found by the harness of `comb.bench`."""
