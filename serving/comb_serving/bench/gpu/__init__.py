"""`comb bench serving-gpu` (`kernels`), and the two processes with one pool that it starts (`handover`)."""
