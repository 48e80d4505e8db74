"""Search for the changes that a metric allows: as many as possible of an ordered list, with few evaluations."""

from collections.abc import Callable, Mapping, Sequence

from recsys.config.choices import RowCode

CodeMove = tuple[str, RowCode]  # change of a table to a code


def most_accepted(last: int, is_accepted: Callable[[int], bool]) -> int:
    """Return the largest accepted number up to `last`, if smaller ones are never worse; 0 needs no evaluation."""
    low, high = 0, last + 1
    number = last
    while high - low > 1:
        low, high = (number, high) if is_accepted(number) else (low, number)
        number = (low + high) // 2
    return low


def accepted_moves(moves: Sequence[CodeMove], is_accepted: Callable[[Sequence[CodeMove]], bool]) -> list[CodeMove]:
    """Return the changes that are accepted together: the first ones, and later ones accepted in addition to these.

    A table whose change is refused keeps its code. Besides the bisection, this needs about one evaluation for each such
    table: after an accepted change, the next ones are tried two, four, eight at once.
    """
    number = most_accepted(len(moves), lambda n: is_accepted(moves[:n]))
    chosen, remaining, size = list(moves[:number]), list(moves[number:]), 1
    is_refused = bool(remaining)  # the bisection has evaluated the first of these
    while remaining:
        if is_refused:
            remaining, is_refused = [move for move in remaining if move[0] != remaining[0][0]], False
        elif is_accepted([*chosen, *remaining[:size]]):
            chosen, remaining, size = [*chosen, *remaining[:size]], remaining[size:], 2 * size
        else:
            size, is_refused = 1, size == 1
    return chosen


def cheapest_first(
    losses: Mapping[tuple[str, RowCode | None], float],
    sizes: Mapping[tuple[str, RowCode | None], int],
    now: dict[str, RowCode],
    budget: float,
) -> list[CodeMove]:
    """Return changes of code; each is the one that saves most bytes per loss after those before it.

    Args:
        losses, sizes: of single tables, by table and code; they include the code that a table has `now`.
        budget: losses far below it count as 0.
    """
    least, moves = max(budget, 1e-9) / 1000, list[CodeMove]()
    while True:
        ratios = {
            (table, code): (sizes[table, now.get(table)] - size)
            / max(least, losses[table, code] - losses[table, now.get(table)])
            for (table, code), size in sizes.items()
            if code is not None and size < sizes[table, now.get(table)]
        }
        if not ratios:
            return moves
        table, code = max(ratios, key=lambda move: ratios[move])
        assert code is not None
        moves.append((table, code))
        now = {**now, table: code}
