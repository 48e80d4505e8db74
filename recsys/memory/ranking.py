"""Memory that an evaluation of users needs to rank items: vectors, scores, and the items that users have listed."""

from recsys.config import Config
from recsys.memory.facts import DataFacts
from recsys.models.items import block_of_scores, rows_at_once
from recsys.runtime.machine import Topology

_POSITION_BYTES = 8  # of an item in the corpus
_PAIR_BYTES = 16  # a user's row and the position of an item
_FINDING_BYTES = 49  # more for each pair, while its place among this rank's items is searched


def items_bytes(config: Config, data: DataFacts, topology: Topology) -> int:
    """Return the bytes of the vectors and positions of a rank's items, which an evaluation of users holds."""
    return -(-data.num_items // topology.world_size) * (4 * config.model.needs().vector_dim + _POSITION_BYTES)


def ranking_bytes(config: Config, data: DataFacts, batch_rows: int, topology: Topology) -> int:
    """Return the bytes that a rank needs to rank the items of the corpus for the users of a batch of `batch_rows` rows.
    The vectors of items are included, those of users are not."""
    ranks, device = topology.world_size, topology.device.type
    by_role = (rows for role, rows in data.eval_rows.items() if role != "items")
    users = min(batch_rows, max(by_role, default=0))  # the other rows of a batch are fillers
    own = -(-data.num_items // ranks)
    block_users, block_items = block_of_scores(own, device)
    scores, hits = (
        min(users, block_users) * block_items,
        min(users, rows_at_once(data.num_items, device)) * data.num_items,
    )
    pairs = int(users * data.listed_items)
    of_all = ranks if ranks > 1 else 0  # ranks whose pairs are gathered here, besides this rank's own pairs
    sent = 2 * _PAIR_BYTES * (1 + of_all) * pairs if of_all else 0  # the pairs of all ranks, as received and joined
    finding = (_PAIR_BYTES * (1 + of_all) + _FINDING_BYTES) * pairs
    scoring = _PAIR_BYTES * (2 + of_all) * pairs + 4 * scores + hits
    return items_bytes(config, data, topology) + max(sent, finding, scoring)


def ranking_peak(config: Config, data: DataFacts, batch_rows: int, topology: Topology) -> int:
    """Return the most bytes that an evaluation needs besides forward passes: to put the items' vectors in order, which
    copies them, or to rank items for a batch of users, whose vectors are held twice, plus those of all ranks."""
    ranks = topology.world_size
    users = 4 * config.model.needs().vector_dim * batch_rows * (2 + (ranks if ranks > 1 else 0))
    return max(2 * items_bytes(config, data, topology), users + ranking_bytes(config, data, batch_rows, topology))
