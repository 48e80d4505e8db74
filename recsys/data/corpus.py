"""The items of a retrieval model, data.items: their raw ids, and the positions of these."""

import pyarrow as pa
import pyarrow.compute as pc

from recsys.config import Config
from recsys.data.dataset import Dataset
from recsys.data.parquet import read_column
from recsys.data.wanted import item_column
from recsys.errors import UserError, counted
from recsys.ids import IndexMapping, num_again


def read_corpus(config: Config, items: Dataset) -> pa.Array:
    """Return the raw ids of all items, in file order.

    Raises:
        UserError: an id is null, or occurs twice.
    """
    column = item_column(config)
    ids = read_column(items, column)
    if ids.null_count:
        raise UserError(
            f"config key '{items.key}': column '{column}' holds {counted(ids.null_count, 'null')}; leave them out"
        )
    if num_again(ids):
        counts = ids.value_counts()
        twice = counts.filter(pc.greater(counts.field("counts"), 1))
        raise UserError(
            f"config key '{items.key}': item {twice[0]['values']} occurs {twice[0]['counts']} times; "
            f"list every item once"
        )
    return ids


def index_of_items(config: Config, items: Dataset, corpus: pa.Array) -> IndexMapping:
    """Return the mapping from the raw ids of items to their positions.

    Args:
        corpus: result of `read_corpus`.

    Raises:
        UserError: the ids are of a type that no id may have.
    """
    try:
        return IndexMapping(corpus)
    except (UserError, TypeError) as error:
        raise UserError(f"config key '{items.key}': column '{item_column(config)}': {error}") from error
