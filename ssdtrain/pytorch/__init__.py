"""The adapter for training loops of plain PyTorch, and for its DistributedDataParallel and FSDP.

What lives here: the functions that a user calls (`api`), a runtime attached to a model (`attached`), what is checked of it
(`models`), parameters that FSDP gathers (`sharded`), and the gradients that wrappers reduce (`ddp`, `fsdp`).

May import everything in `ssdtrain` but `cli`. It holds no algorithm: it turns the events of torch into calls on `Runtime`,
and the collectives of its wrappers into calls on `Communicator`.
"""
