"""Curves as inline SVG and bars as HTML, drawn here without a library and without JavaScript.

Charts are as wide as a phone; wider pages put several next to each other, so that letters keep their size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from recsys.report.text import number, size

NUM_COLOURS = 8  # classes c0 … c7 of style.css
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 360, 200, 46, 10, 10, 30
_MOST_CHARACTERS = 7  # of a label in the left margin, such as 100,000
_FEW = 15  # curves with at most so many points get dots
_MOST_POINTS = 240  # of a curve; longer curves are averages of neighbours, within a band from least to most
Points = Sequence[tuple[float, float | None]]
Bucket = tuple[float, float, float, float]  # x, mean, least, most


@dataclass(frozen=True)
class Axis:
    """Title, axes and annotations of a chart.

    Attributes:
        show: formats values, also those on the axis.
        base: 1024 for ticks that are round numbers of bytes.
        least: the axis begins here or below; None: near the smallest value.
        bands: spans of x with names, such as phases. level: a horizontal line to compare with, and its name.
        marks: names of vertical lines, by x.
    """

    title: str
    unit: str = ""
    x_label: str = "step"
    show: Callable[[float], str] = number
    base: int = 1
    least: float | None = None
    bands: Sequence[tuple[float, float, str]] = ()
    level: tuple[float, str] | None = None
    marks: Mapping[float, str] = field(default_factory=dict)


def line_chart(axis: Axis, series: Mapping[str, Points]) -> str:
    """Return a figure with a curve for each series, in which None is a gap; empty if no series has a value."""
    curves = {name: _runs(points) for name, points in series.items()}
    everything = [bucket for runs in curves.values() for run in runs for bucket in run]
    if not everything:
        return ""
    level = [axis.level[0]] if axis.level else []
    low = min([*(bucket[2] for bucket in everything), *level])
    high = max([*(bucket[3] for bucket in everything), *level])
    ticks = _ticks(low if axis.least is None else min(low, axis.least), high, axis.base)
    ends = [bucket[0] for bucket in everything] + [end for start, stop, _ in axis.bands for end in (start, stop)]
    first, last = min(ends), max(ends)
    steps = _ticks(first, last)

    def x(value: float) -> float:
        return round(_LEFT + (value - first) / ((last - first) or 1) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        return round(_HEIGHT - _BOTTOM - (value - ticks[0]) / (ticks[-1] - ticks[0]) * (_HEIGHT - _BOTTOM - _TOP), 1)

    parts = [_band(x(start), x(stop), name, axis) for start, stop, name in axis.bands]
    for tick, text in zip(ticks, _labels(ticks) if axis.show is number else map(axis.show, ticks), strict=True):
        parts.append(f"<path class=grid d='M{_LEFT} {y(tick)}H{_WIDTH - _RIGHT}'/>")
        parts.append(f"<text x={_LEFT - 6} y={y(tick) + 3.5} text-anchor=end>{escape(text)}</text>")
    for tick in steps:
        if first <= tick <= last:
            parts.append(
                f"<text x={x(tick)} y={_HEIGHT - _BOTTOM + 15} text-anchor=middle>{tick:,.{_digits(steps)}f}</text>"
            )
    parts.append(f"<text x={_WIDTH - _RIGHT} y={_HEIGHT - 2} text-anchor=end>{escape(axis.x_label)}</text>")
    for i, (name, runs) in enumerate(curves.items()):
        parts += [_curve(run, f"c{i % NUM_COLOURS}", name if len(curves) > 1 else "", axis, x, y) for run in runs]
    if axis.level:
        parts.append(f"<path class=level d='M{_LEFT} {y(axis.level[0])}H{_WIDTH - _RIGHT}'/>")
    for at, name in axis.marks.items():
        parts.append(f"<path class=mark d='M{x(at)} {_TOP}V{_HEIGHT - _BOTTOM}'><title>{escape(name)}</title></path>")
    return _figure(axis, curves, "".join(parts))


def _figure(axis: Axis, curves: Mapping[str, list[list[Bucket]]], drawing: str) -> str:
    """Return a drawing as a figure with caption, description in words, and a legend if it has several curves."""
    descriptions = []
    drawn = {name: (f"c{i % NUM_COLOURS}", runs) for i, (name, runs) in enumerate(curves.items()) if runs}
    for name, (_, runs) in drawn.items():
        points = [bucket for run in runs for bucket in run]
        least, most = min(points, key=lambda p: p[2]), max(points, key=lambda p: p[3])
        ends = f"from {axis.show(points[0][1])} to {axis.show(points[-1][1])}"
        extremes = f"least {axis.show(least[2])} at {number(least[0])}, most {axis.show(most[3])} at {number(most[0])}"
        descriptions.append(f"{name}: {ends}, {extremes}")
    entries = [(style, name) for name, (style, _) in drawn.items()] if len(curves) > 1 else []
    entries += [(f"b{i}", name) for i, name in enumerate(_names(axis))]
    entries += [("level", axis.level[1])] if axis.level else []
    entries += [("mark", name) for name in axis.marks.values()]
    described = escape(f"{axis.title} over {axis.x_label}. {'; '.join(descriptions)}.")
    return (
        f"<figure><figcaption>{escape(axis.title)} <span>{escape(axis.unit)}</span></figcaption>"
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img aria-label='{described}'>"
        f"<title>{escape(axis.title)}</title>{drawing}</svg>"
        f"{legend(entries)}</figure>"
    )


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return a legend as HTML, from pairs of a class of style.css and a name."""
    items = "".join(f"<li><i class='{style}'></i>{escape(name)}</li>" for style, name in entries)
    return f"<ul class=legend>{items}</ul>" if entries else ""


def stacked_bars(
    rows: Mapping[str, Mapping[str, float]], show: Callable[[float], str] = size, plain: str = "the rest"
) -> str:
    """Return a bar for each row, split by its parts; the parts with the largest totals have colours.

    Args:
        rows: label of the row → name of a part → its value. show: formats values.
        plain: name of a part that is drawn as an outline, without a colour.
    """
    totals: dict[str, float] = {}
    for row in rows.values():
        for name, value in row.items():
            totals[name] = totals.get(name, 0) + value
    totals.pop(plain, None)
    largest = sorted(filter(totals.__getitem__, totals), key=totals.__getitem__, reverse=True)
    shown = largest if len(largest) <= NUM_COLOURS else largest[: NUM_COLOURS - 1]
    longest = max((sum(row.values()) for row in rows.values()), default=0) or 1
    bars = []
    for label, row in rows.items():
        parts = [(f"c{i}", name, row.get(name, 0)) for i, name in enumerate(shown)]
        css, name = ("whole", plain) if plain in row else ("rest", "the rest")
        parts.append((css, name, sum(row.values()) - sum(value for _, _, value in parts)))
        boxes = "".join(
            f"<span class={css} style='width:{value / longest:.2%}' title='{escape(f'{name}: {show(value)}')}'></span>"
            for css, name, value in parts
            if value > 0
        )
        described = ", ".join(f"{name} {show(value)}" for _, name, value in parts if value > 0)
        bar = f"<div class=bar role=img aria-label='{escape(f'{label}: {described}')}'>{boxes}</div>"
        bars.append(f"<div class=row><span>{escape(label)}</span>{bar}<b>{show(sum(row.values()))}</b></div>")
    entries = [(f"c{i}", name) for i, name in enumerate(shown)]
    if len(shown) < len(largest):
        entries.append(("rest", "the rest"))
    return f"<div class=bars>{''.join(bars)}{legend(entries)}</div>"


def _runs(points: Points) -> list[list[Bucket]]:
    """Return the stretches of a curve between its gaps, reduced to as many points as can be seen."""
    runs: list[list[tuple[float, float]]] = [[]]
    for at, value in points:
        if value is not None and math.isfinite(value):
            runs[-1].append((at, value))
        elif runs[-1]:
            runs.append([])
    stride = math.ceil(len(points) / _MOST_POINTS)
    return [[_bucket(run[i : i + stride]) for i in range(0, len(run), stride)] for run in runs if run]


def _bucket(points: list[tuple[float, float]]) -> Bucket:
    values = [value for _, value in points]
    return points[-1][0], sum(values) / len(values), min(values), max(values)


def _curve(
    run: list[Bucket], style: str, name: str, axis: Axis, x: Callable[[float], float], y: Callable[[float], float]
) -> str:
    """Draw a stretch of a curve, its band from least to most, and a tooltip at each point."""
    line = " ".join(f"{x(at)},{y(mean)}" for at, mean, _, _ in run)
    parts = [f"<polyline class='{style}' points='{line}'/>"]
    if any(least != most for _, _, least, most in run):
        edge = [f"{x(at)},{y(most)}" for at, _, _, most in run] + [f"{x(at)},{y(low)}" for at, _, low, _ in run[::-1]]
        parts.insert(0, f"<polygon class='{style}' points='{' '.join(edge)}'/>")
    for at, mean, _, _ in run:
        tip = escape(f"{name} {axis.show(mean)}, {axis.x_label} {number(at)}".strip())
        if len(run) <= _FEW:
            parts.append(f"<circle class='{style}' cx={x(at)} cy={y(mean)} r=2.5 />")
        parts.append(f"<circle class=tip cx={x(at)} cy={y(mean)} r=6><title>{tip}</title></circle>")
    return "".join(parts)


def _band(start: float, stop: float, name: str, axis: Axis) -> str:
    place = f"x={start} y={_TOP} width={max(0.5, stop - start):.1f} height={_HEIGHT - _TOP - _BOTTOM}"
    return f"<rect class=b{_names(axis).index(name)} {place}><title>{escape(name)}</title></rect>"


def _names(axis: Axis) -> list[str]:
    return list(dict.fromkeys(name for _, _, name in axis.bands))[:NUM_COLOURS]


def _ticks(low: float, high: float, base: int = 1) -> list[float]:
    """Return about five numbers from at most `low` to at least `high`, round in units of `base` ** n.

    With a base there are no fractions of a byte. A curve that is 0 everywhere lies on the lower edge, because most
    figures cannot be negative.
    """
    if high - low <= 1e-12 * max(abs(low), abs(high)):  # equal except for rounding, so that no ticks fit between
        gap = abs(high) * 0.1 or 1.0
        low, high = low - gap if low else low, high + gap
    unit = float(base ** int(math.log(max(abs(low), abs(high), 1), base))) if base > 1 else 1.0
    rough = (high - low) / unit / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = unit * power * next(factor for factor in (1, 2, 2.5, 5, 10) if rough <= factor * power * 1.0001)
    step = max(step, 1.0) if base > 1 else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _digits(ticks: list[float]) -> int:
    """Return the number of decimals that show the difference of neighbouring ticks."""
    step = ticks[1] - ticks[0]
    return next((digits for digits in range(9) if abs(round(step, digits) - step) < step * 1e-6), 9)


def _labels(ticks: list[float]) -> list[str]:
    """Return texts of ticks, with exponents if the left margin is too narrow otherwise, as for a huge loss."""
    labels = [f"{tick:,.{_digits(ticks)}f}" for tick in ticks]
    short = [f"{tick:.3g}" for tick in ticks]
    return short if max(map(len, labels)) > _MOST_CHARACTERS and len(set(short)) == len(ticks) else labels
