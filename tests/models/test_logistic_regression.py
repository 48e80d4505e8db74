"""Logistic regression: by hand, and trained on one process and two."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from launch import ROOT, must_train

from recsys.config import LabelConfig, load_config
from recsys.errors import UserError
from recsys.models import DenseInputs
from recsys.models.logistic_regression import LogisticRegression, LogisticRegressionConfig

CONFIG = "configs/dlrm_sample.yaml"


def test_by_hand() -> None:
    labels = {"click": LabelConfig(), "buy": LabelConfig()}
    model = LogisticRegression(LogisticRegressionConfig(), DenseInputs({"a": 4, "b": 4}, ["x"], labels))
    with torch.no_grad():
        model.bias.copy_(torch.tensor([0.5, -1.0]))
        model.numbers.weight.copy_(torch.tensor([[2.0], [3.0]]))
    vectors = {"a": torch.tensor([[1.0, 2.0, 9.0, 9.0]]), "b": torch.tensor([[10.0, 20.0, 9.0, 9.0]])}
    assert model(vectors, torch.tensor([[0.1]])).tolist() == [[pytest.approx(11.7), pytest.approx(21.3)]]


@pytest.mark.slow
def test_it_learns_alike_on_one_process_and_two(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / CONFIG).read_text()) | {"model": {"name": "logistic_regression"}}
    (tmp_path / "lr.yaml").write_text(yaml.dump(config))
    results = []
    for nproc in (1, 2):
        run = tmp_path / f"run{nproc}"
        options = (f"run.dir={run}", "data.test=data/sample/train", "optimizer.tables.learning_rate=0.5")
        must_train(str(tmp_path / "lr.yaml"), *options, nproc=nproc)
        results.append(json.loads((run / "result.json").read_text())["metrics"]["test"])
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    assert results[0]["auc"] > 0.6  # of the rows that it has seen


def test_a_label_without_a_weight_in_the_vectors() -> None:
    labels = ",".join(f"label{i}: label" for i in range(5))
    with pytest.raises(UserError, match="embedding_dim' must be at least 5"):
        load_config(
            ROOT / "configs/logistic_regression_movielens.yaml", ["data.label_column=null", f"data.labels={{{labels}}}"]
        )
