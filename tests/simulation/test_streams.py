"""Memory that two streams use: one that allocated it and one that saves it, two that save it, two that need it in backward."""

from __future__ import annotations

import torch

from ssdtrain.offload.tensors.tape import Tape
from tests.simulation.streams import SIZE, Streams


def test_memory_that_another_stream_allocated_is_there_until_its_copy_has_left(streams: Streams) -> None:
    """Without the engine the graph holds it. The stream that allocated it has nothing to do, and would use it again at once."""
    held = []
    for number in range(8):
        batch = streams.make(number + 1)
        streams.side.wait(streams.compute.record())
        with streams.device.stream(streams.side):
            streams.read(batch, number + 1, 2e-3, f"forward {number}")
            held.append(streams.save(batch))
        del batch
    streams.end_of_forward()
    with streams.device.stream(streams.side):
        for number in reversed(range(8)):
            streams.read(streams.engine.unpack(held.pop()), number + 1, 1e-3, f"backward {number}")
    streams.check()
    assert streams.engine.snapshot().loaded_bytes >= 4 * SIZE


def test_memory_is_there_for_a_second_stream_that_saved_it_too(streams: Streams) -> None:
    held = [streams.save(streams.make(9)) for _ in range(4)]  # so much may be on its way at a time
    shared = streams.make(7)
    held.append(streams.save(shared))
    streams.side.wait(streams.compute.record())
    with streams.device.stream(streams.side):
        streams.read(shared, 7, 0.5, "the second stream")
        held.append(streams.save(shared))
    del shared
    assert streams.engine.snapshot().shared_tensors == 1
    for _ in range(4):
        held.append(streams.save(streams.make(9)))
        streams.machine.timeline.spend(2e-3)
    assert not streams.side.idle
    streams.check()


def test_a_view_is_copied_together_while_its_memory_is_there(streams: Streams) -> None:
    """Its operator is known to have ended when another one saves, perhaps on another stream: that is where it is copied."""
    wide = streams.device.empty(10 * SIZE)
    held = [streams.engine.pack(streams.tape, wide.view(-1, 10)[:, 3])]
    torch.ones(1, requires_grad=True).sin()
    with streams.device.stream(streams.side):
        held.append(streams.save(streams.make(1)))
    assert streams.engine.snapshot().packed_bytes == SIZE
    assert streams.device._used[wide.data_ptr()].users == [streams.side]


def test_a_second_stream_waits_for_the_decoding_on_the_first(streams: Streams) -> None:
    mask = streams.device.empty(SIZE).fill_(1).view(torch.bool)
    held = [streams.save(mask), streams.save(mask)]
    del mask
    streams.end_of_forward()
    streams.kernel(1.0)  # what comes before the decoding
    first = streams.engine.unpack(held[0])
    with streams.device.stream(streams.side):
        second = streams.engine.unpack(held[1])
        streams.kernel(1e-3)
    busy_until = streams.machine.timeline.now + 0.9
    streams.check()
    assert streams.engine.snapshot().encoded_bytes == SIZE and bool(first.all()) and bool(second.all())
    assert streams.side.log[-1].start > busy_until


def test_a_record_is_complete_when_all_streams_have_come_to_its_end(streams: Streams) -> None:
    """The last tensor was saved on a stream that has little to do."""
    engine = streams.engine
    engine.recorder.request("codec", True)
    streams.kernel(1.0)
    tapes = []
    for stream in (streams.compute, streams.side):
        with streams.device.stream(stream):
            tapes.append(Tape(len(tapes), 0))
            engine.begin_forward(tapes[-1])
            engine.pack(tapes[-1], streams.make(1))
            engine.finish_forward(tapes[-1])
    engine.drain()
    record = engine.recorder.take("codec")
    streams.machine.timeline.spend(0.5)
    assert not record.passed()
    streams.machine.timeline.spend(1.0)
    assert record.passed()
    assert [len(tape.regions) for tape in record.tapes()] == [1, 1]
