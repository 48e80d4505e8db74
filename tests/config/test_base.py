"""`base:` in a config: one file names another, whose keys it takes and overrides."""

import shutil
from pathlib import Path

import pytest
import yaml
from launch import ROOT

from recsys.config import config_text, load_config
from recsys.errors import UserError
from recsys.models.dlrm import DLRMConfig
from recsys.models.two_tower import TwoTowerConfig

SAMPLE = ROOT / "configs" / "dlrm_sample.yaml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the sample config below `shared`."""
    (tmp_path / "shared").mkdir()
    shutil.copy(SAMPLE, tmp_path / "shared" / "sample.yaml")
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_mappings_merge_lists_replace_and_the_command_line_wins(folder: Path) -> None:
    write(
        folder / "shared" / "large.yaml", "base: sample.yaml\ntables: {user: {embedding_dim: 16}}\ntrain: {epochs: 7}"
    )
    text = """
        base: shared/large.yaml
        model: {top_mlp: [4, 2]}
        train: {epochs: 9, global_batch_size: 64}
        features: {extra: {table: user}}
    """
    config = load_config(write(folder / "mine.yaml", text), ["train.global_batch_size=32"])
    sample = load_config(SAMPLE)
    assert isinstance(config.model, DLRMConfig) and isinstance(sample.model, DLRMConfig)
    assert config.tables["user"].embedding_dim == 16 and config.tables["user"].num_embeddings == 1000
    assert config.tables["item"] == sample.tables["item"]
    assert list(config.features) == [*sample.features, "extra"]
    assert config.model.top_mlp == [4, 2] and config.model.bottom_mlp == sample.model.bottom_mlp
    assert (config.train.epochs, config.train.global_batch_size) == (9, 32)
    assert config.run.name == "mine"


def test_the_saved_config_is_whole(folder: Path) -> None:
    config = load_config(write(folder / "mine.yaml", "base: shared/sample.yaml\nseed: ${oc.env:NO_SUCH_SEED,5}"))
    saved = config_text(config)
    assert "base" not in yaml.safe_load(saved) and "${oc.env:NO_SUCH_SEED,5}" in saved
    (folder / "shared" / "sample.yaml").unlink()
    assert load_config(write(folder / "saved.yaml", saved)).tables == config.tables


def test_another_model_takes_no_keys_of_the_model_of_its_base(folder: Path) -> None:
    write(
        folder / "base.yaml", "base: shared/sample.yaml\ndata: {items: items, label_column: null, weight_column: null}"
    )
    user, item = "[user_id, history, device, hour]", "[item_id, category, price]"
    towers = f"{{name: two_tower, user_features: {user}, item_features: {item}, item_id: item_id}}"
    config = load_config(write(folder / "mine.yaml", f"base: base.yaml\nmodel: {towers}"))
    assert isinstance(config.model, TwoTowerConfig) and len(config.model.item_features) == 3
    with pytest.raises(UserError, match=r"'model\.item_features' is not known"):
        load_config(write(folder / "mine.yaml", "base: base.yaml\nmodel: {name: dlrm, item_features: []}"))


def test_a_name_that_is_null_is_taken_out_of_what_is_below(folder: Path) -> None:
    labels = "labels: {click: clicked, buy: 'x > 0'}"
    write(folder / "base.yaml", f"base: shared/sample.yaml\ndata: {{label_column: null, {labels}}}")
    text = "base: base.yaml\nfeatures: {hour: null, price: null}\ntables: {hour: null}\ndata: {labels: {buy: null}}"
    path, sample = write(folder / "mine.yaml", text), load_config(SAMPLE)
    config = load_config(path, ["features.price={type: float}"])
    assert list(config.features) == [*(name for name in sample.features if name not in ("hour", "price")), "price"]
    assert sample.features["price"].log1p and not config.features["price"].log1p  # given anew, without what was below
    assert list(config.tables) == [name for name in sample.tables if name != "hour"]
    assert list(config.data.labels) == ["click"]
    with pytest.raises(UserError, match=r"^config key 'tables.hour': no feature uses .* it: tables.hour=null\)$"):
        load_config(SAMPLE, ["features.hour=null"])
    with pytest.raises(UserError, match=r"^config key 'features.huor' must be .*; did you mean .*hour'\? \(known: cat"):
        load_config(SAMPLE, ["features.huor=null"])


@pytest.mark.parametrize(("below", "given"), [("'x > 0'", "x"), ("x", "'x > 0'"), ("'x > 0'", "'x > 1'")])
def test_a_label_given_anew_as_a_plain_text_replaces_column_and_expression(
    below: str, given: str, folder: Path
) -> None:
    """What else was said of it stays, as in all sections."""
    labels = f"data: {{label_column: null, labels: {{click: clicked, buy: {below}}}}}"
    path = write(folder / "mine.yaml", f"base: shared/sample.yaml\n{labels}")
    settings = ("data.labels.buy.weight=0.5", f"data.labels={{click: clicked, buy: {given}}}")
    found, text = load_config(path, settings).data.labels, given.strip("'")
    expected = (None, text) if " " in text else (text, None)
    assert (found["buy"].column, found["buy"].expression, found["buy"].weight) == (*expected, 0.5)
    assert found["click"].column == "clicked"


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("shared/sampel.yaml", r"does not exist; did you mean '.*shared/sample.yaml'.*base of '.*mine.yaml'"),
        ("shared", r"shared' is a folder, not a file.*base of '.*mine.yaml'"),
        ("mine.yaml", r"mine.yaml' has the base 'mine.yaml', which is itself based on it"),
        ("shared/circle.yaml", r"circle.yaml' has the base '../mine.yaml', which is itself based on it"),
        ("[a.yaml, b.yaml]", r"mine.yaml': base must name one YAML file, found \['a.yaml', 'b.yaml'\]"),
        ("shared/broken.yaml", r"broken.yaml' is not readable YAML.*base of '.*mine.yaml'"),
        ("shared/wrong.yaml", r"config key 'train.epoch' is not known; did you mean 'train.epochs'"),
    ],
)  # fmt: skip
def test_mistakes(folder: Path, base: str, said: str) -> None:
    write(folder / "shared" / "circle.yaml", "base: ../mine.yaml")
    write(folder / "shared" / "broken.yaml", "train: {epochs")
    write(folder / "shared" / "wrong.yaml", "base: sample.yaml\ntrain: {epoch: 3}")
    with pytest.raises(UserError, match=said) as caught:
        load_config(write(folder / "mine.yaml", f"base: {base}\nseed: 1"))
    assert "\n" not in str(caught.value)


def test_a_misspelt_base_and_one_that_is_a_change(folder: Path) -> None:
    with pytest.raises(UserError, match=r"'bsae' is not known; did you mean 'base'\?.*, debug, base"):
        load_config(write(folder / "mine.yaml", "bsae: shared/sample.yaml"))
    with pytest.raises(UserError, match=r"'base=shared/sample\.yaml': base is for config files only"):
        load_config(SAMPLE, ["base=shared/sample.yaml"])
