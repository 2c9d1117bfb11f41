"""What every process of `comb serve` must agree on: its options, sizes and keys, its folder, and how it logs."""
