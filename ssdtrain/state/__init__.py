"""Model state in chunks: parameters, gradients and optimizer state of plain PyTorch, in a tier while they are not needed.

A chunk holds the parameters of one block of the model. What lives here: bytes between device memory and slots (`transfers`),
one tensor that comes and goes (`stored`), the tensors of a chunk (`chunk`), which chunks stay on the device (`plan`,
`sizes`), the memory of all others and what comes next (`residency`), the events of blocks and of backward (`hooks`), the
optimizer (`optimizer`, `clip`), state dicts (`checkpoints`), and the feature of the runtime (`feature`).

Note: [When a chunk is in memory]
    Its parameters: in the forward of its block; from the moment that the gradient of the block's output is known until all of
    its parameters have their gradients, or the backward is over; in its part of the optimizer's step; and while there is
    room. Its gradients: in the backward, then in the step. Its optimizer state: in the step. Otherwise the tensors are there,
    with their shapes, and every element reads as NaN.

Note: [The same storage object]
    Autograd saves views of parameters (`weight.t()`), which hold the storage and not the parameter. A parameter therefore
    keeps its storage object for good: its memory is freed and allocated again by `resize_`, as FSDP does. No version counter
    moves, because nothing is written through torch.

It computes nothing from values but the norm of gradients for clipping. It knows neither `offload` nor `comm` nor `compact`.

Source: model state in chunks with buffers is section 3 of ProTrain (arXiv 2406.08334).
"""
