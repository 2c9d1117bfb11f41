"""`scripts/bench-serving-gpu`, and the two processes with one pool that it starts (`handover`)."""
