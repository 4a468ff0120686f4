"""Memory against time of one model: keep, recompute some layers, torch's save_on_cpu, offload, and plans at several limits.

    python -m benchmarks.front --json --rows out/front.jsonl --plot out/front.png
    python -m benchmarks.front --draw docs/results/2026-11-27-front.json --plot docs/images/front.png

One GPT in bfloat16 is trained in each way by `benchmarks.gpu.measure`, in one process and with one seed: losses have to be
equal to the bit. A point is the activation peak (highest allocation beyond parameters and gradients) and the median step time,
each over those of keeping everything. Plans have a limit of so much of that peak; `predicted` is what the planner
said. "front" names the ways that no other beats in both.

`--device cpu --dry-run` runs the same with a tiny model: it shows that the script works, nothing else.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import finish, hardware, parser
from benchmarks.gpu.attempts import AttemptFailed, Attempts, TimeIsOver
from benchmarks.gpu.measure import Geometry, be_deterministic
from benchmarks.gpu.sources import MEASURED, digest

GiB = 1 << 30
LIMITS = (0.7, 0.42, 0.55, 0.3)
"""Limits of plans, over the peak of keeping everything."""
STEPS = 6
LOOKS = {
    "keep": ("#444444", "", "keep everything"),
    "recompute": ("#d95f02", "-", "recompute some layers"),
    "save_on_cpu": ("#7570b3", "", "torch save_on_cpu, pinned"),
    "host_auto": ("#e7298a", "", "SSDTrain, the default amount"),
    "plan": ("#1b9e77", "-", "SSDTrain, plans within a limit"),
    "host": ("#66a61e", "", "SSDTrain, everything to host memory"),
}
"""Colour, line and label of each kind of way."""


def ways(layers: int) -> list[str]:
    """In the order of what matters most, should the time end. A plan's limit is a share of the peak of keeping everything."""
    half, quarter = layers // 2, layers // 4
    recomputed = [f"recompute:{count}" for count in (half, layers - quarter, quarter)]
    plans = [f"plan:{limit}" for limit in LIMITS]
    return [
        "keep",
        "recompute",
        "host_auto",
        *plans[:2],
        recomputed[0],
        *plans[2:],
        "host",
        *recomputed[1:],
        "save_on_cpu",
    ]


def with_limit(way: str, found: dict[str, dict[str, Any]]) -> str:
    """The way with the share of a plan's limit in GiB, as `benchmarks.gpu.measure` takes it."""
    kind, _, share = way.partition(":")
    if not kind.startswith("plan"):
        return way
    whole = found["keep"]["peak_bytes"] or found["host_auto"]["predicted_peak_bytes"]
    return f"{kind}:{float(share) * whole / GiB:.6f}"


def front(points: dict[str, Any]) -> list[str]:
    """The ways that no other beats in both, by peak (or, where the device does not say, by what the engine counted)."""

    def beaten(point: Any) -> bool:
        return any(
            other["peak"] <= point["peak"] and other["time"] <= point["time"] and other != point
            for other in points.values()
        )

    return sorted(
        (way for way, point in points.items() if not beaten(point)), key=lambda way: points[way]["peak"]
    )


def measure(arguments: Any, geometry: Geometry, directory: str) -> dict[str, Any]:
    """All points, and how far predictions were off."""
    device = torch.device(arguments.device)
    setting = (arguments.device, torch.__version__, digest(MEASURED))
    attempts = Attempts(arguments.rows, arguments.seconds, setting)
    found: dict[str, dict[str, Any]] = {}
    left_out: list[str] = []
    failed: dict[str, str] = {}
    for way in arguments.ways.split(",") if arguments.ways else ways(geometry.layers):
        try:
            measured = attempts.measure(
                geometry, with_limit(way, found), steps=STEPS, device=device, directory=directory,
                host_bytes=int(arguments.host_gib * GiB),
            )  # fmt: skip
        except TimeIsOver:
            left_out.append(way)
        except AttemptFailed as error:
            failed[way] = str(error)
        else:
            if measured is None:
                failed[way] = "it does not fit"
                if way == "keep":
                    raise SystemExit("keeping everything does not fit: a smaller --microbatch or --layers")
            else:
                found[way] = dataclasses.asdict(measured)
                print(
                    json.dumps({key: value for key, value in found[way].items() if key != "losses"}),
                    file=sys.stderr,
                    flush=True,
                )
    keep = found["keep"]
    points = {
        way: {
            "peak": (one["peak_bytes"] or 0) / (keep["peak_bytes"] or 1),
            "reserved": (one["reserved_bytes"] or 0) / (keep["reserved_bytes"] or 1),
            "time": one["step_seconds"] / keep["step_seconds"],
            "plan": one["plan"],
            "saved_peak_bytes": one["saved_peak_bytes"],
            "waited_share": (one["store_wait_seconds"] + one["load_wait_seconds"]) / one["step_seconds"],
        }
        for way, one in found.items()
    }
    planned = [one for one in found.values() if one["predicted_seconds"]]
    shortest = min(len(one["losses"]) for one in found.values())
    return {
        "geometry": geometry.name,
        "keep_peak_bytes": keep["peak_bytes"],
        "keep_seconds": keep["step_seconds"],
        "bits_equal": all(one["losses"][:shortest] == keep["losses"][:shortest] for one in found.values()),
        "points": points,
        "front": front(points),
        "peak_errors": [one["saved_peak_bytes"] / one["predicted_peak_bytes"] - 1 for one in planned],
        "time_errors": [one["step_seconds"] / one["predicted_seconds"] - 1 for one in planned],
        "left_out": left_out,
        "failed": failed,
    }


def draw(result: dict[str, Any], into: Path) -> None:
    """Peak on the x axis, step time on the y axis, a colour for each kind of way."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(8, 4.2), layout="constrained")
    FigureCanvasAgg(made)
    axes = made.add_subplot()
    for kind, (colour, line, label) in LOOKS.items():
        points = sorted(
            (
                point["peak"] * (result["keep_peak_bytes"] or 0) / GiB,
                point["time"] * result["keep_seconds"] * 1e3,
            )
            for way, point in result["points"].items()
            if way.partition(":")[0] == kind
        )
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", linestyle=line, color=colour, label=label)
    axes.set_xlabel("activation peak on the GPU, GiB")
    axes.set_ylabel("step, ms")
    title = f"{result['geometry']} (hidden x layers), bf16, {result['hardware']}: lower left is better"
    axes.set_title(title, fontsize=10)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    made.savefig(into, dpi=120)


def main() -> int:
    arguments = parser("Memory against time on a GPU")
    arguments.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments.add_argument("--dry-run", action="store_true", help="a tiny model, to try the script")
    arguments.add_argument("--hidden", type=int, default=8192, help="width")
    arguments.add_argument("--layers", type=int, default=6, help="blocks")
    arguments.add_argument("--sequence", type=int, default=1024, help="tokens")
    arguments.add_argument("--microbatch", type=int, default=16, help="sequences")
    arguments.add_argument("--host-gib", type=float, default=48.0, help="host tier at most, GiB")
    arguments.add_argument(
        "--ways",
        default="",
        help="comma-separated, keep first, as in benchmarks.gpu.measure.WAYS; the value of a plan is a share",
    )
    arguments.add_argument(
        "--seconds", type=float, default=480.0, help="begin nothing that might not end in so many"
    )
    arguments.add_argument(
        "--rows", type=Path, help="keep what is measured there, and go on with what is missing"
    )
    arguments.add_argument("--draw", type=Path, help="measure nothing: draw what a run has printed")
    arguments.add_argument("--plot", type=Path, help="draw into this file")
    chosen = arguments.parse_args()
    if chosen.draw is not None and chosen.plot is None:
        arguments.error("--draw needs --plot")
    if chosen.draw is not None:
        draw(json.loads(chosen.draw.read_text()), chosen.plot)
        return 0
    be_deterministic()
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    geometry = Geometry("gpt", chosen.hidden, chosen.layers, chosen.sequence, chosen.microbatch)
    if chosen.dry_run:
        geometry = Geometry("gpt", 64, 4, 32, 2, vocabulary=128)
        chosen.host_gib = 0.25
    with tempfile.TemporaryDirectory(prefix="ssdtrain-front-") as directory:
        result = measure(chosen, geometry, directory)
        name = torch.cuda.get_device_name() if chosen.device == "cuda" else "CPU"
        machine = hardware(directory) | {"hardware": name, "torch": torch.__version__}
        result |= machine | {"date": datetime.date.today().isoformat(), "dry_run": chosen.dry_run}
    if chosen.plot is not None:
        draw(result, chosen.plot)
    finish(result, chosen.json)
    return 0 if result["bits_equal"] and not result["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
