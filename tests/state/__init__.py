"""Model state in chunks."""
