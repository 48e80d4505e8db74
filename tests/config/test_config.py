"""Configs load, and what a run saves loads back to the same."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from launch import ROOT

from recsys.config import DataType, IdMappingType, ShardingChoice, config_text, load_config
from recsys.errors import UserError
from recsys.report.record import Record

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_is_saved_whole(path: Path, tmp_path: Path) -> None:
    config = load_config(path, ["data.train=[a.parquet, b]", "run.name=mine"])
    (tmp_path / "config.yaml").write_text(config_text(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_a_table_that_was_added_is_saved_too(tmp_path: Path) -> None:
    """As one that large tables are joined to; its choices are written by their names, as those that were given are."""
    config = load_config(ROOT / "configs/dlrm_sample.yaml")
    config.tables["more"] = replace(config.tables["item"], mapping=IdMappingType.vocabulary)
    config.features["history"].table = "more"
    (tmp_path / "config.yaml").write_text(config_text(config))
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.slow
def test_what_a_run_of_many_features_saves_is_read_by_runs_and_reports(tmp_path: Path) -> None:
    names = range(300)
    lines = ["{data: {train: x, label_column: y}, model: {name: dlrm}, features: {"]
    lines += [f"f{name}: {{table: t{name}}}," for name in names]
    lines += ["}, tables: {", *(f"t{name}: {{num_embeddings: 9, embedding_dim: 8}}," for name in names), "}}"]
    (tmp_path / "many.yaml").write_text("\n".join(lines))
    config = load_config(tmp_path / "many.yaml", ["run.name=mine"])
    (tmp_path / "config.yaml").write_text(config_text(config))
    assert load_config(tmp_path / "config.yaml") == config
    assert Record(tmp_path).config["tables.t299.embedding_dim"] == 8


def test_the_command_line_wins_over_debug_and_debug_over_the_file() -> None:
    path = ROOT / "configs" / "dlrm_sample.yaml"
    config = load_config(path, ["train.max_steps=7", "tables.user.data_type=FP16"], debug=True)
    assert config.debug and config.data.num_threads == 0 and config.data.max_rows == 20_000
    assert config.train.max_steps == 7 and config.train.log_every_steps == 10
    assert config.tables["user"].data_type is DataType.FP16
    assert load_config(path).train.log_every_steps == 10 and load_config(path).data.num_threads is None


def test_values_are_yaml() -> None:
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


@pytest.mark.parametrize("clip, said", [("[null, null]", "[null, null]"), ("[3, null, 4]", "[3.0, null"), ("[]", "[]")])
def test_clip_has_an_end_at_least(clip: str, said: str) -> None:
    path = ROOT / "configs" / "dlrm_sample.yaml"
    with pytest.raises(UserError, match=r"'features\.price\.clip' must be a lower and an upper bound") as caught:
        load_config(path, [f"features.price.clip={clip}"])
    assert said in str(caught.value)
    assert load_config(path, ["features.price.clip=[0, null]"]).features["price"].clip == [0, None]
    assert load_config(path, ["features.price.clip=[null, 5]"]).features["price"].clip == [None, 5]


def test_a_config_that_nests_too_deep(tmp_path: Path) -> None:
    deep = "[" * 2000 + "]" * 2000
    (tmp_path / "c.yaml").write_text(f"model: {{top_mlp: {deep}}}")
    with pytest.raises(UserError, match="is not readable YAML"):
        load_config(tmp_path / "c.yaml")
    with pytest.raises(UserError, match="is not readable YAML"):
        load_config(ROOT / "configs" / "dlrm_sample.yaml", [f"model.top_mlp={deep}"])


RANGES = """\
data: {train: x, label_column: y}
features:
  user: {table: user}
  "C{1..3}": {table: "t{08..10}", column: "cat_{0..2}"}
  price: {type: float}
tables:
  user: {num_embeddings: 9, embedding_dim: 8}
  t09: {num_embeddings: 50}
  "t{08..10}": {num_embeddings: 9, embedding_dim: 8, optimizer: {name: sgd}}
  "t{09..10}": {optimizer: {learning_rate: 0.5}}
model: {name: dlrm}
"""


def test_ranges_of_names(tmp_path: Path) -> None:
    """In the place of the range, bound number by number; what is written out, or comes later, wins."""
    path = tmp_path / "mine.yaml"
    path.write_text(RANGES)
    config = load_config(path, ["tables.t{08..09}.embedding_dim=16", "tables.t10.embedding_dim=4"])
    assert list(config.features) == ["user", "C1", "C2", "C3", "price"]
    found = [(config.features[name].table, config.features[name].column) for name in ("C1", "C2", "C3")]
    assert found == [("t08", "cat_0"), ("t09", "cat_1"), ("t10", "cat_2")]
    tables = {name: (table.num_embeddings, table.embedding_dim) for name, table in config.tables.items()}
    assert tables == {"user": (9, 8), "t09": (50, 16), "t08": (9, 16), "t10": (9, 4)}
    optimizers = [config.table_optimizer(name) for name in ("t08", "t09", "t10")]
    assert [(each.name.name, each.learning_rate) for each in optimizers] == [("sgd", 0.05), ("sgd", 0.5), ("sgd", 0.5)]
    (tmp_path / "saved.yaml").write_text(config_text(config))
    assert ".." not in (tmp_path / "saved.yaml").read_text()
    again = load_config(tmp_path / "saved.yaml")
    assert (again.features, again.tables) == (config.features, config.tables)


def test_ranges_in_the_lists_of_a_model(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "{data: {train: x}, features: {'u{1..3}': {table: t}, i: {table: t}},"
        " tables: {t: {num_embeddings: 9, embedding_dim: 8}},"
        " model: {name: two_tower, user_features: ['u{1..2}', u3], item_features: [i], item_id: i}}"
    )
    assert load_config(path).model.user_features == ["u1", "u2", "u3"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("C{1..3}", "C{3..1}"), "'features.C{3..1}': {3..1} must count up"),
        (("C{1..3}", "C{1..99999}"), "{1..99999} must count up, over 10,000 numbers at most"),
        (("cat_{0..2}", "cat_{0..3}"), "'features.C{1..3}': {0..3} has 4 numbers, and the first range 3"),
        (("C{1..3}", "C*"), "alike names in a row are written as C{1..26}"),
    ],
)
def test_ranges_that_are_none(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(RANGES.replace(*change))
    with pytest.raises(UserError) as refused:
        load_config(path)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("boundaries: [1, null]", "'features.a.boundaries[1]' must be a number, found null"),
        ("boundaries: [1, x]", "'features.a.boundaries[1]' must be a number, found 'x'"),
        ("type: float, clip: [x, 1]", "'features.a.clip[0]' must be a number or null, found 'x'"),
        ("cross: [b, null]", "'features.a.cross[1]' must be text, found null"),
    ],
)
def test_elements_of_lists_that_may_be_null(given: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"{{model: {{name: fm}}, features: {{a: {{table: t, {given}}}}}, data: {{train: x}}}}")
    with pytest.raises(UserError, match=re.escape(said)):
        load_config(path)


def test_a_gpu_is_called_cuda() -> None:
    with pytest.raises(UserError, match=r"'run\.device' must be .*, found 'gpu'; did you mean 'cuda'\?"):
        load_config(CONFIGS[0], ["run.device=gpu"])
