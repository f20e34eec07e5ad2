"""Other libraries' names for the same tensors, and their configurations for the same networks."""
