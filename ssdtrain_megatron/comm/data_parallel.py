"""Gradients and parameters of data parallelism, bucket by bucket.

Note: [Upstream's own function]
    Megatron's bucket groups scale gradients, look for NaN, choose between sum and average, and keep handles. All of that stays
    theirs: what is replaced are the collectives that they call and the manager that coalesces them. Inside of that manager
    nothing is sent yet. At its end each bucket is offered to the engine; those that it leaves go through torch's own manager,
    together, as they always did.

Note: [Parameters that are also the master copy]
    Parameters are gathered by difference, after which this rank's own part holds what the others have, too. That is right where
    the optimizer keeps a float32 master copy, and would ruin training where the parameter itself is the master: in float32
    training, and where the optimizer stores only the bits that bfloat16 lacks.

Note: [Repeated parameters]
    What tensor-parallel ranks repeat (norms, routers, biases of row-parallel layers), and the word embedding that the first and
    the last stage both hold, has to stay equal on ranks that reduce it in different groups. A quantised block is coded with its
    neighbours, and those differ from group to group. So such parameters are always sent exactly, whatever the config excludes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ssdtrain.comm import Bucket, ChainedWork, Communicator, CompressedWork
from ssdtrain.comm.collectives import AllGather, AllReduce
from ssdtrain.comm.exclusion import excluded, ranges_of
from ssdtrain_megatron import _compat_comm

__all__ = ["Coalesced", "DataParallel"]

Function = Callable[..., Any]
Work = CompressedWork | ChainedWork

logger = logging.getLogger("ssdtrain")


class Operation:
    """One collective of a bucket, not sent yet."""

    __slots__ = ("_compressed", "_plain", "_waits")

    def __init__(self, compressed: Callable[[], Work | None], plain: Callable[[], Any], waits: bool) -> None:
        self._compressed = compressed
        self._plain = plain
        self._waits = waits

    def compress(self) -> Work | None:
        return self._compressed()

    def send(self) -> Any:
        """As the framework does; what is to be waited for beside the manager's handle, or None."""
        work = self._plain()
        return work if self._waits else None


class Coalesced:
    """In the place of torch's `_coalescing_manager`. See Note: [Upstream's own function]."""

    def __init__(self, owner: DataParallel, manager: Callable[[], Any], async_ops: bool) -> None:
        self._owner = owner
        self._manager = manager
        self._async_ops = async_ops
        self._operations: list[Operation] = []
        self._works: list[Any] = []

    def add(self, operation: Operation) -> Coalesced:
        """Send it at the end. What upstream takes for a handle of this operation is one of all of them."""
        self._operations.append(operation)
        return self

    def __enter__(self) -> Coalesced:
        self._owner.open = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner.open = None
        if error is not None:
            return
        left = []
        for operation in self._operations:
            work = operation.compress()
            if work is None:
                left.append(operation)
            else:
                self._works.append(work)
        self._operations.clear()
        if left:
            with self._manager() as manager:
                others = [operation.send() for operation in left]
            # On the way of torch's own manager a call that is not asynchronous has waited by now.
            if self._async_ops:
                self._works += [work for work in others if work is not None] or [manager]
        if not self._async_ops:
            self.wait()

    def wait(self) -> None:
        """Until all buckets are there."""
        while self._works:
            self._works.pop(0).wait()


class DataParallel:
    """Replacements of what Megatron's bucket groups call.

    Args:
        chunks: wrapped by Megatron's DistributedDataParallel; others have no buckets, and nothing is done for them.
        params_are_master: see Note: [Parameters that are also the master copy].
    """

    def __init__(
        self, comm: Communicator, chunks: Sequence[nn.Module], params_are_master: bool = False
    ) -> None:
        self._comm = comm
        self._params_are_master = params_are_master
        self.open: Coalesced | None = None
        # By identity of the tensor that the bucket's collectives get, which is kept so that no other gets its identity.
        self._buckets: dict[int, tuple[Tensor, Bucket]] = {}
        for index, chunk in enumerate(chunks):
            chosen = excluded(chunk, comm.policy.exclude) | _repeated(chunk)
            for name, bucket in _compat_comm.buckets(chunk):
                known = Bucket(f"chunk{index}.{name}", ranges_of(_places(bucket), chosen))
                for tensor in (bucket.grad_data, bucket.param_data):
                    if tensor is not None:
                        self._buckets[id(tensor)] = (tensor, known)

    def _bucket(self, tensor: Tensor) -> Bucket | None:
        found = self._buckets.get(id(tensor))
        return found[1] if found is not None else None

    def coalescing(self, plain: Function) -> Function:
        @functools.wraps(plain)
        def _coalescing_manager(
            group: dist.ProcessGroup | None = None,
            device: torch.device | None = None,
            async_ops: bool = False,
        ) -> Coalesced:
            return Coalesced(self, functools.partial(plain, group, device, async_ops), async_ops)

        return _coalescing_manager

    def all_reduce(self, plain: Function) -> Function:
        @functools.wraps(plain)
        def all_reduce(
            tensor: Tensor,
            op: Any = dist.ReduceOp.SUM,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> Any:
            bucket = self._bucket(tensor)
            if self.open is None:
                return plain(tensor, op, group, async_op)

            def compressed() -> CompressedWork | None:
                if bucket is not None:
                    return self._comm.all_reduce(tensor, "dp", group, op, bucket)
                if not self._comm.policy.rules["dp"].off:
                    raw = AllReduce.ring_bytes(tensor.nbytes, dist.get_world_size(group))
                    # Between instances of the distributed optimizer, or of a model that nothing is attached to.
                    self._comm.router.fell_back("dp", "no whole bucket of the attached model", raw)
                return None

            send = functools.partial(plain, tensor, op, group, async_op)
            return self.open.add(Operation(compressed, send, waits=False))

        return all_reduce

    def reduce_scatter(self, plain: Function) -> Function:
        # Megatron's own variant, which sums in float32, is no part of torch and returns a handle of its own.
        own = plain.__module__.partition(".")[0] != "torch"

        @functools.wraps(plain)
        def reduce_scatter_tensor(
            output: Tensor,
            input: Tensor,
            op: Any = dist.ReduceOp.SUM,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> Any:
            bucket = self._bucket(input)
            send = functools.partial(plain, output, input, op=op, group=group, async_op=async_op)
            if self.open is None:
                return send()

            def compressed() -> CompressedWork | None:
                if bucket is None:
                    return None
                return self._comm.reduce_scatter(output, input, "dp", group, op, bucket)

            return self.open.add(Operation(compressed, send, waits=own and async_op))

        return reduce_scatter_tensor

    def all_gather(self, plain: Function) -> Function:
        @functools.wraps(plain)
        def all_gather_into_tensor(
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> Any:
            send = functools.partial(plain, output_tensor, input_tensor, group=group, async_op=async_op)
            if self.open is None:
                return send()
            return self.open.add(
                Operation(lambda: self._gather(output_tensor, input_tensor, group), send, waits=False)
            )

        return all_gather_into_tensor

    def _gather(self, out: Tensor, mine: Tensor, group: dist.ProcessGroup | None) -> Work | None:
        bucket = self._bucket(out)
        if bucket is None or group is None:
            return None
        reason = None
        if out.dtype == torch.float32:
            reason = (
                "float32 parameters are the optimizer's own, and gathering by difference would round them"
            )
        elif self._params_are_master:
            reason = "the optimizer stores only the remainders of parameters (store_param_remainders)"
        if reason is None or self._comm.policy.rules["zero_gather"].off:
            return self._comm.gather_weights(out, mine, group, bucket)
        raw = AllGather.ring_bytes(out.nbytes, dist.get_world_size(group))
        self._comm.router.fell_back("zero_gather", reason, raw)
        return None


def _places(bucket: Any) -> dict[nn.Parameter, tuple[int, int]]:
    """(start, stop) of each parameter in its bucket. Their gradients lie where the parameters do, alignment included."""
    start = bucket.grad_data.storage_offset()
    return {
        parameter: (at := parameter.main_grad.storage_offset() - start, at + parameter.numel())
        for parameter in bucket.params
    }


def _repeated(chunk: nn.Module) -> set[nn.Parameter]:
    """See Note: [Repeated parameters]."""
    return {
        parameter
        for parameter in chunk.parameters()
        if getattr(parameter, "shared_embedding", False)
        or (
            not getattr(parameter, "tensor_model_parallel", False)
            and _compat_comm.tensor_parallel_size(parameter) > 1
        )
    }
