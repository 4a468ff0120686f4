"""Checks of what came back and of how steps went, and counts by module."""
