"""Each config of configs/ on a few drawn rows: every sharding type that it allows learns what one process does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import ROOT, losses_of, run_recsys

from recsys.config import Config, load_config
from recsys.config.choices import COLUMN_SPLITS, UNPOOLED, DataType, ShardingChoice
from recsys.errors import UserError

NUM_ROWS, NUM_IDS, STEPS = 64, 40, 4
LISTS = ("history", "genres", "neighbours")
# Of those that differ in widths and number types alone, one is enough.
LEFT_OUT = {
    "dlrm_frappe_dim64",
    "dlrm_frappe_half",
    "dlrm_large",
    "dlrm_movielens_student",
    "sasrec_movielens_1m",
    "simplex_gowalla",
    "two_tower_movielens_1m",
}
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml") if path.stem not in LEFT_OUT)
KINDS = [choice for choice in ShardingChoice if choice is not ShardingChoice.auto]


def draw(config: Config, folder: Path) -> list[str]:
    """Write rows, and items where the config has some, and return the settings that name them."""
    generator = np.random.default_rng(0)
    columns: dict[str, Any] = {"rating": generator.integers(1, 6, NUM_ROWS), "weight": generator.random(NUM_ROWS) + 0.5}
    for name, feature in config.features.items():
        column = (feature.column or name).partition("+")[0]
        lengths = generator.integers(1, 9, NUM_ROWS)
        if column in LISTS:
            columns[column] = [generator.integers(0, NUM_IDS, length) for length in lengths]
        else:
            columns[column] = generator.integers(0, 20 if feature.table else 9, NUM_ROWS)
    if "neighbours" in columns:
        columns["neighbour_weights"] = [generator.random(len(ids)) for ids in columns["neighbours"]]
    for name in ("label", "click"):
        columns[name] = np.arange(NUM_ROWS) % 2
    columns["buy"] = columns["click"] * (np.arange(NUM_ROWS) % 3 == 0)
    pq.write_table(
        pa.table({name: pa.array(list(values)) for name, values in columns.items()}), folder / "rows.parquet"
    )
    settings = [f"data.train={folder}/rows.parquet", "data.valid=null", "data.test=null"]
    if config.data.items:
        ids = pa.array(range(NUM_IDS))
        items = {column: ids for column in columns if column in ("item_id", "items", "category")}
        pq.write_table(pa.table(items), folder / "items.parquet")
        settings.append(f"data.items={folder}/items.parquet")
    return settings


def losses(config: str, folder: Path, *overrides: str, nproc: int) -> list[float]:
    run_recsys("train", f"configs/{config}.yaml", f"run.dir={folder}", *overrides, nproc=nproc)
    return losses_of(folder)


def plan(config: Config, kind: ShardingChoice) -> list[str]:
    return [f"tables.{name}.sharding_type={kind.name}" for name in config.tables]


def allowed(name: str, settings: Sequence[str]) -> list[ShardingChoice]:
    """Return the sharding types that all tables of a config may have, and see that the others are refused by name."""
    config = load_config(ROOT / "configs" / f"{name}.yaml", list(settings))
    kinds: list[ShardingChoice] = []
    for kind in KINDS:
        try:
            load_config(ROOT / "configs" / f"{name}.yaml", [*settings, *plan(config, kind)])
            kinds.append(kind)
        except UserError as error:
            assert "sharding_type" in str(error)
    by_id = bool(config.unpooled_features())
    by_row = any(config.table_optimizer(table).name.is_row_wise for table in config.tables)
    if any(table.l2_all_rows for table in config.tables.values()):
        assert kinds == [ShardingChoice.data_parallel]
        return kinds
    assert kinds == [x for x in KINDS if not (by_id and x not in UNPOOLED) and not (by_row and x in COLUMN_SPLITS)]
    return kinds


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_plan_that_is_allowed_learns_the_same(name: str, tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yaml", [])
    settings = [*draw(config, tmp_path), "train.global_batch_size=16", f"train.max_steps={STEPS}"]
    settings += ["train.early_stop.metric=null", "train.eval_every_epochs=null", "train.log_every_steps=1"]
    settings += ["optimizer.schedule.name=constant"]
    expected = losses(name, tmp_path / "one", *settings, nproc=1)
    assert len(expected) == STEPS and expected[0] != expected[-1]
    is_half = any(table.data_type is not DataType.FP32 for table in config.tables.values())
    for kind in allowed(name, settings):
        found = losses(name, tmp_path / kind.name, *settings, *plan(config, kind), nproc=2)
        assert found == pytest.approx(expected, rel=1e-3 if is_half else 1e-5), kind.name
