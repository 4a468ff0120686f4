"""The checkpoint function in the place of `tensor_parallel.checkpoint`.

Megatron's own is the reentrant kind: it saves its inputs through autograd, so inside a forward of the runtime they leave
memory as they are. Ours is the other kind: it stops as soon as all that backward needs is there, which leaves out the last
collectives of a block too. Both restore torch's generators and Megatron's tracker.

Note: [Distributed saved activations]
Megatron's own function splits the first input among the tensor-parallel ranks by replacing its data. That needs a function
which saves after it ran: the reentrant one is used there whatever the config.

Note: [Runs that count]
The first run of the reentrant function has gradients off, and some modules take a run without gradients for one that does not
count: a mixture of experts adds its auxiliary losses to the metrics and its tokens to the counts that steer the router (and, with
global balancing, the gradients) only with gradients on. Both of our runs have them on, and would count twice. Models with
such modules keep Megatron's own function.

Note: [Inputs without gradients]
Where none of a block's inputs requires a gradient (the first block above a frozen embedding), the reentrant function is no node
of the graph: the parameters in the block get no gradient, and its output requires none. The other kind would train them. A run
with SSDTrain trains what the same run trains without it, so such a block is Megatron's.

Note: [Outputs that are parameters]
With a linear bias, an MLP returns the bias of its last linear layer beside its output, for a fused kernel to add. The reentrant
function hands such an output to autograd as its own: the Parameter becomes an output of the function, so that its backward
runs into itself without end, and where gradients are off (an evaluation) the Parameter loses its `requires_grad` and is never
trained again. So with gradients off a checkpoint function is a call of what it was given, and the first run of the reentrant
function returns parameters detached; the recomputation returns the Parameter itself, whose gradient is then added as usual.

Note: [Saved for nothing]
Inside the reentrant function's first run gradients are off, but Megatron switches them on again around bias-dropout-add. What
is saved there is dropped at the end of the block, and must not travel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def any_requires_grad(inputs: Iterable[object]) -> bool:
    """True if an autograd function with these arguments would be a node of the graph. See Note: [Inputs without gradients]."""
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in inputs)


def has_grad_mode_side_effects(config: Any) -> bool:
    """True if modules of a model with this TransformerConfig do more in a run with gradients. See Note: [Runs that count]."""
    experts = getattr(config, "num_moe_experts", None)
    return bool(experts) or getattr(config, "experimental_attention_variant", None) == "dsa"
