"""Configs load, and what a run saves loads back to the same."""

from pathlib import Path

import pytest
from launch import ROOT

from recsys.config import DataType, ShardingChoice, load_config, save_config
from recsys.errors import UserError

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_is_saved_whole(path: Path, tmp_path: Path) -> None:
    config = load_config(path, ["data.train=[a.parquet, b]", "run.name=mine"])
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_the_command_line_wins_over_debug_and_debug_over_the_file() -> None:
    path = ROOT / "configs" / "dlrm_sample.yaml"
    config = load_config(path, ["train.max_steps=7", "tables.user.data_type=FP16"], debug=True)
    assert config.debug and config.data.num_threads == 0 and config.data.max_rows == 20_000
    assert config.train.max_steps == 7 and config.train.log_every_steps == 10
    assert config.tables["user"].data_type is DataType.FP16
    assert load_config(path).train.log_every_steps == 10 and load_config(path).data.num_threads == 2


def test_values_are_yaml(tmp_path: Path) -> None:
    path = ROOT / "configs" / "dlrm_sample.yaml"
    overrides = ["data.valid=null", "data.test=", "model.top_mlp=[8, 4]", "optimizer.dense.learning_rate=1e-2"]
    config = load_config(path, [*overrides, "tables.item.sharding_type=row_wise"])
    assert config.data.valid is None and config.data.test is None and config.model.top_mlp == [8, 4]
    assert config.optimizer.dense.learning_rate == 0.01
    assert config.tables["item"].sharding_type is ShardingChoice.row_wise
    assert config.run.name == "dlrm_sample"


def test_dlrm_needs_two_vectors_to_multiply(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(
        "{data: {train: x, label_column: y}, features: {a: {table: t}}, model: {name: dlrm},"
        " tables: {t: {num_embeddings: 9, embedding_dim: 8}}}"
    )
    with pytest.raises(UserError, match="needs two features"):
        load_config(path)
    assert load_config(path, ["model.interaction=dot_and_embeddings"]).model.name == "dlrm"


def test_attention_over_tables_of_one_width() -> None:
    overrides = ["model.attention={history: item_id, hour: device}", "tables.item.embedding_dim=16"]
    with pytest.raises(UserError, match=r"one embedding_dim, found tables\.hour with 8, tables\.item with 16"):
        load_config(ROOT / "configs" / "dlrm_sample.yaml", overrides)
    assert load_config(ROOT / "configs" / "dlrm_sample.yaml", overrides[:1]).unpooled_tables() == {"item", "hour"}
