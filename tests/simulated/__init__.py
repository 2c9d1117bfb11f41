"""What a GPU would be asked to do, counted by a simulated one, which changes torch for the rest of its process."""
