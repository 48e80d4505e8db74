"""Names of tables, features and runs are no paths; whatever is written with an allowed one stays in the run."""

from pathlib import Path

import pytest
from launch import ROOT, fork_train, must_train

from recsys.checkpoint import Marker, TrainState
from recsys.config import load_config
from recsys.data.order import Position
from recsys.errors import UserError

SAMPLE = ROOT / "configs" / "dlrm_sample.yaml"
REFUSED = ["", ".", "..", "a/b", "/a", "../a", "a\0b", "a b", "-a", "a.b", "a@b", "a\nb", "é" * 76, "e\u0301\u200b"]
ALLOWED = ["a", "7", "_a", "a-b", "Größe", "用户", "x" * 150]


def _config(folder: Path, name: str, section: str) -> Path:
    """Write the sample's config with a table or feature of this name, which may be what YAML alone can tell."""
    feature, table = (name, "user") if section == "features" else ("user_id", name)
    text = SAMPLE.read_text().replace("  user_id: {table: user}", f"  {_quoted(feature)}: {{table: {_quoted(table)}}}")
    path = folder / "c.yaml"
    path.write_text(text.replace("  user: {num", f"  {_quoted(table)}: {{mapping: vocabulary, num"))
    return path


def _quoted(text: str) -> str:
    return '"' + "".join(f"\\u{ord(letter):04x}" for letter in text) + '"'


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("section", ["features", "tables"])
def test_a_name_that_is_none_is_refused(section: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^config key '{section}': .* is not a valid name; [^\n]*$"):
        load_config(_config(tmp_path, name, section))


def test_a_wrong_value_under_a_name_with_dots_is_told(tmp_path: Path) -> None:
    path = _config(tmp_path, "..", "tables")
    path.write_text(path.read_text().replace("{mapping: vocabulary, num", "{mapping: {a: 1}, num"))
    with pytest.raises(UserError, match=r"^config key 'tables\.\.\.\.mapping': [^\n]*$"):
        load_config(path)


@pytest.mark.parametrize("name", ["7", "null"])
def test_a_name_that_yaml_takes_for_another_value_is_told(name: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(SAMPLE.read_text().replace("  user_id: {table: user}", f"  {name}: {{table: user}}"))
    said = rf"^config key 'features[.7]*': every name must be text, found {name}; put it in quotes$"
    with pytest.raises(UserError, match=said):
        load_config(path)


@pytest.mark.parametrize("name", ALLOWED)
def test_other_names_are_taken(name: str, tmp_path: Path) -> None:
    assert name in load_config(_config(tmp_path, name, "features")).features
    assert name in load_config(_config(tmp_path, name, "tables"), [f"run.name={_quoted(name)}"]).tables


@pytest.mark.parametrize(
    "override, said",
    [
        ("run.name=../../mine", "'run.name': '../../mine' is not a valid run name"),
        ("run.name=..", "'run.name': '..' is not a valid run name"),
        (f"run.name={'x' * 300}", "of 300 characters is not a valid run name"),
        ('run.dir="a\\0b"', "'run.dir' holds the character NUL"),
        ('data.train=[a, "a\\0b"]', "'data.train.1' holds the character NUL"),
    ],
)
def test_a_run_has_a_name_and_paths_have_no_nul(override: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(SAMPLE, [override])
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("stem", ["a b (2)", ".hidden", "v1.2", "-x", "é" * 120, "..."])
def test_a_config_file_of_any_name_names_its_runs(stem: str, tmp_path: Path) -> None:
    path = tmp_path / f"{stem}.yaml"
    path.write_text(SAMPLE.read_text())
    config = load_config(path)
    assert load_config(SAMPLE, [f"run.name={config.run.name}"]).run.name == config.run.name


@pytest.mark.slow
def test_runs_with_the_longest_and_oddest_names(tmp_path: Path) -> None:
    for name in ("用" * 50, "x" * 150, "7", "-".join("ab")):
        run_dir = tmp_path / str(len(name))
        config = _config(tmp_path, name, "tables")
        options = ("train.max_steps=2", "train.checkpoint_every_steps=1", "data.valid=null", "data.test=null")
        must_train(str(config), f"run.dir={run_dir}", *options)
        assert (run_dir / f"vocabulary/{name}.parquet").is_file()
        longer = ("run.resume=true", *options, "train.max_steps=3")
        assert fork_train(str(config), f"run.dir={run_dir}", *longer).returncode == 0


@pytest.mark.parametrize("name", ["../config.yaml", "/etc/hostname", "..", "a/b", "a\0b", ""])
def test_a_checkpoint_that_names_files_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    state = TrainState(Position())
    Marker(state, {name: (0, "")}, {}, "Adam", {}, {}, 1).write(tmp_path)
    with pytest.raises(UserError, match="is not a file of this folder"):
        Marker.read(tmp_path)
