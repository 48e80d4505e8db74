"""Which changes a metric allows: of an order of them as many as possible, at few evaluations."""

from collections.abc import Callable, Mapping, Sequence

from recsys.config.choices import RowCode

CodeMove = tuple[str, RowCode]  # of a table to a code


def most_accepted(last: int, is_accepted: Callable[[int], bool]) -> int:
    """Return the largest number up to `last` that is accepted, where less is never worse; 0 without asking."""
    low, high = 0, last + 1
    number = last
    while high - low > 1:
        low, high = (number, high) if is_accepted(number) else (low, number)
        number = (low + high) // 2
    return low


def accepted_moves(moves: Sequence[CodeMove], is_accepted: Callable[[Sequence[CodeMove]], bool]) -> list[CodeMove]:
    """Return the changes that are accepted together: the first ones, and later ones that go with those before.

    A table of which one is refused keeps the code that it has. Beside the bisection this asks about once for each such
    table: what follows a change that is accepted is tried two, four, eight at once.
    """
    number = most_accepted(len(moves), lambda n: is_accepted(moves[:n]))
    chosen, rest, size = list(moves[:number]), list(moves[number:]), 1
    is_refused = bool(rest)  # the bisection has asked for the first of the rest
    while rest:
        if is_refused:
            rest, is_refused = [move for move in rest if move[0] != rest[0][0]], False
        elif is_accepted([*chosen, *rest[:size]]):
            chosen, rest, size = [*chosen, *rest[:size]], rest[size:], 2 * size
        else:
            size, is_refused = 1, size == 1
    return chosen


def cheapest_first(
    losses: Mapping[tuple[str, RowCode | None], float],
    sizes: Mapping[tuple[str, RowCode | None], int],
    now: dict[str, RowCode],
    budget: float,
) -> list[CodeMove]:
    """Return changes of code, each the one that saves most bytes by loss after those before it.

    Args:
        losses, sizes: by table and code, of it alone; those of the code `now` too.
        budget: losses far below it count as none.
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
