"""PLE and ESMM by hand; trained on one to three processes and under every plan; resumed; exported."""

import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from exports import assert_scores_alike
from launch import ROOT, train_losses

from recsys.config import LabelConfig, load_config
from recsys.errors import UserError
from recsys.models import DenseInputs
from recsys.models.esmm import ESMM, ESMMConfig, joint_logit
from recsys.models.ple import PLE, PLEConfig

LABELS = {"click": LabelConfig(), "buy": LabelConfig()}
INPUTS = DenseInputs({"a": 4, "b": 4}, ["x"], LABELS)
CHAIN = 'data.labels={click: label, buy: "label == 1 and hour < 12"}'
MODELS = {"ple": "{name: ple, expert_mlp: [16]}", "esmm": "{name: esmm, tower_mlp: [16], dropout: 0.2, dots: true}"}


def some_rows() -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    vectors, floats = {"a": torch.randn(3, 4), "b": torch.randn(3, 4)}, torch.randn(3, 1)
    return vectors, floats, torch.cat([vectors["a"], vectors["b"], floats], dim=1)


@pytest.mark.parametrize("expert_mlp", [[5], []])
@pytest.mark.parametrize("num_levels", [1, 2, 3])
def test_ple_by_hand(expert_mlp: list[int], num_levels: int) -> None:
    vectors, floats, x = some_rows()
    config = PLEConfig(
        num_experts=3, num_task_experts=2, num_levels=num_levels, expert_mlp=expert_mlp, tower_mlp=[], dropout=0.0
    )
    model = PLE(config, INPUTS)
    given = model(vectors, floats)
    for row in range(3):
        states = [x[row : row + 1]] * 3  # of click, of buy, of what is shared
        for number, level in enumerate(model.levels):
            outputs = [[expert(state)[0] for expert in own] for own, state in zip(level.experts, states, strict=True)]
            read = [outputs[0] + outputs[2], outputs[1] + outputs[2], outputs[0] + outputs[1] + outputs[2]]
            assert [len(each) for each in read] == [5, 5, 7]
            assert len(level.gates) == (2 if number == num_levels - 1 else 3)
            following = []
            for gate, state, experts in zip(level.gates, states, read, strict=False):
                shares = torch.softmax(gate.weight @ state[0], dim=0)
                following.append(sum(share * y for share, y in zip(shares, experts, strict=True))[None])
            states = following
        expected = torch.cat([tower(state) for tower, state in zip(model.towers, states, strict=True)], dim=1)[0]
        torch.testing.assert_close(given[row], expected)


def test_dot_products_of_all_pairs_are_read_too() -> None:
    vectors, floats, x = some_rows()
    inputs = DenseInputs({"a": 4, "b": 4, "c": 4}, ["x"], LABELS)
    vectors["c"] = torch.randn(3, 4)
    a, b, c = (vectors[name] for name in "abc")
    expected = torch.cat([x[:, :8], c, *((u * v).sum(1, keepdim=True) for u, v in ((b, a), (c, a), (c, b))), floats], 1)
    for model in (ESMM(ESMMConfig(dots=True), inputs), PLE(PLEConfig(dots=True), inputs)):
        torch.testing.assert_close(model.read(vectors, floats), expected)
        assert model.width == 16


def test_esmm_by_hand() -> None:
    vectors, floats, x = some_rows()
    model = ESMM(ESMMConfig(tower_mlp=[5]), INPUTS)
    click, after = (tower(x)[:, 0].sigmoid() for tower in model.towers)
    outputs = model(vectors, floats)
    torch.testing.assert_close(outputs.sigmoid(), torch.stack([click, click * after], dim=1))
    found = model.predictions(outputs)
    assert list(found) == ["score_click", "score_buy", "score_buy_after_click"]
    torch.testing.assert_close(list(found.values()), [click, click * after, after])


def test_a_product_of_probabilities_is_exact_and_finite() -> None:
    a, b = (values.flatten() for values in np.meshgrid([-700.0, -30, -1, 0, 2, 30, 700], [-700.0, -20, 0, 3, 700]))
    logits = joint_logit(torch.tensor(a), torch.tensor(b)).tolist()
    for one, other, logit in zip(a, b, logits, strict=True):
        if max(abs(one), abs(other)) < 31:  # log p of p = 1 / ((1 + e^-a)(1 + e^-b)), and log (1 - p)
            log_p = -math.log1p(math.exp(-one)) - math.log1p(math.exp(-other))
            assert logit == pytest.approx(log_p - math.log(-math.expm1(log_p)), rel=1e-6)
    assert all(map(math.isfinite, logits))
    assert (
        joint_logit(torch.tensor(700.0), torch.tensor(1.5))
        == joint_logit(torch.tensor(1.5), torch.tensor(700.0))
        == 1.5
    )


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config of each model over the sample."""
    folder = tmp_path_factory.mktemp("configs")
    base = f"base: {ROOT}/configs/dlrm_sample.yaml\ntables: {{item: {{data_type: FP32}}}}\n"
    for name, section in MODELS.items():
        (folder / f"{name}.yaml").write_text(f"{base}data: {{label_column: null}}\nmodel: {section}\n")
    return folder


@pytest.mark.parametrize("labels", ["label_column=label", "labels={a: label, b: {column: hour, loss: squared}}"])
def test_esmm_wants_binary_labels(labels: str, configs: Path) -> None:
    with pytest.raises(UserError, match="in the order in which they happen"):
        load_config(configs / "esmm.yaml", [f"data.{labels}"])


def train(run: Path, config: Path, *options: str, nproc: int = 1) -> list[float]:
    shown = "train.log_every_steps=1"
    return train_losses(config, run, CHAIN, "train.max_steps=10", shown, *options, nproc=nproc)


PLANS = [("ple", "row_wise"), ("ple", "table_wise"), ("ple", "data_parallel"), *((x, "column_wise") for x in MODELS)]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "sharding"), [*PLANS, ("esmm", "row_wise")])
def test_any_ranks_and_plans_learn_the_same(model: str, sharding: str, configs: Path, tmp_path: Path) -> None:
    plan = [f"tables.{table}.sharding_type={sharding}" for table in ("user", "item", "hour")]
    # Row-wise rules do not split columns; ten steps at a lower rate learn less than losses of batches are apart.
    rule = ["optimizer.tables={name: adagrad}", "optimizer.dense.learning_rate=0.02"]
    config = configs / f"{model}.yaml"
    alone = train(tmp_path / "1", config, *rule)
    assert len(alone) == 10 and alone[-1] < alone[0]
    for nproc in (2, 3):
        assert train(tmp_path / f"{nproc}", config, *plan, *rule, nproc=nproc) == pytest.approx(alone, rel=1e-5)
    assert train(tmp_path / "m", config, "train.micro_batch_size=50", *rule) == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_resumed_and_exported(model: str, configs: Path, tmp_path: Path) -> None:
    config = configs / f"{model}.yaml"
    whole = train(tmp_path / "whole", config)
    options = "train.checkpoint_every_steps=5", "run.resume=true"
    train(tmp_path / "parts", config, *options, "train.max_steps=5")
    assert train(tmp_path / "parts", config, *options)[-5:] == whole[-5:]
    assert_scores_alike(tmp_path / "parts", tmp_path)
    if model == "esmm":
        scores = pq.read_table(tmp_path / "predicted")
        click, buy, after = (scores[f"score_{name}"].to_numpy() for name in ("click", "buy", "buy_after_click"))
        np.testing.assert_allclose(buy, click * after, rtol=1e-5)
