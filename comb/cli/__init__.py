"""The `comb` command (`main`) and what `comb info` and `comb doctor` show; training and serving add their commands."""
