"""Megatron's collectives, sent compressed: which traffic is which parallel dimension.

Lives here: gradients and parameters of data parallelism (`data_parallel`), activations and their gradients between
tensor-parallel ranks (`tensor_parallel`), between pipeline stages (`pipeline`), tokens to experts (`expert`), what puts all of
that in place and takes it away again (`hooks`), the end of a step (`steps`), error feedback in checkpoints (`residuals`), and
what cannot be compressed because the hooks would not see it (`refusals`). The algorithms are the engine's (`ssdtrain.comm`).

Import from this package: `Hooks`. It needs megatron-core. It never replaces anything while nothing that compresses is attached,
and never touches the reductions of the vocabulary-parallel cross entropy, the gradients that the first and the last pipeline
stage share, integers, or the exchange of shapes between stages.
"""

from ssdtrain_megatron.comm.hooks import Hooks

__all__ = ["Hooks"]
