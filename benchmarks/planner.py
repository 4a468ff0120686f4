"""What the planner predicts against what is measured, and its choice against all others, on this CPU and in virtual time.

    python -m benchmarks.planner --json --parts errors,choice,simulated
    python -m benchmarks.planner --parts memory --plot docs/results/plan-memory.png

errors: on the CPU, for a GPT, a BERT and a T5: `"plan": "auto"` profiles some steps, then plans of keep, recompute and offload
are carried out in turn, interleaved, in one process. `peak_error` is the largest difference of the predicted from the
measured peak of activations, as a part of the measured one; `peak_spread` how far the peaks of three steps of a plan are apart,
at most. `step_time_error` is the largest difference of the time of forward and backward, relative to keeping everything, and
`step_time_noise` how far the measured figures of even and odd rounds are apart, at most. `thread_time_error` and
`thread_time_noise` are the same of the time of the thread that trains: its CPU seconds, and those in which it waited for
stores and loads. Other processes of the machine lengthen it less.

choice: a small GPT with a memory limit. All plans that keep to it are timed in two rounds; the five fastest, the planner's choice
(twice, as a measure of noise), recomputing and keeping everything then in many more. `choice_over_best` is the time of the choice
over that of the fastest (`benchmarks.planner_choice`), `choice_over_itself` the same of its two copies,
`equal_plans_over_choice` of the finalists that do the same with other blocks of the same kind, and `speed_over_recompute` the
throughput of the choice over that of recomputing everything; intervals are those of the median of paired rounds, 95%.

How the peak is measured: by the engine's meter (every storage that autograd saved, once, from its save to its death, and the
engine's own buffers), to which hooks in backward add what recomputation saves, with the reentrant checkpoint: the other one hides
it. Times are those of the other one, which is what plans use. What is freed stays with the process, as on a GPU with torch's
allocator: else a step that keeps everything takes some percent longer in some processes, because its pages are new.

simulated: the same on the simulated device (`benchmarks.planner_simulated`), where figures are exact.

memory: with `--plot FILE` memory over a step on the simulated device, predicted against measured, as a PNG; with the part errors
one of each model on this CPU too.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

import ssdtrain
from benchmarks.common import finish, hardware, parser
from benchmarks.gpu.models import Model
from benchmarks.planner_choice import over_best, with_interval
from benchmarks.planner_errors import Errors, Took, ratios
from benchmarks.planner_simulated import memory_panels, simulated
from examples.support.process_memory import keep_freed_blocks
from ssdtrain.config import CheckpointConfig
from ssdtrain.offload.checkpoint import Checkpoint
from ssdtrain.planner.blocks import RECORDED, WARM_UP
from ssdtrain.planner.controller import PlanController
from ssdtrain.planner.execute import BlockPolicy
from ssdtrain.planner.memory_plot import MemoryPanel, draw_memory
from ssdtrain.planner.model.timeline import simulate
from ssdtrain.planner.model.types import StepTimeline
from ssdtrain.planner.plans import Limits, SearchProblem
from ssdtrain.planner.recompute.modules import recompute_modules
from ssdtrain.planner.search import search
from ssdtrain.profile.blocks import find_blocks
from ssdtrain.runtime import Runtime
from ssdtrain.tools.bench.ratios import interval

VOCABULARY = 512
REENTRANT = Checkpoint(CheckpointConfig(use_reentrant=True))


class Trial:
    """One model that is trained under one plan after the other.

    Args:
        kind: see `benchmarks.gpu.models`.
        directory: on the drive.
    """

    def __init__(
        self, kind: str, directory: Path, *, layers: int, hidden: int, sequence: int, batch: int
    ) -> None:
        torch.manual_seed(0)
        size = {"hidden": hidden, "layers": layers, "heads": hidden // 64, "positions": sequence}
        self.model = Model(kind, vocabulary=VOCABULARY, **size)
        self.tokens, self.targets = (torch.randint(VOCABULARY, (batch, sequence)) for _ in range(2))
        offload = {"directories": str(directory), "min_bytes": "64KiB", "in_flight": "48MiB"}
        config = {"plan": {"max_slowdown": 0.5}, "offload": offload, "report": {"interval": 0}}
        self.runtime: Runtime = ssdtrain.attach(self.model, config)
        assert self.runtime.engine is not None
        self.engine = self.runtime.engine
        (self.auto,) = (one for one in self.runtime.features if isinstance(one, PlanController))
        for _ in range(WARM_UP + RECORDED + 8):
            self.step()
            self.runtime.step_end()
            if self.auto.problem is not None:
                break
        assert self.auto.problem is not None, "nothing was written to the drive"
        # Of whole blocks, since all plans are tried.
        self.problem: SearchProblem = replace(self.auto.problem, by_parts=False)
        self.auto.detach()  # what it planned is not followed: plans are carried out one after the other
        self.engine.modules.watch(self.model, owner=self)  # it may have moved nothing, and needed no names
        policy = self.engine.policy
        assert isinstance(policy, BlockPolicy)
        self.policy = policy
        self.blocks = find_blocks(self.model)
        self._undo: Callable[[], None] = lambda: None

    @property
    def names(self) -> list[str]:
        return list(self.blocks)

    def step(self) -> Took:
        """A forward and a backward."""
        waited = self.engine.metrics.stall_seconds
        began, thread_began = time.perf_counter(), time.thread_time()
        loss = self.model(self.tokens, self.targets)
        loss.backward()
        seconds, thread = time.perf_counter() - began, time.thread_time() - thread_began
        for parameter in self.model.parameters():
            parameter.grad = None
        return Took(seconds, thread + self.engine.metrics.stall_seconds - waited)

    def follow(self, plan: Sequence[str], checkpoint: Checkpoint | None = None) -> None:
        """Carry out "keep", "recompute" or "offload" for each block from now on."""
        self._undo()
        actions = dict(zip(self.names, plan, strict=True))
        self.policy.follow(actions)
        again = {name: self.blocks[name] for name, action in actions.items() if action == "recompute"}
        self._undo = recompute_modules(again, checkpoint)

    def predicted(self, plan: Sequence[str], *, memory: bool = False) -> StepTimeline:
        """By the cost model, from the profile. `memory`: with the line of bytes over time."""
        actions = dict(zip(self.names, plan, strict=True))
        names = [actions.get(block.name, "keep") for block in self.problem.blocks]
        problem = replace(self.problem, steps=2)
        choices = problem.choices(["ssd" if name == "offload" else name for name in names])
        return simulate(problem.chunks, choices, problem.order, problem.machine, steps=2, memory=memory)

    def peak(self, plan: Sequence[str]) -> int:
        """Measured bytes of activations: the median of three steps."""
        return int(statistics.median(self.peaks(plan)))

    def peaks(self, plan: Sequence[str]) -> list[int]:
        """Measured bytes of activations in three steps."""
        self.follow(plan, REENTRANT)
        found = []
        for _ in range(3):
            gc.collect()
            self.runtime.reset_peak()
            loss = self.model(self.tokens, self.targets)
            with self._metering():
                loss.backward()
            del loss
            statistics_now = self.runtime.statistics()
            assert statistics_now is not None
            found.append(statistics_now.offload.activation_peak_bytes)
            for parameter in self.model.parameters():
                parameter.grad = None
        return found

    def memory(self, plan: Sequence[str]) -> list[tuple[float, int]]:
        """(seconds from the first forward, bytes) of a step under `plan`, as measured."""
        meter = self.engine.meter
        self.follow(plan, REENTRANT)
        self.step()
        meter.start_timeline()
        began = time.perf_counter()
        self.runtime.reset_peak()
        loss = self.model(self.tokens, self.targets)
        with self._metering():
            loss.backward()
        found = [(max(0.0, when - began), nbytes) for when, nbytes in meter.timeline]
        meter.stop_timeline()
        return found

    def _metering(self) -> AbstractContextManager[Any]:
        """Hooks that count what is saved in backward, where the engine takes nothing."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if self.engine.eligible.may_move(tensor):
                with self.engine._lock:
                    self.engine.meter.drain()
                    self.engine.meter.see(tensor.untyped_storage())
            return tensor if tensor.is_leaf else tensor.detach()

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def seconds(self, plans: Sequence[Sequence[str]], rounds: int) -> list[list[float]]:
        """Of each plan, by the clock, one in each round."""
        return [[took.clock for took in one] for one in self.times(plans, rounds)]

    def times(self, plans: Sequence[Sequence[str]], rounds: int) -> list[list[Took]]:
        """Of each plan, one in each round; the order differs from round to round."""
        found: list[list[Took]] = [[] for _ in plans]
        shuffled = random.Random(0)
        for _ in range(rounds):
            for number in shuffled.sample(range(len(plans)), len(plans)):
                self.follow(plans[number])
                self.step()  # what the plan before left under way
                found[number].append(self.step())
        return found

    def close(self) -> None:
        self._undo()
        self.runtime.close()


def plans_of(count: int) -> list[tuple[str, ...]]:
    """Plans of every sort for so many blocks; the first keeps everything, the second recomputes it."""
    half, third = count // 2, count // 3
    keep, recompute, offload = ("keep",), ("recompute",), ("offload",)
    return [
        keep * count,
        recompute * count,
        offload * count,
        recompute * half + keep * (count - half),
        offload * half + keep * (count - half),
        (recompute + offload) * half + keep * (count - 2 * half),
        offload * third + recompute * third + keep * (count - 2 * third),
        (offload + keep) * half + keep * (count - 2 * half),
    ]


def errors_of(trial: Trial, rounds: int, say: Callable[[str], None]) -> Errors:
    """Predicted against measured, for `plans_of` the model's blocks."""
    plans = plans_of(len(trial.blocks))
    predicted = [trial.predicted(plan) for plan in plans]
    peaks = [trial.peaks(plan) for plan in plans]
    times = trial.times(plans, rounds)
    found = Errors()
    for plan, now, of_steps, took in zip(plans, predicted, peaks, times, strict=True):
        compared = found.compare(now.peak_bytes, of_steps, now.seconds / predicted[0].seconds, took, times[0])
        say(f"  {described(plan)}: {compared}")
    return found


def against_all(trial: Trial, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The planner's choice at a memory limit, against every plan that keeps to it, and against recomputing everything."""
    count = len(trial.blocks)
    every = list(product(("keep", "recompute", "offload"), repeat=count))
    kept, recomputed = trial.peak(every[0]), trial.peak(("recompute",) * count)
    limit = (kept + 2 * recomputed) // 3
    best = search(trial.problem, Limits(limit))[0]
    named = dict(zip((block.name for block in trial.problem.blocks), best.actions, strict=True))
    choice = tuple({"ssd": "offload"}.get(named[name], named[name]) for name in trial.names)
    # Predictions are within some percent: only plans near the limit have to be measured.
    fitting = [
        plan
        for plan in every
        if (expected := trial.predicted(plan).peak_bytes) <= 0.9 * limit
        or (expected <= 1.1 * limit and trial.peak(plan) <= limit)
    ]
    screened = [min(one) for one in trial.seconds(fitting, 2)]
    fastest = sorted(range(len(fitting)), key=screened.__getitem__)[:5]
    fast = [fitting[number] for number in fastest if fitting[number] != choice]
    finalists = [choice, choice, ("recompute",) * count, every[0], *fast]
    times = trial.seconds(finalists, rounds)
    for plan, seconds in zip(finalists, times, strict=True):
        say(f"  {', '.join(plan)}: {statistics.median(seconds):.4f} s")
    equal = [
        ratios(seconds, times[0])
        for plan, seconds in zip(fast, times[4:], strict=True)
        if sorted(plan) == sorted(choice)
    ]
    return {
        "plans_of_brute_force": len(every),
        "plans_that_fit": len(fitting),
        "limit_over_keep": limit / kept,
        "choice": choice,
        "choice_peak_over_limit": trial.peak(choice) / limit,
        **with_interval("choice_over_best", over_best(times[0], times[4:])),
        **with_interval("choice_over_itself", ratios(times[1], times[0])),
        "equal_plans_over_choice": [[statistics.median(one), *interval(one)] for one in equal],
        "choice_over_fastest_median": statistics.median(times[0]) / min(map(statistics.median, times[4:])),
        **with_interval("choice_over_keep", ratios(times[0], times[3])),
        **with_interval("speed_over_recompute", ratios(times[2], times[0])),
    }


def described(plan: Sequence[str]) -> str:
    return ", ".join(f"{plan.count(name)} {name}" for name in dict.fromkeys(plan))


def memory_of(trial: Trial, kind: str) -> MemoryPanel:
    """Memory over a step of a plan of all three actions."""
    plan = plans_of(len(trial.blocks))[5]
    found = trial.predicted(plan, memory=True)
    return MemoryPanel(f"{kind} on a CPU: {described(plan)}", found.memory, trial.memory(plan))


def all_errors(arguments: Any, directory: Path, panels: list[MemoryPanel]) -> dict[str, Any]:
    """The part "errors"."""
    found = Errors()
    worst: dict[str, Mapping[str, float]] = {}
    for kind in arguments.models.split(","):
        print(kind, flush=True)
        trial = Trial(kind, directory, layers=arguments.layers, **_size(arguments))
        one = errors_of(trial, arguments.rounds, lambda text: print(text, flush=True))
        if arguments.plot is not None:
            panels.append(memory_of(trial, kind))
        trial.close()
        worst[kind] = one.figures()
        found.add(one)
    return {"plans": len(found.peak), **found.figures(), "by_model": worst}


def choice(arguments: Any, directory: Path, panels: list[MemoryPanel]) -> dict[str, Any]:
    """The part "choice"."""
    trial = Trial("gpt", directory, layers=4, **_size(arguments))
    try:
        return against_all(trial, 2 * arguments.rounds, lambda text: print(text, flush=True))
    finally:
        trial.close()


def _size(arguments: Any) -> dict[str, int]:
    return {"hidden": arguments.hidden, "sequence": arguments.sequence, "batch": arguments.batch}


def on_the_simulated_device(arguments: Any, directory: Path, panels: list[MemoryPanel]) -> dict[str, Any]:
    """The part "simulated"."""
    return {f"simulated_{name}": value for name, value in simulated().items()}


def memory(arguments: Any, directory: Path, panels: list[MemoryPanel]) -> dict[str, Any]:
    """The part "memory"."""
    if arguments.plot is not None:
        panels += memory_panels()
    return {}


PARTS = {"errors": all_errors, "choice": choice, "simulated": on_the_simulated_device, "memory": memory}


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--layers", type=int, default=6, help="blocks")
    made.add_argument("--hidden", type=int, default=256, help="width, a multiple of 64")
    made.add_argument("--sequence", type=int, default=256, help="tokens")
    made.add_argument("--batch", type=int, default=4, help="sequences")
    made.add_argument("--rounds", type=int, default=6, help="interleaved timings of each plan")
    made.add_argument("--directory", type=Path, default=None, help="on the drive; default: temporary")
    made.add_argument("--models", default="gpt,bert,t5", help="of the part errors")
    made.add_argument("--parts", default=",".join(PARTS), help="what is run")
    made.add_argument("--plot", type=Path, default=None, help="a PNG, see above; needs matplotlib")
    chosen = made.parse_args()
    if chosen.rounds < 2:
        made.error("--rounds must be at least 2: noise is the difference of even and odd rounds")
    parts = chosen.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        made.error(f"--parts: {', '.join(unknown)} is none of {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory(prefix="ssdtrain-") as temporary:
        directory = chosen.directory or Path(temporary)
        figures: dict[str, Any] = {"benchmark": "planner"}
        torch.set_num_threads(1)
        keep_freed_blocks()
        panels: list[MemoryPanel] = []
        for part in parts:
            figures |= PARTS[part](chosen, directory, panels)
        if panels:
            draw_memory(panels, chosen.plot)
        finish({**figures, **hardware(directory), "torch": torch.__version__}, chosen.json)


if __name__ == "__main__":
    main()
