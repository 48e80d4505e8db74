"""Bars as a drawing, for reports."""

import html
from collections.abc import Sequence

_LONGEST = 320  # pixels


def draw_bars(bars: Sequence[tuple[str, float, str]], left: int, width: int) -> str:
    """Return an SVG with a horizontal bar for each name, one below the other.

    Args:
        bars: name, length from 0 to 1, and what is told beside the bar.
        left: where the bars begin, in pixels; names stand before it. width: of the drawing.
    """
    parts = []
    for number, (name, length, label) in enumerate(bars):
        y, drawn = 20 + 22 * number, _LONGEST * length
        parts.append(
            f'<text x="{left - 10}" y="{y + 12}" text-anchor="end">{html.escape(name)}</text>'
            f'<rect x="{left}" y="{y}" width="{drawn:.1f}" height="16" fill="#4477aa"/>'
            f'<text x="{left + 8 + drawn:.1f}" y="{y + 12}">{html.escape(label)}</text>'
        )
    size = f'width="{width}" height="{40 + 22 * len(bars)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"
