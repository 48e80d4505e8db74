"""Bar charts as SVG, for reports."""

import html
from collections.abc import Sequence

_LONGEST, _LABEL, _DOTS = 320, 90, 200  # pixels: longest bar, space for its label, space for dots
_STYLE = """<style>
text { fill: #222 } .page { fill: #fff } .bar, .dot { fill: #4477aa } .level { stroke: #999; stroke-dasharray: 3 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .page { fill: #1e2129 } .bar, .dot { fill: #77aadd } }
</style>"""


def draw_bars(
    bars: Sequence[tuple[str, float, str]], left: int, width: int, dots: Sequence[tuple[float, str]] = ()
) -> str:
    """Return an SVG with a horizontal bar for each name, one below the other.

    Args:
        bars: name, length from 0 to 1, and the label next to the bar.
        left: where the bars begin, in pixels; names are left of it. width: of the drawing, in pixels.
        dots: a second figure of each name, right of the bars: its place from 0 to 1, and the label next to it. A
            vertical line goes through the first.
    """
    parts, first = [], left + _LONGEST + _LABEL
    if dots:
        at = f"{first + _DOTS * dots[0][0]:.1f}"
        parts.append(f'<path class="level" d="M{at} 12V{28 + 22 * len(dots)}"/>')
    for number, (name, length, label) in enumerate(bars):
        y, drawn = 20 + 22 * number, _LONGEST * length
        parts.append(
            f'<text x="{left - 10}" y="{y + 12}" text-anchor="end">{html.escape(name)}</text>'
            f'<rect class="bar" x="{left}" y="{y}" width="{drawn:.1f}" height="16"/>'
            f'<text x="{left + 8 + drawn:.1f}" y="{y + 12}">{html.escape(label)}</text>'
        )
    for number, (place, label) in enumerate(dots):
        x, y = first + _DOTS * place, 28 + 22 * number
        text = f'<text x="{x + 9:.1f}" y="{y + 4}">{html.escape(label)}</text>'
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y}" r="5"/>{text}')
    height = 40 + 22 * len(bars)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, _STYLE, '<rect class="page" width="100%" height="100%"/>', *parts, "</svg>"]) + "\n"
