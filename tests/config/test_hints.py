"""What sentences on mistakes advise where the nearest name by letters is not what was meant."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import ROOT

from recsys.config import Device, load_config
from recsys.data.filters import parse_filter
from recsys.data.inputs import open_inputs
from recsys.errors import UserError
from recsys.runtime.world import open_world

RANKER = str(ROOT / "configs/dlrm_sample.yaml")


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    "override, hint",
    [
        ("train.batch_size=100", "did you mean 'train.global_batch_size'?"),
        ("train.steps=100", "did you mean 'train.max_steps'?"),
        ("model.mlp=[64]", "did you mean 'model.bottom_mlp'?"),
        (
            "model={name: dcn, top_mlp: [64]}",
            "not known; of other models, dlrm, wukong have it; did you mean 'model.mlp'?",
        ),
        ("model.botom_mlp=[64]", "not known; did you mean 'model.bottom_mlp'?"),
        ("tables.user={num_embeddings:20, embedding_dim: 8}", "a blank behind the colon: 'num_embeddings: 20'"),
        ("features.user_id={table:user}", "a blank behind the colon: 'table: user'"),
        ("features.user_id={tabel:user}", "did you mean 'features.user_id.table'?"),
    ],
)
def test_keys(override: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(RANKER, [override])
    assert hint in str(caught.value)


@pytest.mark.parametrize("day", ["2026-11-05", "2026-11-12", "2026-1-5"])
@pytest.mark.parametrize("filter_text", ["day == {}", "a > 1 and day >= {}", "{} <= day", "day in [{}]"])
def test_dates_without_quotes(filter_text: str, day: str) -> None:
    with pytest.raises(UserError, match="write dates and times in quotes"):
        parse_filter(filter_text.format(day))
    parse_filter(filter_text.format(f"'{day}'"))


@pytest.mark.parametrize(
    "overrides, hint",
    [
        (["features.user_id.column=phone.oss"], "did you mean 'phone.os'? (it has: phone.os, phone.version, "),
        (
            ["features.history.column=phone", "features.item_id.column=name"],
            "; name a field of the struct, such as 'phone.os'",
        ),
        (["features.user_id.column=phone"], "; name a field of the struct, such as 'phone.os'"),
        (["features.price.column=phone"], "; name a field of the struct, such as 'phone.os'"),
        (["data.filter=phone == 'ios'"], "compare one of its fields, as device.os"),
        (["features.user_id.column=phones.os"], "did you mean 'phones.osx'?"),
        (["data.label_column=hour"], '"data.labels={NAME: hour > 0}" data.label_column=null, or learn'),
        (["data.label_column=name"], "\"data.labels={NAME: name == 'b'}\" data.label_column=null"),
        (["data.label_column=null", "data.labels.a=hour"], '"data.labels={NAME: hour > 0}", or learn'),
    ],
)
def test_columns(overrides: list[str], hint: str, tmp_path: Path) -> None:
    table = pq.read_table("data/sample/train")
    nested = pa.array([{"os": "ios", "version": "16"}] * len(table))
    table = table.append_column("phone", nested).append_column("phones.osx", table["hour"])
    table = table.append_column("name", pa.array(["a", "b"] * len(table))[: len(table)])
    pq.write_table(table, tmp_path / "a.parquet")
    data = [f"data.train={tmp_path}", "data.valid=null", "data.test=null", *overrides]
    with open_world(Device.cpu, num_threads=1) as world, pytest.raises(UserError) as caught:
        open_inputs(load_config(RANKER, data), world)
    assert hint in str(caught.value)
