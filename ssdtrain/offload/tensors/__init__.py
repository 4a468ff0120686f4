"""Saved tensors as the engine sees them: which may move, what they become, in which order backward asks for them."""
