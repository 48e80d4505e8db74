"""Section `train.init`: how a run may differ from the one whose weights it starts from."""

from dataclasses import dataclass, field
from enum import Enum

from recsys.config.bounds import bounded
from recsys.errors import UserError


class Take(Enum):
    """Which tensors of a kind are loaded.

    `all`: every one, and this config and the checkpoint must have the same. `matching`: those that both have alike;
    what only this config has is initialised, what only the checkpoint has is skipped. `none`: all are initialised.
    """

    all, matching, none = "all", "matching", "none"


@dataclass
class InitConfig:
    """How train.init_from may differ from this config; what was loaded, kept and new is in RUN/loaded.json."""

    tables: Take = Take.all  # by name; embedding_dim must be the same
    resize_tables: bool = False  # of another num_embeddings: the rows that both have; further ones are initialised
    convert_tables: bool = False  # of another data_type: convert the weights
    dense: Take = Take.all  # weights of the dense part, by name and shape
    optimizers: Take = Take.all  # state of both optimizers, of what is taken
    # Keys that may differ, though rows or numbers then stand for something else: [features.price.log1p, tables.item.*].
    allow_changes: list[str] = field(default_factory=list)
    # Vocabulary tables: the ids that have a row keep it, and what new ones data.train shows min_count times get rows of
    # their own too, the most frequent first, up to num_embeddings in all. These rows are initialised.
    grow_vocabularies: bool = False
    # Vocabulary tables that grow: an id that data.train has not shown for so many runs in a row, this one among them,
    # gives its row to a new one that needs it, the longest unseen first. So ids that come and go fill no table.
    evict_after_runs: int | None = bounded(None, 1)
    # By table: file with `vector` and `id` or `row`, as `recsys tables export` writes; goes without init_from too. What
    # it does not have of the optimizer's state, or has of another optimizer, begins anew in its rows.
    from_parquet: dict[str, str] = field(default_factory=dict)


def check_init(init: InitConfig, init_from: str | None) -> None:
    """Refuse settings of train.init that differ from their defaults without train.init_from."""
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
