"""`offload.codec: "auto"`, the default: where it is tried, what it decides, and that it changes no bit."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ssdtrain.config import load_config
from ssdtrain.offload import build, free_codec
from ssdtrain.offload.free_codec import PRICED_STEPS, TRIAL, UNTRIED_STEPS
from ssdtrain.offload.metrics import OffloadMetrics
from ssdtrain.profile.passes import StepRecord
from ssdtrain.runtime import Runtime
from tests.offload.conftest import MakeRuntime
from tests.offload.test_exact import there_and_back
from tests.support.saved import bits

BEFORE = UNTRIED_STEPS + PRICED_STEPS
"""Number of steps before the trial."""
TENSORS = [torch.randn(1 << 16).bfloat16(), torch.randn(1 << 16)]


class Waits:
    """Sets how long each step waits, and what a step of the trial takes with the codec, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.each, self.total, self.coded = 1.0, 0.0, 0.5
        self._encodes = False
        monkeypatch.setattr(OffloadMetrics, "stall_seconds", property(lambda metrics: self.total))
        monkeypatch.setattr(free_codec, "_total", self.took)
        monkeypatch.setattr(free_codec, "PEAK_TOLERANCE", 1.0)  # of so small tensors buffers are the most

    def took(self, _: object) -> float:
        """How long the step took that has just ended."""
        return self.coded if self._encodes else 1.0

    def step(self, runtime: Runtime) -> bool:
        """Take a step, and return whether it encodes."""
        coded = self._encodes = runtime.engine.coding.rule is not None
        before = runtime.statistics().offload.encoded_bytes
        with runtime.step():
            came = there_and_back(runtime, TENSORS)
            self.total += self.each
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(came, TENSORS, strict=True))
        encodes = runtime.statistics().offload.encoded_bytes > before
        assert encodes is coded
        return encodes


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    return Waits(monkeypatch)


def test_it_is_the_default() -> None:
    assert load_config({"offload": {"directories": "/nvme"}}).offload.codec == "auto"  # type: ignore[union-attr]


def test_steps_that_wait_are_tried_with_the_codec_in_turn(
    waits: Waits, make_runtime: MakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ssdtrain")
    runtime = make_runtime()
    encoded = [waits.step(runtime) for _ in range(BEFORE + len(TRIAL) + 3)]
    assert encoded == [False] * BEFORE + [*TRIAL] + [True] * 3
    why = "forward and backward take 500.0 ms with it, 1000.0 without"
    assert runtime.offload.decisions() == f'offload.codec "auto": exact, because {why}'  # type: ignore[union-attr]
    assert caplog.text.count(why) == 1
    assert not runtime.engine.recorder.active


@pytest.mark.parametrize("coded", [1.2, 1.0, 0.995])
def test_it_stays_only_where_steps_are_shorter(coded: float, waits: Waits, make_runtime: MakeRuntime) -> None:
    waits.coded = coded
    runtime = make_runtime()
    assert not [waits.step(runtime) for _ in range(BEFORE + len(TRIAL) + 2)][-2:].count(True)
    assert "no codec" in runtime.offload.decisions()  # type: ignore[union-attr]


def test_a_step_that_is_longer_in_one_pair_is_enough_to_leave_it(
    waits: Waits, make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = iter([0.5, 1.0, 1.0, 0.5, 1.1, 1.0])
    monkeypatch.setattr(free_codec, "_total", lambda _: next(taken))
    runtime = make_runtime()
    assert not [waits.step(runtime) for _ in range(BEFORE + len(TRIAL) + 1)][-1]
    assert "not in each pair" in runtime.offload.decisions()  # type: ignore[union-attr]


def test_a_higher_peak_is_not_taken_for_shorter_steps(
    waits: Waits, make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = make_runtime()
    meter, encode = runtime.engine.meter, runtime.engine.coding.encode

    def encode_in_much_memory(region: Any) -> Any:
        meter.adjust(1 << 24)
        meter.adjust(-(1 << 24))
        return encode(region)

    monkeypatch.setattr(runtime.engine.coding, "encode", encode_in_much_memory)
    assert not [waits.step(runtime) for _ in range(BEFORE + len(TRIAL) + 1)][-1]
    assert "activations take" in runtime.offload.decisions()  # type: ignore[union-attr]


def test_steps_that_do_not_wait_cost_nothing(waits: Waits, make_runtime: MakeRuntime) -> None:
    waits.each = 0.0
    runtime = make_runtime()
    for _ in range(BEFORE + 1):
        assert not runtime.engine.recorder.active
        assert not waits.step(runtime)
    assert "waited for less than it would take" in runtime.offload.decisions()  # type: ignore[union-attr]


def test_it_is_asked_again(waits: Waits, make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Nothing waits. 2. A drive became slower: the codec is used. 3. It is fast again, and steps are longer with the codec."""
    rest = 5
    monkeypatch.setattr(free_codec, "ASKED_AGAIN", rest)
    runtime = make_runtime()
    waits.each = 0.0
    assert not any(waits.step(runtime) for _ in range(BEFORE))
    waits.each = 1.0
    assert [waits.step(runtime) for _ in range(rest + BEFORE + len(TRIAL) + 1)][-1]
    waits.coded = 1.5
    assert all(waits.step(runtime) for _ in range(rest - 1))
    assert sum(waits.step(runtime) for _ in range(len(TRIAL))) == len(TRIAL) // 2
    assert not waits.step(runtime)


def test_a_measurement_that_fails_is_a_warning(
    make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("no memory for it")

    monkeypatch.setattr(free_codec, "_on_cpu", fail)
    runtime = make_runtime()
    assert runtime.engine.options.codec is None
    assert "could not be measured: no memory for it" in caplog.text
    there_and_back(runtime, TENSORS)


def test_what_is_measured_is_none_of_a_dispatch_mode(
    make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime may be made under torch's fake tensors, whose memory a codec in C must not be given."""

    class Refuses(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, *_: object) -> Any:
            raise AssertionError(f"{function} came by the mode")

    monkeypatch.setattr(free_codec, "_on_cpu", free_codec._on_cpu.__wrapped__)
    with Refuses():
        runtime = make_runtime()
    assert runtime.engine.options.codec is not None


@pytest.mark.parametrize(
    "config",
    [
        {"offload": {"amount": "auto"}},
        {"offload": {"device_budget": "1GiB"}},
        {"offload": {"amount": 0}},
        {"offload": {"amount": "all", "codec": "off"}},
        {"offload": {"amount": "all"}, "plan": {"device_limit": "1GiB"}},
        {"report": {"path": "{directory}/report"}},
    ],
    ids=lambda config: str(config),
)
def test_nothing_is_measured_where_nothing_is_waited_for(
    config: dict[str, dict[str, Any]], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> None:
        raise AssertionError("a codec was measured")

    monkeypatch.setattr(build, "free_codec", measure)
    whole = {
        section: {
            key: str(value).format(directory=tmp_path) if key == "path" else value
            for key, value in keys.items()
        }
        for section, keys in config.items()
    }
    if "offload" in whole:
        whole["offload"]["directories"] = str(tmp_path)
    with Runtime(load_config(whole)) as runtime:
        assert runtime.engine is None or runtime.engine.options.codec is None


@pytest.mark.parametrize("named", [True, False])
def test_that_no_step_ends_is_said_to_who_asked_for_it(
    named: bool, make_runtime: MakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = make_runtime(**({"codec": "auto"} if named else {}))
    text = runtime.offload.on_unended_step()  # type: ignore[union-attr]
    assert ("nothing is encoded" in text) is named
    assert "no codec, because no step ends" in runtime.offload.decisions()  # type: ignore[union-attr]


def test_a_step_that_fails_with_it_ends_the_trial_and_one_without_it_does_not_count(
    waits: Waits, make_runtime: MakeRuntime
) -> None:
    """Who catches that there is no memory and goes on has shorter steps with the codec: they have no backward."""
    runtime = make_runtime()

    def fail() -> None:
        with pytest.raises(torch.OutOfMemoryError), runtime.step(), runtime.forward():
            there_and_back(runtime, TENSORS)
            raise torch.OutOfMemoryError("not of the engine")

    for _ in range(BEFORE + 1):
        waits.step(runtime)
    assert runtime.engine.coding.rule is None
    fail()
    assert runtime.offload.decisions() == ""  # type: ignore[union-attr]
    assert not waits.step(runtime) and runtime.engine.coding.rule is not None
    fail()
    assert "no codec, because a step with it has failed" in runtime.offload.decisions()  # type: ignore[union-attr]
    assert not waits.step(runtime)


@pytest.mark.parametrize("steps", range(BEFORE + len(TRIAL) + 2))
def test_nothing_is_recorded_when_the_runtime_is_closed(
    steps: int, waits: Waits, make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training may go on, with forwards that still come by the engine."""
    monkeypatch.setattr(free_codec, "ASKED_AGAIN", 2)
    runtime = make_runtime()
    for _ in range(steps):
        waits.step(runtime)
    runtime.close()
    for _ in range(5):
        with runtime.step(), runtime.forward():
            torch.ones(1, requires_grad=True).sin()
    assert not runtime.engine.recorder.active and not runtime.engine.recorder._records


def test_the_record_of_a_step_is_not_kept_until_the_trial_is_over(
    waits: Waits, make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of many microbatches is large."""
    taken: list[weakref.ref[StepRecord]] = []
    runtime = make_runtime()
    take = runtime.engine.recorder.take

    def watched(user: str) -> StepRecord:
        record = take(user)
        taken.append(weakref.ref(record))
        return record

    monkeypatch.setattr(runtime.engine.recorder, "take", watched)
    for _ in range(BEFORE + len(TRIAL) - 1):
        waits.step(runtime)
    gc.collect()
    assert not [one for one in taken if one() is not None]


@pytest.mark.parametrize("codec", ["exact", "int8"])
def test_no_memory_for_a_payload(
    codec: str, make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `exact` the tensor leaves as it is; what backward gets of a lossy codec must not depend on free memory."""
    runtime = make_runtime(codec=codec)

    def fail(region: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runtime.engine.coding, "encode", fail)
    if codec == "int8":
        with pytest.raises(torch.OutOfMemoryError):
            there_and_back(runtime, TENSORS)
        return
    came = there_and_back(runtime, TENSORS)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(came, TENSORS, strict=True))
    found = runtime.statistics()
    assert found.offload.uncoded_bytes == found.store.bytes_written == sum(one.nbytes for one in TENSORS)
