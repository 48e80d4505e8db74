"""report.html: bars by kind and memory over time, drawn as SVG in one self-contained file."""

from collections.abc import Iterable
from html import escape
from typing import Any

_COLOURS = (
    "#4e79a7",
    "#f28e2b",
    "#59a14f",
    "#e15759",
    "#76b7b2",
    "#edc948",
    "#b07aa1",
    "#ff9da7",
    "#9c755f",
    "#bab0ac",
)
_PHASES = {"other": "#eeeeee", "init": "#fdebd0", "step": "#e8f6ef", "evaluation": "#eaf2f8", "save": "#f5eef8"}
_TIMELINES = 8  # of the fullest ranks
_WIDTH, _BAR, _HEIGHT, _LEFT = 900, 18, 160, 90


def html_page(reports: list[dict[str, Any]]) -> str:
    """Return report.html from the reports of all ranks."""
    identity = reports[0]["identity"]
    title = f"Memory of {escape(str(identity['name']))}, {escape(identity['status'])} at step {identity['step']}"
    sections = [f"<h1>{title}</h1>", "<h2>Predicted at the peak, by kind</h2>", _bars(reports)]
    fullest = sorted(reports, key=lambda report: report["peak"]["measured_bytes"], reverse=True)[:_TIMELINES]
    for report in fullest:
        sections += [f"<h2>Resident memory over time, rank {report['identity']['rank']}</h2>", _timeline(report)]
    style = "body{font:14px sans-serif;margin:2em}svg{background:#fff;border:1px solid #ccc}text{font-size:11px}"
    head = f"<meta charset='utf-8'><title>{title}</title><style>{style}</style>"
    return f"<!doctype html><html><head>{head}</head><body>{''.join(sections)}</body></html>\n"


def _bars(reports: list[dict[str, Any]]) -> str:
    """Draw a bar a rank: what was predicted for its peak, and a line where it was measured."""
    kinds = list(dict.fromkeys(kind for report in reports for kind in report["peak"]["by_kind_predicted"]))
    totals = [max(report["peak"]["measured_bytes"] or 0, report["peak"]["predicted_bytes"] or 0) for report in reports]
    scale = (_WIDTH - _LEFT - 120) / max([1, *totals])
    drawn = []
    for i, report in enumerate(reports):
        x, y = float(_LEFT), 10 + i * (_BAR + 8)
        drawn.append(f"<text x='5' y='{y + 13}'>rank {report['identity']['rank']}</text>")
        for number, kind in enumerate(kinds):
            size = report["peak"]["by_kind_predicted"].get(kind, 0)
            tip = f"<title>{escape(kind)}: {size / 2**20:,.1f} MiB</title>"
            drawn.append(_box(x, y, size * scale, _BAR, _COLOURS[number % len(_COLOURS)], tip))
            x += size * scale
        measured = report["peak"]["measured_bytes"] or 0
        at = _LEFT + measured * scale
        drawn.append(f"<line x1='{at:.1f}' x2='{at:.1f}' y1='{y - 3}' y2='{y + _BAR + 3}' stroke='#000'/>")
        drawn.append(f"<text x='{at + 4:.1f}' y='{y + 13}'>measured {measured / 2**20:,.0f} MiB</text>")
    height = 20 + len(reports) * (_BAR + 8)
    legend = " ".join(
        f"<span style='color:{_COLOURS[n % len(_COLOURS)]}'>&#9632;</span> {escape(kind.replace('_', ' '))}"
        for n, kind in enumerate(kinds)
    )
    return f"{_svg(height, drawn)}<p>{legend}</p>"


def _timeline(report: dict[str, Any]) -> str:
    samples, spans = report["timeline"]["samples"], report["timeline"]["spans"]
    end = max([1e-3, *(seconds for seconds, _ in samples), *(span["stop_s"] for span in spans)])
    top = max([1, *(size for _, size in samples), *(span["peak_bytes"] for span in spans)])
    across, up = (_WIDTH - _LEFT - 20) / end, (_HEIGHT - 40) / top
    drawn = []
    for span in spans:
        x, width = _LEFT + span["start_s"] * across, (span["stop_s"] - span["start_s"]) * across
        tip = (
            f"<title>{escape(span['phase'])}: peak {span['peak_bytes'] / 2**20:,.1f} MiB at step {span['step']}</title>"
        )
        drawn.append(_box(x, 10, max(width, 1), _HEIGHT - 40, _PHASES.get(span["phase"], "#ddd"), tip))
        level = _HEIGHT - 30 - span["peak_bytes"] * up
        drawn.append(
            f"<line x1='{x:.1f}' x2='{x + max(width, 1):.1f}' y1='{level:.1f}' y2='{level:.1f}' stroke='#c00'/>"
        )
    points = " ".join(f"{_LEFT + s * across:.1f},{_HEIGHT - 30 - size * up:.1f}" for s, size in samples)
    drawn.append(f"<polyline points='{points}' fill='none' stroke='#246'/>")
    drawn.append(f"<text x='5' y='18'>{top / 2**20:,.0f} MiB</text><text x='5' y='{_HEIGHT - 30}'>0</text>")
    drawn.append(f"<text x='{_WIDTH - 60}' y='{_HEIGHT - 12}'>{end:.1f} s</text>")
    return _svg(_HEIGHT, drawn)


def _box(x: float, y: float, width: float, height: float, colour: str, inside: str) -> str:
    return f"<rect x='{x:.1f}' y='{y}' width='{width:.1f}' height='{height}' fill='{colour}'>{inside}</rect>"


def _svg(height: int, shapes: Iterable[str]) -> str:
    return f"<svg width='{_WIDTH}' height='{height}' xmlns='http://www.w3.org/2000/svg'>{''.join(shapes)}</svg>"
