"""Line and bar charts as SVG text. Colours and fonts are classes of report.css."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ssdtrain.config.units import GiB, KiB, MiB, TiB
from ssdtrain.metrics import Unit

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 40
MOST_POINTS = 400

_SCALES: dict[Unit, list[tuple[float, str]]] = {
    Unit.BYTES: [(TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"), (1, "bytes")],
    Unit.SECONDS: [(3600, "hours"), (60, "minutes"), (1, "seconds"), (1e-3, "ms"), (1e-6, "us")],
    Unit.COUNT: [(1, "")],
}


@dataclass(frozen=True)
class ChartLine:
    """One curve: values by step.

    Args:
        colour: index in the palette.
        dashed: for values that are a comparison and not a measurement of this run.
    """

    label: str
    points: Mapping[int, float]
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart; `parts` are drawn one below the other, each in its own colour."""

    label: str
    parts: Sequence[float]


def line_chart(lines: Sequence[ChartLine], unit: Unit, what: str, *, from_zero: bool = True) -> str:
    """A `<figure>` with the axes in the unit that fits, a legend, and the values for the tooltip.

    Args:
        what: is on the vertical axis; the unit is added.
        from_zero: False for values of which only the change is of interest, such as a loss.
    """
    lines = [line for line in lines if line.points]
    steps = sorted({step for line in lines for step in line.points})
    if not steps:
        return '<p class="none">The journals have no such values.</p>'
    size = math.ceil(len(steps) / MOST_POINTS)
    drawn = [ChartLine(line.label, _thinned(line.points, size), line.colour, line.dashed) for line in lines]
    steps = sorted({step for line in drawn for step in line.points})
    values = [value for line in drawn for value in line.points.values()]
    scale, word = _scale(unit, max(map(abs, values)))
    ticks = _ticks(0.0 if from_zero else min(values) / scale, max(values) / scale)
    x = _Axis(steps[0], steps[-1] if steps[-1] > steps[0] else steps[0] + 1, LEFT, WIDTH - RIGHT)
    y = _Axis(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [_grid(ticks, y), _steps(steps, x), _titles(f"{what}, {word}" if word else what)]
    for line in drawn:
        path = _path(line.points, x, y, scale)
        dash = " dashed" if line.dashed else ""
        parts.append(f'<path class="line c{line.colour % 8}{dash}" d="{path}"/>')
    data = {
        "steps": steps,
        "x": [round(x(step), 1) for step in steps],
        "unit": word,
        "lines": [
            {
                "label": line.label,
                "colour": line.colour % 8,
                "values": [
                    float(f"{line.points[step] / scale:.4g}") if step in line.points else None
                    for step in steps
                ],
            }
            for line in drawn
        ],
    }
    note = f'<p class="note">Each point is the highest of {size} steps.</p>' if size > 1 else ""
    # "<" is the only character that could end a script element early.
    embedded = json.dumps(data).replace("<", "\\u003c")
    return (
        f'<figure class="chart"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(what)} by step">'
        f'{"".join(parts)}<line class="rule" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
        f'<script type="application/json">{embedded}</script><div class="tip"></div>'
        f"<figcaption>{_legend(drawn)}{note}</figcaption></figure>"
    )


def bar_chart(bars: Sequence[Bar], unit: Unit, names: Sequence[str]) -> str:
    """A `<figure>` of horizontal bars with their values. Of a bar with several parts those that are 0 are left out.

    Args:
        names: of the parts, for the legend; one name needs none.
    """
    most = max((part for bar in bars for part in bar.parts), default=0)
    if not most:
        return '<p class="none">Nothing to show: all values are 0.</p>'
    rows = []
    for bar in bars:
        tracks = "".join(
            f'<span class="track"><span class="bar b{index % 8}" style="width:{80 * part / most:.2f}%"></span>'
            f"<span>{escape(unit.text(part))}</span></span>"
            for index, part in enumerate(bar.parts)
            if part or not any(bar.parts)
        )
        rows.append(
            f'<div class="row"><span class="of" title="{escape(bar.label)}">{escape(bar.label)}</span><span>{tracks}</span></div>'
        )
    legend = "".join(f'<span class="key b{i % 8}"></span>{escape(name)} ' for i, name in enumerate(names))
    caption = f"<figcaption>{legend}</figcaption>" if len(names) > 1 else ""
    return f'<figure class="bars">{"".join(rows)}{caption}</figure>'


@dataclass(frozen=True)
class _Axis:
    """Map from a value to a place on the page."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def _thinned(points: Mapping[int, float], size: int) -> dict[int, float]:
    """The highest of every `size` steps, at the step that had it: a peak is never lost."""
    if size == 1:
        return dict(points)
    items = sorted(points.items())
    groups = (items[i : i + size] for i in range(0, len(items), size))
    # All lines share the steps of the first of each group, so that the tooltip finds all values at one place.
    return {group[0][0]: max(value for _, value in group) for group in groups}


def _scale(unit: Unit, most: float) -> tuple[float, str]:
    scales = _SCALES[unit]
    return next((found for found in scales if most >= found[0]), scales[-1])


def _ticks(low: float, high: float) -> list[float]:
    """Four to seven round numbers that enclose `low` and `high`."""
    if high - low < 1e-300:  # of what is less, a quarter may be 0
        high = low + (abs(low) or 1.0)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _grid(ticks: Sequence[float], y: _Axis) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.6g}</text>'
        for tick in ticks
    )


def _steps(steps: Sequence[int], x: _Axis) -> str:
    found = sorted({round(tick) for tick in _ticks(steps[0], steps[-1])})
    ticks = [tick for tick in found if steps[0] <= tick <= steps[-1]] or [steps[0]]
    return "".join(
        f'<text class="tick" x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{tick}</text>'
        for tick in ticks
    )


def _titles(vertical: str) -> str:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return (
        f'<text class="axis" transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">{escape(vertical)}</text>'
        f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 5}" text-anchor="middle">step</text>'
    )


def _path(points: Mapping[int, float], x: _Axis, y: _Axis, scale: float) -> str:
    places = [f"{x(step):.1f} {y(value / scale):.1f}" for step, value in sorted(points.items())]
    if len(places) == 1:  # a line needs two ends to be seen
        places.append(places[0])
    return "M" + " L".join(places)


def _legend(lines: Sequence[ChartLine]) -> str:
    if len(lines) == 1:
        return ""
    return "".join(
        f'<span class="item"><svg class="swatch" viewBox="0 0 22 8"><path class="line c{line.colour % 8}'
        f'{" dashed" if line.dashed else ""}" d="M0 4 L22 4"/></svg>{escape(line.label)}</span>'
        for line in lines
    )
