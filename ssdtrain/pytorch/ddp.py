"""A communication hook for DistributedDataParallel.

Note: [Overlap]
    A bucket's messages are issued when backward has filled it. On a CPU the part after the first message runs when the last
    bucket is there, for all of them in order, so that every rank issues the same messages in the same order.
"""

import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ssdtrain.comm.communicator import Bucket, Communicator
from ssdtrain.comm.exclusion import excluded, ranges_in_order
from ssdtrain.comm.work import CompressedWork

_all_reduce = dist.all_reduce

TAKEN = (
    "ssdtrain.comm compresses gradients in the communication hook of DistributedDataParallel, and this model has another hook "
    "already: register none, or leave out ssdtrain.comm"
)
JOINS = (
    "ssdtrain.comm: gradients are not compressed inside of DistributedDataParallel.join(): a rank that has joined ends no steps, "
    "at which ranks agree on what they send. Give all ranks the same number of batches (DistributedSampler with drop_last), or "
    "leave out ssdtrain.comm"
)


class _BucketHook:
    """`reduce` is what DDP calls with each bucket: gradients are averaged over its ranks, in the dimension "dp"."""

    def __init__(
        self, model: DistributedDataParallel, comm: Communicator, before: Callable[[], object]
    ) -> None:
        self._comm = comm
        self._before = before
        self._ddp = weakref.ref(model)  # which holds the hook
        self._group = model.process_group
        self._uncompressed: set[Tensor] = {*excluded(model.module, comm.policy.exclude)}
        self._numbers: dict[Tensor, int] = {p: n for n, p in enumerate(model.module.parameters())}
        training = [p for p in self._numbers if p.requires_grad]
        dtypes = {dimension: p.dtype for p in training for dimension in ("dp", "dp_gather")}
        comm.announce([(p.numel(), p in self._uncompressed) for p in training], dtypes)
        self._waiting: list[tuple[CompressedWork, Tensor, torch.futures.Future[Tensor]]] = []

    # DDP reads the annotations: they have to be the classes themselves.
    def reduce(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            # What a backward that raised has left is not needed.
            self._waiting.clear()
            if self._joins():
                raise RuntimeError(JOINS)
            self._before()
        gradients = bucket.buffer().div_(dist.get_world_size(self._group))
        work = self._comm.all_reduce(gradients, "dp", self._group, bucket=self._named(bucket))
        if work is None:
            plain = _all_reduce(gradients, group=self._group, async_op=True)
            future = plain.get_future().then(lambda done: done.value()[0])
        else:
            future = torch.futures.Future(devices=[gradients.device] if gradients.is_cuda else [])
            self._waiting.append((work, gradients, future))
        if bucket.is_last():
            waiting, self._waiting = self._waiting, []
            for found, tensor, future_of in waiting:
                found.wait()
                future_of.set_result(tensor)
        return future

    def _joins(self) -> bool:
        """Inside of `DistributedDataParallel.join`."""
        model = self._ddp()
        return model is not None and model._join_config.enable

    def _named(self, bucket: dist.GradBucket) -> Bucket:
        """Name `bucket` by its parameters: DDP rebuilds its buckets after the first step.

        Parameters are known as objects: two may share memory, and memory may be exchanged (`.data`). What has left the model
        after DDP was made, and still has a place in its bucket, is sent uncompressed.
        """
        parameters = bucket.parameters()
        members = repr([self._numbers.get(parameter, -1) for parameter in parameters])
        slices = [(p.numel(), p in self._uncompressed or p not in self._numbers) for p in parameters]
        return Bucket(f"ddp-{zlib.crc32(members.encode()):08x}", ranges_in_order(slices))


def attach(model: DistributedDataParallel, comm: Communicator, before: Callable[[], object]) -> None:
    """Compress the gradients of `model`, for as long as it lives: DDP takes one hook, once.

    Args:
        before: called in each backward that reduces gradients, before the first of them. Where the loop ends no steps of `comm`,
            it does.

    Raises:
        RuntimeError: the model has a communication hook already. From backward: inside of `DistributedDataParallel.join`.
    """
    try:
        model.register_comm_hook(None, _BucketHook(model, comm, before).reduce)
    except RuntimeError as error:
        raise RuntimeError(TAKEN) from error
