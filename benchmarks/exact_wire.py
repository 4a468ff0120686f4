"""Bytes that ranks send with the preset `exact` over those without, at equal weights.

Layouts of DeepSpeed and megatron-core are trained on the demo's text, in bfloat16 with float32 master copies, once without
SSDTrain and once with the preset and nothing else; after the last step the weights of every rank are compared by their digests.
Models are small, so that 200 steps take minutes: ratios of larger ones are no larger, because headers count for less.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.two_nodes.ranks import Ranks

COMM = {"preset": "exact", "min_bytes": 0, "probe": False}


class Layout(NamedTuple):
    """A training.

    Args:
        named: dimensions whose bytes are the figures of the benchmark, by the name of the figure.
    """

    world: int
    command: str
    named: dict[str, tuple[str, ...]]


_STAGES = {"pp_wire": ("pp_forward", "pp_backward")}
_MODEL = "--bf16 --hidden 256 --heads 4 --sequence 128 --batch 4"

LAYOUTS = {
    **{
        f"zero{stage}": Layout(
            2,
            f"-m benchmarks.two_nodes.deepspeed_zero2 {_MODEL} --vocabulary 1024 --stage {stage}",
            {"zero_gather_wire": ("zero_gather",)},
        )
        for stage in (1, 2, 3)
    },
    "pipeline": Layout(
        2,
        f"-m benchmarks.loss_training {_MODEL} --layout pp2 --held-out-sequences 32 --steps {{steps}}",
        _STAGES,
    ),
    "megatron": Layout(
        4,
        "-m tests.megatron.cpu -m benchmarks.two_nodes.megatron_gpt --tensor 2 --pipeline 2 --sequence-parallel --experts 4 "
        "--distributed-optimizer --bf16 --hidden 256 --heads 4 --sequence 128 --batch 4 --steps {steps}",
        {**_STAGES, "ep_wire": ("ep",)},
    ),
}
"""DeepSpeed's ZeRO-1 to 3 and its pipeline; megatron-core with tensor, sequence and pipeline parallelism and experts."""


def wire(chosen: Any) -> dict[str, Any]:
    """Ratios of sent bytes by figure (the largest of all layouts) and by dimension of each layout; whether weights were equal."""
    figures: dict[str, float] = {}
    layouts: dict[str, Any] = {}
    for name in chosen.layouts:
        layout = LAYOUTS[name]
        plain, exact = (_train(layout, chosen, comm) for comm in (None, COMM))
        ratios, overflows = _sent(exact)
        for figure, dimensions in layout.named.items():
            figures[figure] = max(
                figures.get(figure, 0.0), *(ratios[one] for one in dimensions if one in ratios)
            )
        equal = [one["sha256"] for one in plain] == [one["sha256"] for one in exact]
        losses = [one["losses"] for one in plain] == [one["losses"] for one in exact]
        layouts[name] = {"equal": equal and losses, "overflows": overflows, **ratios}
        print(f"{name}: {layouts[name]}", flush=True)
    return {
        **figures,
        "sha1_equal": all(one["equal"] for one in layouts.values()),
        "wire_steps": chosen.wire_steps,
        "wire_layers": chosen.wire_layers,
        "wire": layouts,
    }


def _train(layout: Layout, chosen: Any, comm: dict[str, Any] | None) -> list[dict[str, Any]]:
    steps = chosen.wire_steps
    command = [*layout.command.format(steps=steps).split(), "--layers", str(chosen.wire_layers)]
    block = [] if comm is None else ["--comm", json.dumps(comm)]
    with Ranks([*command, *block], layout.world, timeout=1800) as ranks:
        for done in range(0, steps, 10):
            ranks.tell("step", count=min(10, steps - done))
        return ranks.finish()


def _sent(results: Sequence[dict[str, Any]]) -> tuple[dict[str, float], int]:
    """Ratios by dimension, of all ranks, and the payloads that overflowed."""
    totals: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    overflows = 0
    for result in results:
        for dimension, figures in (result["meter"] or {}).items():
            totals[dimension][0] += figures["wire_bytes"]
            totals[dimension][1] += figures["raw_bytes"]
            overflows += figures["overflows"]
    return {name: sent / raw for name, (sent, raw) in totals.items() if raw}, overflows
