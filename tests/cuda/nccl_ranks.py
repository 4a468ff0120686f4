"""What ranks of NCCL tests do: each call on NCCL beside the same one of gloo, on values that any order of sums gives exactly."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

DTYPES = [
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
REDUCTIONS = ["SUM", "PRODUCT", "MAX", "MIN"]
LARGE = 1_000_003
"""Elements of a message that passes through a ring in several turns, and divides evenly among no number of ranks."""


def _nccl() -> dist.ProcessGroup:
    torch.cuda.set_device(dist.get_rank())  # which torch 2.15 takes for the device of the group
    return dist.new_group(backend="nccl", timeout=timedelta(seconds=60))


def _values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(count) * 7 + rank * 3) % 4 + 1).to(dtype)


def _both(
    collective: Callable[..., Any], group: dist.ProcessGroup, *tensors: torch.Tensor, **options: Any
) -> None:
    """Have the collective write the last of `tensors` by gloo and by NCCL, and compare."""
    *_, by_gloo = on_cpu = [one.clone() for one in tensors]
    *_, by_nccl = on_device = [one.cuda() for one in tensors]
    collective(*on_cpu[::-1], **options)
    collective(*on_device[::-1], group=group, **options)
    assert torch.equal(by_gloo, by_nccl.cpu()), (collective.__name__, options, by_gloo, by_nccl.cpu())


def collectives_equal_those_of_gloo(rank: int) -> None:
    group, world = _nccl(), dist.get_world_size()
    for dtype in DTYPES:
        for name in REDUCTIONS:
            operation = getattr(dist.ReduceOp, name)
            _both(dist.all_reduce, group, _values(rank, 13, dtype), op=operation)
            _both(
                dist.reduce_scatter_tensor,
                group,
                _values(rank, 5 * world, dtype),
                torch.zeros(5, dtype=dtype),
                op=operation,
            )
        _both(dist.broadcast, group, _values(rank, 9, dtype), src=world - 1)
        _both(
            dist.all_gather_into_tensor, group, _values(rank, 4, dtype), torch.zeros(4 * world, dtype=dtype)
        )
        _both(
            dist.all_to_all_single,
            group,
            _values(rank, 3 * world, dtype),
            torch.zeros(3 * world, dtype=dtype),
        )
    _both(dist.all_reduce, group, _values(rank, LARGE, torch.float32))
    mean = _values(rank, LARGE, torch.float32).cuda()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
    total = _values(rank, LARGE, torch.float32)
    dist.all_reduce(total)
    assert torch.equal(mean.cpu(), total / world)


def messages_between_two_ranks_arrive_in_order(rank: int) -> None:
    group, world = _nccl(), dist.get_world_size()
    after, before = (rank + 1) % world, (rank - 1) % world
    sent = [_values(rank, count, torch.float32).cuda() for count in (1, LARGE, 17)]
    received = [torch.zeros_like(one) for one in sent]
    requests = [dist.P2POp(dist.isend, one, after, group) for one in sent]
    requests += [dist.P2POp(dist.irecv, one, before, group) for one in received]
    for work in dist.batch_isend_irecv(requests):
        work.wait()
    for one in received:
        assert torch.equal(one.cpu(), _values(before, one.numel(), torch.float32))


def a_collective_waits_for_the_stream_and_the_stream_for_it(rank: int) -> None:
    """What a stream wrote late is what is sent; what comes in is there after `wait`, and the host waits for neither."""
    group = _nccl()
    a = torch.ones(512, 512, device="cuda")
    for _ in range(20):
        a = a @ torch.full_like(a, 1 / 512)
    work = dist.all_reduce(a, group=group, async_op=True)
    work.wait()
    assert torch.equal((a + 1).cpu(), torch.full((512, 512), dist.get_world_size() + 1.0))


def a_group_of_some_ranks_is_split_off(rank: int) -> list[float]:
    torch.cuda.set_device(rank)
    whole = dist.new_group(
        backend="nccl", device_id=torch.device("cuda", rank), timeout=timedelta(seconds=60)
    )
    x = torch.full((3,), float(rank), device="cuda")
    dist.all_reduce(x, group=whole)
    even = dist.new_group([0, 2], backend="nccl")
    y = torch.full((3,), float(rank), device="cuda")
    if rank in (0, 2):
        dist.all_reduce(y, group=even)
    return [*x.tolist(), *y.tolist()]


class Communicator:
    """NCCL's own functions, where torch's watchdog would end the process at the first error."""

    def __init__(self, rank: int) -> None:
        torch.cuda.set_device(rank)
        self._nccl = ctypes.CDLL("libnccl.so.2")
        self._nccl.ncclGetLastError.restype = ctypes.c_char_p
        unique = (ctypes.c_char * 128)()
        if rank == 0:
            self._call("ncclGetUniqueId", unique)
        shared = torch.tensor(list(bytes(unique)))
        dist.broadcast(shared, 0)
        self._id = _UniqueId.from_buffer_copy(bytes(shared.tolist()))
        self._communicator = ctypes.c_void_p()
        self._call(
            "ncclCommInitRank", ctypes.byref(self._communicator), dist.get_world_size(), self._id, rank
        )
        self.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()

    def _call(self, function: str, *arguments: Any) -> None:
        assert getattr(self._nccl, function)(*arguments) == 0, function

    def all_reduce(self, tensor: torch.Tensor) -> None:
        address = ctypes.c_void_p(tensor.data_ptr())
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        float32, a_sum = 7, 0
        size = ctypes.c_size_t(tensor.numel())
        self._call("ncclAllReduce", address, address, size, float32, a_sum, self._communicator, stream)

    def abort(self) -> None:
        self._call("ncclCommAbort", self._communicator)

    def error(self) -> tuple[int, str]:
        """The error that a call on the stream has met, waited for."""
        torch.cuda.synchronize()
        result = ctypes.c_int()
        self._call("ncclCommGetAsyncError", self._communicator, ctypes.byref(result))
        return result.value, self._nccl.ncclGetLastError(self._communicator).decode()


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


def different_calls_are_an_error(rank: int) -> tuple[int, str]:
    communicator = Communicator(rank)
    communicator.all_reduce(torch.zeros(9 if rank else 8, device="cuda"))
    return communicator.error()


def a_rank_that_dies_is_an_error_of_the_others(rank: int) -> tuple[int, str]:
    communicator = Communicator(rank)
    if rank == 1:
        os._exit(1)
    communicator.all_reduce(torch.zeros(4, device="cuda"))
    return communicator.error()


def an_abort_ends_what_waits_for_a_rank_that_never_calls(rank: int) -> None:
    communicator = Communicator(rank)
    if rank == 0:
        communicator.all_reduce(torch.zeros(4, device="cuda"))
        communicator.abort()
        torch.cuda.synchronize()
