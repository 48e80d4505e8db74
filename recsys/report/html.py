"""Frame, sections and tables of an HTML page, which is one file, without JavaScript and network access."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

_LONG = 60  # characters: longer cells may have several lines
_SEPARATOR = re.compile(r"(?<=\w[._])(?=[^\W\d])")  # where a name that is wider than a phone is broken
_NUMBER = re.compile(r"–$|≈? ?-?[\d,]+(\.\d+)?(e[+-]\d+)?($|%| (bytes|[KMGTP]iB)|[^ ]? \()")


def document(title: str, head: str, sections: Mapping[str, str]) -> str:
    """Return a page with a list of contents; sections without content are left out.

    Args:
        head: HTML under the title. sections: HTML by heading.
    """
    style = files("recsys.report").joinpath("style.css").read_text()
    sections = {heading: content for heading, content in sections.items() if content}
    links = "".join(f"<li><a href='#{_key(heading)}'>{escape(heading)}</a></li>" for heading in sections)
    body = "".join(
        f"<section aria-labelledby='{_key(heading)}'><h2 id='{_key(heading)}'>{escape(heading)}</h2>{content}</section>"
        for heading, content in sections.items()
    )
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        "<meta name=color-scheme content='light dark'><link rel=icon href='data:,'>"
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n"
        f"<body><a class=skip href='#main'>Skip to the content</a><header><h1>{escape(title)}</h1>{head}"
        f"<nav aria-label=Contents><ul>{links}</ul></nav></header>\n<main id=main>{body}</main></body></html>\n"
    )


class Html(str):
    """A cell of a table that is HTML, not text."""


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = True) -> str:
    """Return a table whose first column names its rows.

    Args:
        numbers: align columns to the right if most of their cells are numbers.
    """
    if not rows:
        return ""
    most = [2 * sum(map(_is_number, cells)) > len(rows) for cells in zip(*rows, strict=True)]
    sides = ["n" if i and numbers and is_number else "t" for i, is_number in enumerate(most)]
    head = "".join(f"<th scope=col class={side}>{escape(name)}</th>" for name, side in zip(columns, sides, strict=True))
    body = []
    for name, *cells in rows:
        line = "".join(
            f"<td class={'long' if len(cell) > _LONG and side == 't' else side}>{_inner(cell)}</td>"
            for cell, side in zip(cells, sides[1:], strict=True)
        )
        body.append(f"<tr><th scope=row>{_SEPARATOR.sub('<wbr>', escape(name))}</th>{line}</tr>")
    label = escape(caption)
    return (
        f"<div class=scroll tabindex=0 role=region aria-label='{label}'><table><caption>{label}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _is_number(cell: str) -> bool:
    return isinstance(cell, Html) or _NUMBER.match(cell) is not None


def _inner(cell: str) -> str:
    return cell if isinstance(cell, Html) else escape(cell)


def charts(*figures: str) -> str:
    """Return figures as HTML, side by side if there is room."""
    return f"<div class=charts>{''.join(figures)}</div>" if any(figures) else ""


def tiles(figures: Mapping[str, str]) -> str:
    """Return figures, by name, as the tiles at the top of a page."""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures.items())
    return f"<dl class=tiles>{items}</dl>"


def folded(title: str, text: str) -> str:
    """Return a preformatted text that the reader may unfold; empty if there is no text."""
    return f"<details><summary>{escape(title)}</summary>{preformatted(title, text)}</details>" if text else ""


def preformatted(title: str, text: str) -> str:
    """Return a text with its own lines and spaces; the title is read to those who cannot see it."""
    return f"<pre tabindex=0 role=region aria-label='{escape(title)}'>{escape(text)}</pre>"


def meter(share: float | None, text: str) -> Html:
    """Return a cell with a share as text and as a bar under it."""
    return Html(f"<span class=meter style='--share:{min(1.0, share or 0):.2%}'>{escape(text)}</span>")


def _key(heading: str) -> str:
    return re.sub(r"\W+", "-", heading.lower())
