"""How bytes are written on pages for people."""


def row(*cells: str) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def mib(num_bytes: int | None) -> str:
    """Return bytes as MiB with three digits after the point, a dash for what is not known."""
    return "–" if num_bytes is None else f"{num_bytes / 2**20:,.3f}"


def gib(num_bytes: int) -> str:
    """Return bytes as GiB with two digits after the point, and the unit."""
    return f"{num_bytes / 2**30:,.2f} GiB"
