"""What a run brought: two lines and ten rows, in groups of memory, time, drives and traffic."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from ssdtrain.metrics import MetricSet, shown
from ssdtrain.telemetry.totals import RuntimeMetrics
from ssdtrain.text import duration_text, gain_text, rate_text, size_text, with_cause


def summary(metrics: RuntimeMetrics, limit: str) -> str:
    """Return the end of a run as text.

    Args:
        metrics: the latest; at least one step has ended.
        limit: what keeps offloading from bringing more; "": nothing does, and the second line says so.
    """
    offload, total = metrics.offload, metrics.step_seconds
    lines = [f"summary of {metrics.steps} {'step' if metrics.steps == 1 else 'steps'}"]
    if offload.saved_bytes and not (offload.offloaded_bytes or offload.avoided_write_bytes):
        peak, seconds = size_text(offload.activation_peak_bytes), duration_text(total / metrics.steps)
        lines[0] += f": activations peak at {peak}, a step takes {seconds}"
    elif offload.saved_bytes:
        waited = offload.stall_seconds / total if total else 0.0
        gain = gain_text(offload.activation_peak_bytes, offload.unoffloaded_peak_bytes, waited)
        lines[0] += f": {gain}"
        lines.append(with_cause(limit, waited) or "the tiers kept up with the step")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column()
    table.add_column(justify="right")
    last = ""
    for group, name, text in _rows(metrics):
        table.add_row("" if group == last else group, name, text)
        last = group
    stream = io.StringIO()
    Console(file=stream, width=100, no_color=True).print(table)
    return "\n".join([*lines, *(f"  {line.rstrip()}" for line in stream.getvalue().splitlines())])


def _rows(metrics: RuntimeMetrics) -> Iterator[tuple[str, str, str]]:
    """Group, name and value of each row that is not 0."""
    offload, store, steps = metrics.offload, metrics.store, metrics.steps
    life = metrics.values().get("ssd_life_seconds")
    sizes = (
        ("memory", "activation peak", offload.activation_peak_bytes, 1),
        ("memory", "without SSDTrain", offload.unoffloaded_peak_bytes, 1),
        ("memory", "saved for backward, a step", offload.saved_bytes, steps),
        ("time", "step", metrics.step_seconds, steps),
        ("time", "waited for stores, a step", offload.store_wait_seconds, steps),
        ("time", "waited for loads, a step", offload.load_wait_seconds, steps),
        ("drives", "to host memory, a step", store.host_bytes_written, steps),
        ("drives", "to SSD, a step", store.ssd_bytes_written, steps),
    )
    for group, name, value, per in sizes:
        if value:
            yield group, name, duration_text(value / per) if group == "time" else size_text(value / per)
    if store.ssd_bytes_written and store.write_seconds:
        yield "drives", "written at", rate_text(store.ssd_bytes_written / store.write_seconds)
    if life is not None:
        yield "drives", "SSD life at this rate", duration_text(life)
    for dimension, traffic in metrics.comm.items():
        if traffic.wire_bytes:
            of = f"{size_text(traffic.wire_bytes / steps)} of {size_text(traffic.raw_bytes / steps)}"
            yield "traffic", f"{dimension} sent, a step", of
    for prefix, found in metrics.sets:
        if prefix and not prefix.startswith(("comm/", "auto", "plan")):
            yield from _rows_of(prefix, found, steps)


def _rows_of(prefix: str, found: MetricSet, steps: int) -> Iterator[tuple[str, str, str]]:
    """Rows of a feature that has none of its own here: what its log lines show."""
    values = found.values()
    for metric in shown(found.declared(), values):
        per = steps if metric.cumulative else 1
        name = f"{metric.label}, a step" if metric.cumulative else metric.label
        yield prefix, name, metric.unit.text(values[metric.name] / per)
