"""Section `train.init`: how a run may differ from the one whose weights it starts from."""

from dataclasses import dataclass, field
from enum import Enum

from recsys.config.bounds import bounded
from recsys.errors import UserError


class Take(Enum):
    """Which tensors of a kind are loaded.

    `all`: every one; this config and the checkpoint must have the same. `matching`: those that both have alike; what
    only this config has is initialised, what only the checkpoint has is skipped. `none`: all are initialised.
    """

    all, matching, none = "all", "matching", "none"


@dataclass
class InitConfig:
    """How train.init_from may differ from this config; what was loaded, kept and new is in RUN/loaded.json."""

    tables: Take = Take.all  # which tables to load, by name; embedding_dim must be the same
    resize_tables: bool = False  # if num_embeddings differs, load the rows that both have, and initialise the others
    convert_tables: bool = False  # if data_type differs, convert the weights
    dense: Take = Take.all  # which weights of the dense part to load, by name and shape
    optimizers: Take = Take.all  # which state of both optimizers to load, of the weights that are loaded
    # Keys that may differ, though rows or numbers then mean something else: [features.price.log1p, tables.item.*].
    allow_changes: list[str] = field(default_factory=list)
    # Vocabulary tables: ids keep their rows, and new ids that data.train has min_count times get rows of their own, the
    # most frequent first, up to num_embeddings in all. The new rows are initialised.
    grow_vocabularies: bool = False
    # With grow_vocabularies: an id that data.train has not had for so many runs in a row, including this one, gives its
    # row to a new id that needs one, the longest unseen first. So ids that come and go do not fill the table.
    evict_after_runs: int | None = bounded(None, 1)
    # By table: file with `vector` and `id` or `row`, as `recsys tables export` writes; works without init_from too.
    # Optimizer state that the file lacks, or has from another optimizer, is initialised for its rows.
    from_parquet: dict[str, str] = field(default_factory=dict)


def check_init(init: InitConfig, init_from: str | None) -> None:
    """Refuse settings of train.init that differ from their defaults, if train.init_from is not set."""
    initial = InitConfig(from_parquet=init.from_parquet)
    changed = [name for name, value in vars(init).items() if value != getattr(initial, name)]
    if changed and init_from is None:
        raise UserError(
            f"config key 'train.init.{changed[0]}' says how train.init_from may differ, which is not set; set it, or "
            f"drop train.init.{changed[0]}"
        )
    if init.evict_after_runs is not None and not init.grow_vocabularies:
        raise UserError(
            "config key 'train.init.evict_after_runs' frees rows for new ids, which get rows only with "
            "train.init.grow_vocabularies=true; set it too"
        )
