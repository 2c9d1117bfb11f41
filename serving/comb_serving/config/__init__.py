"""What every process of `comb serve` must agree on: its options, folder, log lines, sizes, and who a tenant is."""
