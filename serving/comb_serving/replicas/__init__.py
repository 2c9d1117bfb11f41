"""Several `comb serve` behind one address: requests go where their documents are (`docs/replicas.md`)."""
