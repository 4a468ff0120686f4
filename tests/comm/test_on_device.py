"""What collectives do on a GPU, as far as it shows without one."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from ssdtrain.codecs import kernels, make_fixed_size_codec
from ssdtrain.codecs.base import Pieces
from ssdtrain.comm import probe, topology
from ssdtrain.comm.algorithms import Call, Coders
from ssdtrain.comm.coding import Coder, TensorPiece
from ssdtrain.comm.communicator import agreed_hosts
from ssdtrain.comm.meter import CommMetrics, Meter
from ssdtrain.comm.notices import Notices
from ssdtrain.comm.policy import DEVICE_CHUNK, Policy
from ssdtrain.comm.routing import Router
from ssdtrain.comm.work import CompressedWork
from ssdtrain.config import CommConfig
from ssdtrain.planner.agreement import Agreement
from tests.codecs.common import KEY

CUDA = torch.device("cuda", 0)


def test_pieces_are_larger_on_a_device_and_no_smaller_than_the_config_says() -> None:
    policy = Policy.from_config(CommConfig(preset="safe"))
    assert policy.for_device(torch.device("cpu")).chunk == 4 << 20
    assert policy.for_device(CUDA).chunk == DEVICE_CHUNK == 32 << 20
    assert Policy.from_config(CommConfig(preset="safe", chunk="64MiB")).for_device(CUDA).chunk == 64 << 20


def test_without_a_triton_that_starts_codecs_run_in_plain_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is installed with torch, and needs a C compiler and the driver's library when it starts."""
    triton = pytest.importorskip("triton", reason="needs Triton")

    def no_compiler(driver: Any) -> object:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(type(triton.runtime.driver), "active", property(no_compiler))
    kernels._triton_available.cache_clear()
    try:
        assert not kernels.usable("auto", cast(torch.Tensor, SimpleNamespace(is_cuda=True)))
    finally:
        kernels._triton_available.cache_clear()
    assert "Failed to find C compiler" in caplog.text


def test_ranks_exchange_objects_on_their_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that names its device, and makes none current, has the first one current on all ranks: NCCL refuses two ranks on
    one device."""
    current: list[torch.device] = []
    sent: list[torch.device] = []

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    def all_gather_object(found: list[Any], own: Any, group: Any = None) -> None:
        sent.append(current[-1])
        found[:] = [own] * len(found)

    def broadcast_object_list(found: list[Any], src: int, group: Any) -> None:
        sent.append(current[-1])

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast_object_list)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1, 2, 3])
    monkeypatch.setattr(topology, "_subgroup", lambda group, ranks: None)
    mine, group = torch.device("cuda", 3), cast(dist.ProcessGroup, object())
    policy = Policy.from_config(CommConfig(preset="safe", dp="off"))
    agreed_hosts(policy, mine)
    Notices(mine).exchange()
    Router(policy, ["a", "a", "b", "b"], Meter(), Notices(mine), mine).topology(group)
    agreement = Agreement(group, (), mine)
    agreement.check_same(())
    agreement.exchange({}, False, ())
    agreement.decide(lambda: ())
    assert sent == [mine] * 6


def test_the_probe_waits_for_its_own_stream_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the whole device may close a circle: other streams wait for peers, which wait for this rank."""
    calls: list[Any] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            pass

        def record(self, stream: Any) -> None:
            calls.append(("record", stream))

        def synchronize(self) -> None:
            calls.append("synchronize")

    def reject(*_: Any) -> None:
        raise AssertionError("the whole device")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "mine")
    monkeypatch.setattr(torch.cuda, "synchronize", reject)
    probe._synchronize(CUDA)
    assert calls == [("record", "mine"), "synchronize"]


class FakeStream:
    device = torch.device("cuda", 1)

    def __init__(self) -> None:
        self.waited: list[Any] = []

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)


@pytest.mark.parametrize("capturing", [False, True])
def test_the_stream_of_the_tensors_device_waits_and_a_capture_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capturing: bool
) -> None:
    """The current device need not be that of the tensors. An event of a capture can never be asked."""
    streams = {None: FakeStream(), FakeStream.device: FakeStream()}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[device])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(
        torch.cuda, "Event", lambda enable_timing: SimpleNamespace(record=lambda stream: None)
    )
    meter = Meter()
    work = CompressedWork([iter(())], CommMetrics(), meter, FakeStream())
    assert work.wait()
    assert streams[FakeStream.device].waited and not streams[None].waited
    assert len(meter._pending) == (0 if capturing else 1)


class Recording:
    """A codec that notes what it is asked to encode at once."""

    def __init__(self) -> None:
        self.codec = make_fixed_size_codec("int8")
        self.asked: list[tuple[int, Pieces]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codec, name)

    def encode_pieces(self, first: torch.Tensor, out: torch.Tensor, pieces: Pieces, key: Any) -> bool:
        self.asked.append((first.data_ptr(), pieces))
        return True


def asked(outgoing: list[list[TensorPiece]], index: int) -> list[tuple[int, Pieces]]:
    codec = Recording()
    coder = Coder(codec, torch.float32)
    call = Call(None, Coders(coder, coder), coder, CommMetrics(), "dp|layer", KEY)
    size = coder.nbytes(TensorPiece(outgoing[0][0].values))
    packed = torch.empty((len(outgoing) - 1) * size, dtype=torch.uint8)
    assert call.encode_for_peers(coder, outgoing, index, packed, "part") == bool(codec.asked)
    return codec.asked


def test_shards_at_equal_distances_are_encoded_at_once() -> None:
    x = torch.zeros(4, 1000)
    shards = [[TensorPiece(row[:512])] for row in x]
    assert asked(shards, 2) == [(x.data_ptr(), Pieces(3, 1000, 16 + 16 + 512, 2))]
    assert asked([[TensorPiece(row[:512], ((0, 4),))] for row in x], 2) == []
    assert asked([*shards[:3], [TensorPiece(x[3, :500])]], 2) == []
    assert asked([shards[0], shards[2], shards[1], shards[3]], 2) == []
    assert asked([[piece, piece] for (piece,) in shards], 2) == []
