"""The vectors of all items, spread over the ranks, and the best items for users."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from recsys.data.batch import Batch
from recsys.runtime.world import World

# Users × items scored together, in FP32: 8 MiB, which suit a core's cache best, or enough to fill a GPU.
_SCORES_AT_ONCE = {"cpu": 1 << 21, "cuda": 1 << 25}
# Of so many users at least, since the vectors of all items are read from memory for each block of users.
_FEWEST_USERS = 16


def rows_at_once(num_items: int, device_type: str) -> int:
    """Return the number of users that are scored against all items at once."""
    return max(1, _SCORES_AT_ONCE[device_type] // max(1, num_items))


def block_of_scores(num_items: int, device_type: str) -> tuple[int, int]:
    """Return the numbers of users and of items that are scored together."""
    users = max(_FEWEST_USERS, rows_at_once(num_items, device_type))
    return users, max(1, min(num_items, _SCORES_AT_ONCE[device_type] // users))


class ItemVectors:
    """Vectors of the items of a corpus, spread over the ranks: each holds those that it has computed.

    Args:
        vectors: those of this rank's items, [own, dim]. positions: where these are in the corpus, int64 [own].
        num_items: size of the corpus.
    """

    def __init__(self, vectors: torch.Tensor, positions: torch.Tensor, num_items: int, world: World) -> None:
        order = positions.argsort()
        self._vectors, self._positions = vectors[order].to(world.device), positions[order].to(world.device)
        self._num_items, self._world = num_items, world
        # The users of the last call, and their best items: one tuple, since several threads may call.
        none = torch.empty(0)
        self._last: tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor]] = None, (none, none)

    def __len__(self) -> int:
        return self._num_items

    def whole(self) -> torch.Tensor:
        """Return all vectors in host memory, [items, dim]; collective."""
        vectors = torch.zeros(self._num_items, self._vectors.shape[1])
        vectors[self._positions.cpu()] = self._vectors.cpu()
        return self._world.sum(vectors)

    def best(self, users: torch.Tensor, k: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and positions of the best items of a batch's rows, best first: each [batch, k].

        Items that are in a row's `seen`, or not in its `candidates` if the batch has these, get a score of -inf; so do
        all items of a row of weight 0. If there are fewer than k items, all are returned. Collective, unless `users`
        are those of the last call.

        Args:
            users: vectors of the batch's users, [batch, dim].
        """
        last_users, best = self._last
        if users is not last_users:  # slices of a batch ask for the same
            # All items would tie for rows that fill up the batch, and breaking ties takes ten times as long as the
            # rest. NaN ties with nothing. These rows stay, since a product of another shape rounds differently.
            uncounted = (batch.weights == 0)[:, None]
            scores, places = self._best_of_all(users.masked_fill(uncounted, torch.nan), min(k, self._num_items), batch)
            best = scores.masked_fill(uncounted, -torch.inf), places
            self._last = users, best
        return best

    def _best_of_all(self, users: torch.Tensor, k: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and positions of the best items of this rank's users among those of all ranks."""
        keys = [] if batch.lists is None else batch.lists.keys()
        lists = {key: torch.stack(pairs_of(batch, key), dim=1) for key in ("candidates", "seen") if key in keys}
        if self._world.world_size == 1:
            return self._best_of_own(users, k, lists)
        # Users are sent, since there are more items: each rank returns its best items for the users of all ranks.
        of_ranks = zip(_gathered(users), *(_gathered(pairs) for pairs in lists.values()), strict=True)
        best = [self._best_of_own(asking, k, dict(zip(lists, pairs, strict=True))) for asking, *pairs in of_ranks]
        most = max(len(scores) for scores, _ in best)
        answers = []
        for of_ranks_users in zip(*best, strict=True):
            sent = torch.stack([_filled(of_rank, most) for of_rank in of_ranks_users])
            answer = torch.empty_like(sent)
            dist.all_to_all_single(answer, sent)
            answers.append(answer.transpose(0, 1).reshape(most, -1)[: len(users)])
        positions, order = answers[1].sort(dim=1)
        scores, places = _best(answers[0].gather(1, order), k)
        return scores, positions.gather(1, places)

    def _best_of_own(
        self, users: torch.Tensor, k: int, lists: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and positions of this rank's best items for users, [users, k]; if it has fewer than k, the rest
        has a score of -inf.

        Args:
            lists: `candidates` and `seen` of the users: rows and positions, int64 [pairs, 2], in order of the rows.
        """
        scores = users.new_full((len(users), k), -torch.inf)
        positions = torch.zeros(len(users), k, dtype=torch.int64, device=users.device)
        own, step = min(k, len(self._vectors)), block_of_scores(len(self._vectors), users.device.type)[0]
        pairs_by_key = {key: self._own(pairs) for key, pairs in lists.items()}
        is_fill = users.isnan().all(dim=1).tolist()
        for start in range(0, len(users), step) if own else ():
            rows = slice(start, start + step)
            if all(is_fill[rows]):
                continue
            listed = {key: _of_rows(pairs, rows) for key, pairs in pairs_by_key.items()}
            scores[rows, :own], places = self._best_of_block(users[rows], own, listed)
            positions[rows, :own] = self._positions[places]
        return scores, positions

    def _best_of_block(
        self, users: torch.Tensor, k: int, listed: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and places of this rank's k best items for some users, some items at a time.

        Args:
            listed: rows and places of items, by key.
        """
        best = users.new_empty(len(users), 0), torch.empty(len(users), 0, dtype=torch.int64, device=users.device)
        step = block_of_scores(len(self._vectors), users.device.type)[1]
        for first in range(0, len(self._vectors), step):
            scores = users @ self._vectors[first : first + step].T
            here = {key: _of_places(pairs, slice(first, first + step)) for key, pairs in listed.items()}
            if "candidates" in here:
                barred = torch.ones_like(scores, dtype=torch.bool)
                barred[here["candidates"]] = False
                scores.masked_fill_(barred, -torch.inf)
            if "seen" in here:
                scores[here["seen"]] = -torch.inf
            of_step, places = _best(scores, min(k, scores.shape[1]))
            del scores  # before those of the next items
            if not first:
                best = of_step, places
                continue
            places, order = torch.cat([best[1], places + first], dim=1).sort(dim=1)
            of_both, kept = _best(torch.cat([best[0], of_step], dim=1).gather(1, order), min(k, places.shape[1]))
            best = of_both, places.gather(1, kept)
        return best

    def _own(self, pairs: torch.Tensor) -> torch.Tensor:
        """Return the pairs whose items are on this rank, with the places of the items in its vectors."""
        if not len(self._positions):
            return pairs[:0]
        places = torch.searchsorted(self._positions, pairs[:, 1].contiguous()).clamp(max=len(self._positions) - 1)
        return torch.stack([pairs[:, 0], places], dim=1)[self._positions[places] == pairs[:, 1]]


def _best(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k highest scores of each row, and their places, [rows, k]; of equal scores the first ones.

    `topk` returns any of equal scores, so the number of ranks would decide among items whose ids share a table row.
    """
    highest, places = scores.topk(min(k + 1, scores.shape[1]), dim=1)
    last, below, places = highest[:, k - 1 : k], highest[:, k:], places[:, :k]
    tied = ((last == below) & (last > -torch.inf)).any(1).nonzero().flatten()
    if len(tied):
        lower, equal = scores[tied] < last[tied], scores[tied] == last[tied]
        room = k - (~(lower | equal)).sum(1, keepdim=True)
        chosen = ~lower & ~(equal & (equal.cumsum(1, dtype=torch.int32) > room))
        places[tied] = chosen.nonzero()[:, 1].view(len(tied), k)
    places = places.sort(dim=1).values
    ordered, order = scores.gather(1, places).sort(dim=1, descending=True, stable=True)
    return ordered, places.gather(1, order)


def pairs_of(batch: Batch, key: str, rows: slice = slice(0, None)) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and position of each item in a list of some rows of a batch, in the order of the rows, which are
    counted from the first of `rows`."""
    jagged = batch.lists[key]  # type: ignore[index]
    lengths, offsets = jagged.lengths()[rows].long(), jagged.offsets().long()
    values = jagged.values()[offsets[rows.start] : offsets[rows.start + len(lengths)]]
    row = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    in_corpus = values >= 0
    return row[in_corpus], values[in_corpus].long()


def _of_rows(pairs: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows, counted from the first of `rows`, and places of the pairs of these rows."""
    first, last = torch.searchsorted(pairs[:, 0].contiguous(), pairs.new_tensor([rows.start, rows.stop])).tolist()
    row, place = pairs[first:last].unbind(1)
    return row - rows.start, place


def _of_places(pairs: tuple[torch.Tensor, torch.Tensor], places: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs of row and place whose place is among some, counted from the first of these."""
    row, place = pairs
    is_here = (place >= places.start) & (place < places.stop)
    return row[is_here], place[is_here] - places.start


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all ranks, which may have different numbers of rows; collective."""
    counts = gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
    rows = gather(_filled(tensor, max(counts))).split(max(counts)) if max(counts) else [tensor] * len(counts)
    return [of_rank[:count] for of_rank, count in zip(rows, counts, strict=True)]


def _filled(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return a tensor padded with zeros to a number of rows."""
    return torch.cat([tensor, tensor.new_zeros(num_rows - len(tensor), *tensor.shape[1:])])


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, which have equally many each, in order of rank; collective."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.cat(gathered)


def barred_scores(keys: torch.Tensor, ids: torch.Tensor, row: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return which drawn items are not negatives of a user, who has them, or are fillers, [rows, keys] bool.

    Args:
        keys: table rows of the drawn items, ascending; below 0 for fillers. ids: table rows of all users' items.
        row: the users of these, [ids].
    """
    place = torch.searchsorted(keys, ids)  # the first of equal keys
    place = torch.where(keys[place.clamp(max=len(keys) - 1)] == ids, place, len(keys))
    barred = torch.zeros(num_rows, len(keys) + 1, dtype=torch.bool, device=keys.device)
    barred[row, place] = True
    return barred[:, torch.searchsorted(keys, keys)] | (keys < 0)
