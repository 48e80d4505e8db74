"""`model.attention` of all rankers: by hand, in place of a pooled list, and however rows are split."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from exports import assert_scores_alike
from launch import ROOT, train_losses
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsys.config import LabelConfig, load_config
from recsys.config.model import find_model
from recsys.errors import UserError
from recsys.models import AttendedLists, AttentionConfig, DenseInputs

RANKERS = ("dcn", "deepfm", "dlrm", "esmm", "final_mlp", "fm", "mmoe", "ple", "wukong")
TASKS, EQUAL_WIDTHS = ("esmm", "mmoe", "ple"), ("deepfm", "fm")


def some_inputs() -> tuple[dict[str, Any], torch.Tensor]:
    torch.manual_seed(0)
    lists = JaggedTensor(torch.randn(4, 3), lengths=torch.tensor([3, 0, 1]))
    return {"user": torch.randn(3, 3), "list": lists, "item": torch.randn(3, 3)}, torch.randn(3, 1)


def test_by_hand() -> None:
    vectors, _ = some_inputs()
    attention = AttendedLists(AttentionConfig(attention={"list": "item"}), DenseInputs(dict.fromkeys(vectors, 3), []))
    given = attention(vectors)
    assert list(given) == list(vectors) and given["user"] is vectors["user"] and given["item"] is vectors["item"]
    expected, (mlp,) = torch.zeros(3, 3), (own.mlp for own in attention.values())
    for row, key in zip((0, 0, 0, 2), vectors["list"].values(), strict=True):
        query = vectors["item"][row]
        expected[row] += mlp(torch.cat([query, key, query - key, query * key])) * key
    torch.testing.assert_close(given["list"], expected)


@pytest.mark.parametrize("name", RANKERS)
def test_a_ranker_reads_the_weighted_sum_in_place_of_the_list(name: str) -> None:
    vectors, floats = some_inputs()
    labels = {"click": LabelConfig(), "buy": LabelConfig()} if name in TASKS else {"click": LabelConfig()}
    inputs, ranker = DenseInputs(dict.fromkeys(vectors, 3), ["x"], labels), find_model(name)
    config = ranker.Config(attention={"list": "item"})
    assert config.needs().sequences == ("list",)
    model = ranker(config, inputs)
    plain = ranker(ranker.Config(), inputs)
    plain.load_state_dict({key: value for key, value in model.state_dict().items() if not key.startswith("attention")})
    torch.testing.assert_close(model(vectors, floats), plain(model.attention(vectors), floats))


def config_of(name: str, folder: Path) -> Path:
    """Write the config of a ranker over the sample, with two lists, of different widths if the model can read such."""
    labels = '{label_column: null, labels: {click: label, buy: "label == 1 and hour < 12"}}' if name in TASKS else "{}"
    item = f"{{data_type: FP32, embedding_dim: {8 if name in EQUAL_WIDTHS else 16}}}"
    model = f"{{name: {name}, attention: {{history: item_id, hour: device}}}}"
    base = f"base: {ROOT}/configs/dlrm_sample.yaml\ntables: {{item: {item}}}"
    (folder / "c.yaml").write_text(f"{base}\ndata: {labels}\nmodel: {model}\n")
    return folder / "c.yaml"


@pytest.mark.parametrize("name", RANKERS)
def test_all_rankers_check_it(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    assert load_config(config).unpooled_features() == ["history", "hour"]
    with pytest.raises(UserError, match="mean 'item_id'"):
        load_config(config, ["model.attention={history: itemid}"])


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample with most lists empty, so that many micro-batches have no id of a list."""
    folder = tmp_path_factory.mktemp("rows")
    table = ds.dataset("data/sample/train").to_table()
    lists = [ids if i % 50 == 0 else [] for i, ids in enumerate(table["history"].to_pylist())]
    history = pa.array(lists, table["history"].type)
    pq.write_table(table.set_column(table.column_names.index("history"), "history", history), folder / "rows.parquet")
    return folder / "rows.parquet"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dcn", "deepfm", "final_mlp", "ple", "wukong"])
def test_any_ranks_and_micro_batches_learn_the_same(name: str, rows: Path, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    options = (
        *(f"data.train={rows}", "data.valid=null", "train.max_steps=10", "train.log_every_steps=1"),
        *("optimizer.tables={name: adagrad}", "optimizer.dense.learning_rate=0.02"),
    )

    def train(run: str, *more: str, nproc: int = 1) -> list[float]:
        return train_losses(config, tmp_path / run, *options, *more, nproc=nproc)

    alone = train("1")
    assert len(alone) == 10 and alone[-1] < alone[0]
    for nproc, sharding in ((2, "row_wise"), (3, "table_wise")):
        plan = f"tables.item.sharding_type={sharding}"
        assert train(f"{nproc}", plan, nproc=nproc) == pytest.approx(alone, rel=1e-5)
    assert train("parts", "train.micro_batch_size=8") == pytest.approx(alone, rel=1e-5)
    assert train("twice", "train.activation_checkpointing=true") == alone
    assert_scores_alike(tmp_path / "1", tmp_path)
