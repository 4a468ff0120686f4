"""Megatron's collectives, sent compressed: which traffic is which parallel dimension.

Lives here: which parallel dimension a collective belongs to (`classification`), messages between pipeline stages (`pipeline`),
and what replaces Megatron's functions and restores them (`hooks`). The algorithms are the engine's (`ssdtrain.comm`).

Import from this package: `Hooks`. It needs megatron-core. It never replaces anything while nothing that compresses is attached,
and never touches the reductions of the vocabulary-parallel cross entropy, the gradients that the first and the last pipeline
stage share, integers, or the exchange of shapes between stages.
"""

from ssdtrain_megatron.comm.hooks import Hooks

__all__ = ["Hooks"]
