"""Section `data` of a config: Parquet files, how they are read, and the labels in them."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from recsys.config.bounds import LARGE, bounded
from recsys.config.choices import LabelLoss, LabelNulls


@dataclass
class LabelConfig:
    """A label: what to predict for each row. Its loss is the weighted mean over the rows that have it."""

    column: str | None = None  # default: the name of the label
    expression: str | None = None  # instead of a column: a condition as in data.filter, "event == 'purchase'"
    loss: LabelLoss = LabelLoss.binary
    weight: float = bounded(1.0, 0, LARGE)  # weight of this label in the sum of losses
    nulls: LabelNulls = LabelNulls.refuse


@dataclass
class DataConfig:
    """Section `data`: Parquet files and how they are read; a path is a directory, glob or file, or a list of these."""

    train: Any = MISSING  # Parquet to train on
    valid: Any = None  # evaluated every train.eval_every_steps or eval_every_epochs, and at the end
    test: Any = None  # evaluated once, at the end
    items: Any = None  # retrieval: all items, one row each
    label_column: str | None = None  # column of 0 and 1, for a single label; short for labels={label: {column: …}}
    # Labels to learn, by name; the model has an output for each. `click: clicked` is short for {column: clicked}, and a
    # text of more than one word for an expression: `buy: "event == 'purchase'"`.
    labels: dict[str, LabelConfig] = field(default_factory=dict)
    weight_column: str | None = None  # weight of each row in losses and metrics of labels; default: all weigh 1
    # Train on this share of the rows of data.train without a positive label, the same rows in every epoch. Each counts
    # 1 / share times, so losses and predictions stay those of all rows. Other data keep all their rows.
    keep_negatives: float | None = bounded(None, 1e-6, 1)
    targets_column: str = "targets"  # retrieval: held-out items of a user, a list of raw ids
    seen_column: str | None = "seen"  # retrieval: items masked when ranking, a list of raw ids
    candidates_column: str | None = None  # `recsys recommend`: items to choose from, a list of raw ids
    shuffle: bool = True  # `false`: rows come in the order of the files
    # Equal parts of a dataset; each step reads rows from all. With a multiple of the ranks, no row is decoded twice.
    num_streams: int = bounded(8, 1, 2**20)
    # MiB of rows, in memory, to shuffle together; each stream holds two such windows, or as many as a batch needs.
    window_mib: int = bounded(64, 1, 2**20)
    drop_last: bool = False  # leave out the rows of data.train that do not fill the last batch of an epoch
    num_threads: int | None = bounded(None, 0, 1024)  # threads to decode; 0: the training one; default: 2, on GPUs ≤ 12
    processes: bool | None = None  # decode data.train in processes, not threads; default: on GPUs, if num_threads ≥ 3
    # Batches that a thread collates ahead; 0: the training thread collates them. Default: 4 with a GPU, else 0.
    prefetch_batches: int | None = bounded(None, 0, 2**20)
    max_rows: int | None = bounded(None, 1)  # use only this many rows of each dataset, the first
    # Columns that files may lack, and that are null there: [channel], if it was added to the data later.
    optional_columns: list[str] = field(default_factory=list)
    # Use only these rows of train, valid and test: "day >= '2026-11-01'"; {train: …, items: …} gives each its own
    # filter. result.json records it with "${oc.env:DAY}" filled in, so keep secrets out of it.
    filter: Any = None
    verify_checksums: bool = True  # verify the checksums of pages that have them, as in files of this project
    retries: int = bounded(3, 0, 100)  # how often a failed read from a remote file system is tried again
    max_bad_files: int = bounded(0, 0)  # leave out up to so many files with an unreadable footer, instead of failing
    max_bad_rows: int = bounded(0, 0)  # up to so many rows that cannot be decoded get weight 0, instead of failing
