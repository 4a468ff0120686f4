"""Recomputation: blocks that run again in backward, to the bit as they ran in forward.

`modules` replaces their forward, `attributes` gives the second run what the first one read, `trials` compares the two by
`fingerprints`, and `purity` says which blocks may run again at all. It knows no plan: the room above says which blocks, and when.
"""
