"""report.html: bars by kind and memory over time, in one self-contained file."""

from collections.abc import Iterable
from html import escape
from typing import Any

from recsys.memory.page import size

_TIMELINES = 8  # of the fullest ranks
_STYLE = (
    "body{font:14px sans-serif;margin:2em}svg{width:900px;height:160px;border:1px solid #ccc}"
    "div{display:flex;width:900px;height:18px}*{vector-effect:non-scaling-stroke}"
)


def html_page(reports: list[dict[str, Any]]) -> str:
    """Return report.html from the reports of all ranks."""
    identity = reports[0]["identity"]
    title = f"Memory of {escape(str(identity['name']))}, {escape(identity['status'])} at step {identity['step']}"
    sections = [f"<h1>{title}</h1>", "<h2>Predicted at the peak, by kind, and measured</h2>", *_bars(reports)]
    fullest = sorted(reports, key=lambda report: report["peak"]["measured_bytes"], reverse=True)[:_TIMELINES]
    for report in fullest:
        sections += [f"<h2>Resident memory over time, rank {report['identity']['rank']}</h2>", _timeline(report)]
    head = f"<meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html><head>{head}</head><body>{''.join(sections)}</body></html>\n"


def _bars(reports: list[dict[str, Any]]) -> list[str]:
    """Draw two bars a rank: what was predicted for its peak, by kind, and what was measured."""
    peaks = {report["identity"]["rank"]: report["peak"] for report in reports}
    longest = max([1, *(peak[f"{when}_bytes"] or 0 for peak in peaks.values() for when in ("measured", "predicted"))])
    colours = _colours((kind for peak in peaks.values() for kind in peak["by_kind_predicted"]), 55)
    bars = []
    for rank, peak in peaks.items():
        kinds = peak["by_kind_predicted"].items()
        boxes = [_box(num_bytes / longest, colours[kind], kind, num_bytes) for kind, num_bytes in kinds]
        measured = peak["measured_bytes"] or 0
        bars.append(f"<p>rank {rank}, measured {size(measured)}</p><div>{''.join(boxes)}</div>")
        bars.append(f"<div>{_box(measured / longest, '#000', 'measured', measured)}</div>")
    legend = (f"<b style='color:{colour}'>&#9632;</b> {escape(kind)}" for kind, colour in colours.items())
    return [*bars, f"<p>{' '.join(legend).replace('_', ' ')}</p>"]


def _box(share: float, colour: str, name: str, num_bytes: int) -> str:
    return f"<span style='width:{share:.2%};background:{colour}' title='{escape(name)}: {size(num_bytes)}'></span>"


def _timeline(report: dict[str, Any]) -> str:
    """Draw the samples over the phases, and the peak of each phase; the picture's units are seconds and bytes."""
    samples, spans = report["timeline"]["samples"], report["timeline"]["spans"]
    end = max([1e-3, *(seconds for seconds, _ in samples), *(span["stop_s"] for span in spans)])
    top = max([1, *(num_bytes for _, num_bytes in samples), *(span["peak_bytes"] for span in spans)])
    colours, shapes = _colours((span["phase"] for span in spans), 92), []
    for span in spans:
        x, width, level = span["start_s"], span["stop_s"] - span["start_s"], top - span["peak_bytes"]
        tip = f"<title>{escape(span['phase'])}: peak {size(span['peak_bytes'])} at step {span['step']}</title>"
        shapes.append(f"<rect x='{x}' width='{width}' height='{top}' fill='{colours[span['phase']]}'>{tip}</rect>")
        shapes.append(f"<path d='M{x} {level}h{width}' stroke='#c00'/>")
    points = " ".join(f"{seconds},{top - num_bytes}" for seconds, num_bytes in samples)
    shapes.append(f"<polyline points='{points}' fill='none' stroke='#246'/>")
    picture = f"<svg viewBox='0 0 {end} {top}' preserveAspectRatio='none'>{''.join(shapes)}</svg>"
    return f"{picture}<p>0 to {end:.1f} s, 0 to {size(top)}</p>"


def _colours(names: Iterable[str], lightness: int) -> dict[str, str]:
    """Return a colour for each name."""
    return {name: f"hsl({137 * i % 360} 50% {lightness}%)" for i, name in enumerate(dict.fromkeys(names))}
