"""Compressed collectives over a real network: bytes at the interface, tokens per second, held-out loss.

    python -m benchmarks.collectives --json
    python -m benchmarks.collectives --json --part speed --presets balanced --steps 12

Two nodes are two network namespaces with a token bucket between them (`benchmarks.two_nodes`): root and iproute2 are needed, and
without them the parts on the network are skipped, with the reason under `skipped`. Parts:

- wire: DeepSpeed ZeRO-0, a GPT of 86 M parameters, fp32: all gradients through one all-reduce, so that both halves of data
  parallelism are all that is sent. Bytes at the interfaces, headers included, over those of the same run without SSDTrain
  (`dp_wire_ratio`) and over the ring's formula (`dp_wire_ratio_formula`). Embeddings, norms and biases go as they are: of this
  model 0.8%, of one with a large vocabulary much more.
- layouts: bytes of ZeRO-1, 2 and 3 in float32 and bfloat16, of a GPT of 3.3 M parameters of which a table of 16384 x 128 is
  excluded (`large`) and of one with a byte vocabulary (`small`), over those of the same run without SSDTrain, by dimension and at
  the interface. None may be above 1.
- speed: ZeRO-2 of the GPT with half as many blocks (43 M) at 1 and 10 Gbit/s, nothing overlapped: plain, silent (large messages
  not sent) and every preset alive at once, a step each in turn; ratios are medians over neighbours in time. f = 1 -
  t(silent)/t(plain). Under `best` the same of each variant's fastest step, which says more where the machine has other work.
- megatron: megatron-core, TP2 x DP2 and PP2 x DP2 on two nodes of two ranks, the same way. Needs the tests' arrangement for CPU.
- loss: `benchmarks.loss_gap`.

`warmup_steps` is 0 here, since what is measured is the state after it; the part `wire` has no probe either.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import loss_gap
from benchmarks.common import finish, hardware, parser
from benchmarks.two_nodes.network import Network, network, why_not
from benchmarks.two_nodes.variants import LAYOUTS, PLAIN, SILENT, Measured, comm_arguments, measure
from ssdtrain.tools.bench.ratios import paired_ratio

PARTS = ("wire", "layouts", "speed", "megatron", "loss")
PRESETS = ("safe", "balanced", "aggressive", "paper-zhybrid")
DELAY_MS = 0.1
AGREEMENT = 0.02
"""How far SSDTrain's count may be from the interface's."""
RATES = {"1g": "1gbit", "10g": "10gbit"}

Note = Callable[[str], None]


def limit(fraction: float, ratio: float) -> float:
    """The speed-up that sending `ratio` times fewer bytes can give where `fraction` of a step is communication."""
    return 1 / ((1 - fraction) + fraction / ratio)


def ring_bytes(found: Measured, nodes: int) -> float:
    """What a ring all-reduce of all fp32 gradients sends in a step, all nodes together: N times 2(N-1)/N S."""
    return 2 * (nodes - 1) * 4.0 * found.about["parameters"]


def wire(on: Network, options: argparse.Namespace, note: Note) -> dict[str, Any]:
    on.shape("10gbit", DELAY_MS)
    variants: dict[str, Sequence[str]] = {PLAIN: []}
    for preset in options.presets:
        variants[preset] = comm_arguments({"preset": preset, "warmup_steps": 0, "probe": False})
    extra = ["--layers", "12", "--batch", "1", *options.model]
    # Sizes do not depend on the data: two steps are enough to see that none is left out.
    found = measure(on, LAYOUTS["deepspeed_zero0"], variants, steps=2, warmup=1, extra=extra, note=note)
    plain = found[PLAIN]
    formula = ring_bytes(plain, len(on.nodes))
    presets = {name: one for name, one in found.items() if name != PLAIN}
    counters = {
        name: one.metered_total("wire_bytes") / sum(map(sum, one.sent_bytes)) for name, one in presets.items()
    }
    return {
        "dp_wire_ratio": {name: one.sent_per_step / plain.sent_per_step for name, one in presets.items()},
        "dp_wire_ratio_formula": {name: one.sent_per_step / formula for name, one in presets.items()},
        "plain_over_ring_formula": plain.sent_per_step / formula,
        "counter_over_interface": counters,
        "counter_matches_interface": all(abs(value - 1) <= AGREEMENT for value in counters.values())
        if counters
        else None,
        "wire_parameters": plain.about["parameters"],
        "wire_replicas_equal": all(one.replicas_equal for one in found.values()),
    }


VOCABULARIES = {"small": "256", "large": "16384"}


def layouts(on: Network, options: argparse.Namespace, note: Note) -> dict[str, Any]:
    """Bytes of ZeRO-1 to 3 with `balanced`, by dtype and vocabulary."""
    on.shape("10gbit", DELAY_MS)
    compressed = comm_arguments({"preset": "balanced", "warmup_steps": 0, "probe": False, "min_bytes": 0})
    found: dict[str, Any] = {}
    for stage in (1, 2, 3):
        for dtype in ("float32", "bfloat16"):
            for name, vocabulary in VOCABULARIES.items():
                extra = [
                    "--layers",
                    "4",
                    "--hidden",
                    "128",
                    "--heads",
                    "4",
                    "--sequence",
                    "64",
                    "--batch",
                    "1",
                ]
                extra += ["--vocabulary", vocabulary, *(["--bf16"] if dtype == "bfloat16" else [])]
                variants: dict[str, Sequence[str]] = {PLAIN: [], "balanced": compressed}
                one = measure(
                    on, LAYOUTS[f"deepspeed_zero{stage}"], variants, steps=3, warmup=2, extra=extra, note=note
                )
                balanced, plain = one["balanced"], one[PLAIN]
                raw: dict[str, int] = {}
                wire: dict[str, int] = {}
                for by_name in filter(None, balanced.metered):
                    for dimension, figures in by_name.items():
                        raw[dimension] = raw.get(dimension, 0) + figures["raw_bytes"]
                        wire[dimension] = wire.get(dimension, 0) + figures["wire_bytes"]
                found[f"zero{stage}, {dtype}, {name} vocabulary"] = {
                    "interface": balanced.sent_per_step / plain.sent_per_step,
                    **{name: wire[name] / raw[name] for name in raw if raw[name]},
                }
    return {
        "layouts_wire_ratio": found,
        "no_layout_sends_more": all(ratio <= 1 for one in found.values() for ratio in one.values()),
    }


def speed(
    on: Network, layout: str, options: argparse.Namespace, extra: Sequence[str], note: Note
) -> dict[str, Any]:
    """Of one layout at the rate that the network has."""
    variants: dict[str, Sequence[str]] = {PLAIN: [], SILENT: ["--silent"]}
    for preset in options.presets:
        variants[preset] = comm_arguments({"preset": preset, "warmup_steps": 0})
    found = measure(
        on, LAYOUTS[layout], variants, steps=options.steps, warmup=options.warmup, extra=extra, note=note
    )
    plain = found[PLAIN]
    presets = {name: one for name, one in found.items() if name not in (PLAIN, SILENT)}
    ratios = {name: plain.sent_per_step / one.sent_per_step for name, one in presets.items()}
    seconds = {name: one.seconds for name, one in found.items()}
    return {
        **_beside_the_limit(seconds, ratios),
        "best": _beside_the_limit({name: [min(values)] for name, values in seconds.items()}, ratios),
        "wire_ratio": {name: 1 / ratio for name, ratio in ratios.items()},
        "tokens_per_s": {name: one.tokens_per_s for name, one in found.items()},
        "seconds": seconds,
        "losses": {name: one.results[-1]["losses"] for name, one in found.items()},
        "codec_seconds_per_gb": {
            name: one.metered_total("codec_seconds") / raw * 1e9
            for name, one in presets.items()
            if (raw := one.metered_total("raw_bytes"))
        },
        "fallbacks": {name: _fallbacks(one) for name, one in presets.items()},
        "replicas_equal": all(one.replicas_equal for name, one in found.items() if name != SILENT),
        "parameters": plain.about["parameters"],
        "tokens_per_step": plain.about["tokens_per_step"],
        "bytes_per_step": {name: one.sent_per_step for name, one in found.items()},
    }


def _beside_the_limit(seconds: dict[str, list[float]], ratios: dict[str, float]) -> dict[str, Any]:
    """What presets gained, and what they could gain where nothing but the bytes counts.

    Args:
        seconds: of steps, by variant, neighbours in time at the same place.
        ratios: of bytes, plain over preset.
    """
    fraction = 1 - paired_ratio(seconds[SILENT], seconds[PLAIN])
    faster = {name: paired_ratio(seconds[PLAIN], seconds[name]) for name in ratios}
    limits = {name: limit(fraction, ratio) for name, ratio in ratios.items()}
    return {
        "comm_fraction": fraction,
        "tokens_per_s_ratio": faster,
        "limit": limits,
        "of_limit": {name: faster[name] / limits[name] for name in ratios},
    }


def _fallbacks(found: Measured) -> dict[str, dict[str, int]]:
    """Of rank 0: why calls went uncompressed, by dimension."""
    meter = found.results[0]["meter"] or {}
    return {name: figures["fallbacks"] for name, figures in meter.items() if figures.get("fallbacks")}


def run(options: argparse.Namespace, note: Note) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    parts = [part for part in PARTS if part in options.part]
    skipped = why_not() if set(parts) - {"loss"} else None
    details: dict[str, Any] = {}
    if skipped is not None:
        note(f"skipped everything on the network: {skipped}")
        figures["skipped"] = skipped
        parts = [part for part in parts if part == "loss"]
    if set(parts) - {"loss"}:
        with network(options.nodes, "1gbit", DELAY_MS) as on:
            figures |= {
                "nodes": options.nodes,
                "round_trip_ms": on.round_trip_seconds() * 1e3,
                "delay_ms": on.delay_ms,
            }
            if not on.delay_ms:
                note(f"this kernel has no netem: no delay of {DELAY_MS} ms is added")
            if "wire" in parts:
                figures |= wire(on, options, note)
            if "layouts" in parts:
                figures |= layouts(on, options, note)
            if "speed" in parts:
                for name in options.rates:
                    on.shape(RATES[name], DELAY_MS)
                    extra = ["--batch", str(options.batch), *options.model]
                    details[name] = speed(on, "deepspeed_zero2", options, extra, note)
                figures |= _headline(details)
            if "megatron" in parts:
                on.shape("1gbit", DELAY_MS)
                for layout in ("megatron_tp2_dp2", "megatron_pp2_dp2"):
                    details[layout] = speed(on, layout, options, [], note)
    if "loss" in parts:
        found = loss_gap.run(
            seeds=options.loss_seeds,
            steps=options.loss_steps,
            layouts=options.loss_layouts,
            variants=options.loss_variants,
            path=options.loss_results,
        )
        figures["loss_gap_upper95"] = found["loss_gap_upper95"]
        details["loss"] = found
    equal = [value["replicas_equal"] for value in details.values()]
    equal += [figures.pop("wire_replicas_equal")] if "wire_replicas_equal" in figures else []
    figures["replicas_equal"] = all(equal) if equal else None
    return {**figures, "details": details}


def _headline(details: dict[str, Any]) -> dict[str, Any]:
    """The keys of the speed part that have a name of their own."""
    figures: dict[str, Any] = {}
    for name in RATES:
        if name in details:
            found = details[name]
            figures["comm_fraction" if name == "1g" else f"comm_fraction_{name}"] = found["comm_fraction"]
            figures[f"tokens_per_s_ratio_{name}"] = found["tokens_per_s_ratio"]
            figures[f"limit_{name}"] = found["limit"]
    first = next(iter(details.values()))
    figures["codec_seconds_per_gb"] = first["codec_seconds_per_gb"]
    return figures


def arguments() -> argparse.ArgumentParser:
    made = parser(__doc__ or "")
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("--part", nargs="+", choices=PARTS, default=["wire", "layouts", "speed", "loss"])
    made.add_argument(
        "--presets", nargs="*", choices=(*PRESETS, "paper-mzhybrid"), default=list(PRESETS[:3]),
        help="none for the uncompressed figures alone",
    )  # fmt: skip
    made.add_argument("--rates", nargs="+", choices=list(RATES), default=list(RATES))
    made.add_argument("--nodes", type=int, choices=(2, 4), default=2)
    made.add_argument("--steps", type=int, default=10, help="of each variant that count, for speed")
    made.add_argument("--warmup", type=int, default=3, help="steps of each variant before those")
    made.add_argument("--batch", type=int, default=2, help="sequences per rank, for speed; more lower f")
    made.add_argument(
        "--model", nargs=argparse.REMAINDER, default=[], help="last: flags of the DeepSpeed workload"
    )
    made.add_argument(
        "--output", type=Path, help="a file for all figures, every step's seconds and losses included"
    )
    loss_gap.add_arguments(made, prefix="loss-")
    return made


@contextmanager
def noting(console: Console) -> Iterator[Note]:
    """One line that changes on a terminal, lines elsewhere."""
    if not console.is_terminal:
        yield lambda text: console.print(text, highlight=False)
        return
    with console.status("") as status:
        yield status.update


def main() -> None:
    options = arguments().parse_args()
    with noting(Console(stderr=True)) as note:
        figures = run(options, note)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({**figures, **hardware()}, indent=1))
    details = figures.pop("details")
    summary = {
        name: {key: value for key, value in found.items() if key not in ("seconds", "losses")}
        for name, found in details.items()
    }
    finish({**figures, **hardware(), "details": summary}, options.json)


if __name__ == "__main__":
    main()
