"""Distillation: a teacher's scores in a column of data.train are learned beside the labels, or in their place."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from launch import fork_train, losses_of, must_train, run_recsys, train_losses

from recsys.config import DistillConfig, LabelConfig, load_config
from recsys.config.choices import LabelLoss
from recsys.errors import UserError
from recsys.models.base import DenseInputs, Model
from recsys.runtime.run_lock import output_lock
from recsys.training import taught

COLUMNS = "user_id,item_id,history,category,device,hour,price,label,weight"
SETTINGS = ("train.log_every_steps=1", "data.window_mib=1", "data.valid=null", "data.test=null", "train.max_steps=12")
ALONE: Any = SimpleNamespace(from_rank_zero=lambda action: action())  # a group of one rank


def train(run_dir: Path, *overrides: str, nproc: int = 1) -> list[float]:
    """Train and return the loss of each step."""
    return train_losses("configs/dlrm_sample.yaml", run_dir, *SETTINGS, *overrides, nproc=nproc)


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A teacher, and data.train with its scores."""
    folder = tmp_path_factory.mktemp("teacher")
    train(folder / "run", "optimizer.dense.learning_rate=0.02")
    arguments = ("predict", f"{folder}/run", "data/sample/train", f"{folder}/scored", "--keep", COLUMNS)
    run_recsys(*arguments)
    return folder / "run", folder / "scored"


class _Batch:
    def __init__(self, labels: list[list[float]], weights: list[float]) -> None:
        self.labels, self.weights = torch.tensor(labels), torch.tensor(weights)

    def label_weights(self, label: int) -> torch.Tensor:
        return self.weights


class OwnLosses(Model):
    reads_teacher = True

    def losses(self, outputs: Any, batch: Any) -> dict[str, torch.Tensor]:
        entropies = F.binary_cross_entropy_with_logits(outputs[:, 0], batch.labels[:, 0], reduction="none")
        errors = (outputs[:, 1] - batch.labels[:, 1]).square()
        sums = {"price": (batch.weights * errors).sum(), "click": (batch.weights * entropies).sum()}
        return self.with_teacher(sums, outputs, batch)


@pytest.mark.parametrize("model_class", [Model, OwnLosses])
def test_losses_by_hand(model_class: type[Model]) -> None:
    labels = {"click": LabelConfig(), "price": LabelConfig(loss=LabelLoss.squared)}
    model = model_class(DenseInputs({}, [], labels, distill=DistillConfig(weight=0.25, temperature=2.0)))
    outputs = torch.tensor([[1.0, 3.0], [-2.0, 1.0], [5.0, 5.0]])
    # click, price, the teacher's probability of click, its price; the last row is fill
    batch = _Batch([[1, 2, 0.9, 2.5], [0, 0, 0.2, 4.0], [0, 0, 0.5, 0.0]], [1.0, 0.5, 0.0])
    losses = model.losses(outputs, batch)  # type: ignore[arg-type]

    def entropy(logit: float, target: float) -> float:
        p = 1 / (1 + np.exp(-logit))
        return -target * np.log(p) - (1 - target) * np.log(1 - p)

    def softened(p: float) -> float:  # of the logit over 2
        return 1 / (1 + np.sqrt((1 - p) / p))

    hard = entropy(1, 1) + 0.5 * entropy(-2, 0)
    soft = 4 * (entropy(0.5, softened(0.9)) + 0.5 * entropy(-1, softened(0.2)))
    assert float(losses["click"]) == pytest.approx(0.75 * hard + 0.25 * soft, rel=1e-5)
    assert float(losses["price"]) == pytest.approx(0.75 * (1 + 0.5) + 0.25 * (0.25 + 0.5 * 9), rel=1e-5)


OWN_LOSSES = """
import torch.nn.functional as F
from recsys.models.dlrm import DLRM

class OwnLosses(DLRM):
    reads_teacher = True

    def losses(self, outputs, batch):
        loss = F.binary_cross_entropy_with_logits(outputs, batch.labels[:, 0], batch.label_weights(0), reduction="sum")
        return self.with_teacher({"any": loss}, outputs, batch)
"""


def test_a_class_with_its_own_losses_mixes_in_the_teacher(tmp_path: Path) -> None:
    """Its rows are split over ranks as those of other models."""
    rows = pq.read_table("data/sample/train").slice(0, 400)
    pq.write_table(rows.append_column("score", [np.random.default_rng(0).random(400)]), tmp_path / "scored.parquet")
    (tmp_path / "own_losses.py").write_text(OWN_LOSSES)
    config, data = str(Path("configs/dlrm_sample.yaml").resolve()), f"data.train={tmp_path}/scored.parquet"
    losses = []
    for nproc in (1, 2):
        changes = (*SETTINGS, data, "model.name=own_losses.OwnLosses", f"run.dir={tmp_path}/{nproc}")
        must_train(config, *changes, "train.distill.weight=0.3", "train.max_steps=3", nproc=nproc, cwd=tmp_path)
        losses.append(losses_of(tmp_path / str(nproc)))
    assert len(losses[0]) == 3
    torch.testing.assert_close(*losses, rtol=0, atol=1e-5)


def test_scores_that_are_certain_stay_finite() -> None:
    model = Model(DenseInputs({}, [], {"label": LabelConfig()}, distill=DistillConfig(weight=1.0)))
    outputs = torch.tensor([20.0, -20.0], requires_grad=True)
    loss = model.losses(outputs, _Batch([[1.0, 1.0], [0.0, 0.0]], [1.0, 1.0]))["label"]  # type: ignore[arg-type]
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(outputs.grad).all()  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_student_learns_of_its_teacher(scored: tuple[Path, Path], tmp_path: Path) -> None:
    run, data = scored
    taught = (f"data.train={data}", "tables.item.embedding_dim=8", "train.distill.temperature=2")
    plain, half, whole = (
        train(tmp_path / str(weight), *taught, f"train.distill.weight={weight}") for weight in (0, 0.5, 1)
    )
    assert half[0] == pytest.approx((plain[0] + whole[0]) / 2, abs=1e-6), "the loss is a mean of both"
    # One that is its teacher loses no more than the scores' own entropy.
    same = train(tmp_path / "same", *taught, "train.distill.weight=1", f"train.init_from={run}", "train.max_steps=1")
    rows = pq.read_table(data)
    softened = 1 / (1 + np.exp(-np.log(rows["score"] / (1 - rows["score"].to_numpy())) / 2))
    assert len(rows) == 3000 and set(COLUMNS.split(",")) < set(rows.column_names)
    entropy = -softened * np.log(softened) - (1 - softened) * np.log(1 - softened)
    assert same[0] == pytest.approx(4 * entropy.mean(), rel=0.02) and same[0] < whole[0]
    two = train(tmp_path / "two", *taught, "train.distill.weight=0.5", nproc=2)
    torch.testing.assert_close(two, half, rtol=0, atol=1e-4)
    named = (f"train.distill.teacher={run}", f"train.distill.scores={tmp_path}/scored", *taught[1:])
    assert train(tmp_path / "named", *named) == half, "a run that is named scores first"
    begun = train(tmp_path / "named_two", *named, nproc=2)
    torch.testing.assert_close(begun, half, rtol=0, atol=1e-4)
    train(tmp_path / "resumed", *taught, "train.distill.weight=0.5", "train.max_steps=5")
    assert train(tmp_path / "resumed", *taught, "train.distill.weight=0.5", "run.resume=true") == half


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.distill.column=hour"], "column 'hour' (train.distill.column) must hold probabilities, from 0 to 1"),
        (["train.distill={column: scor}"], "no column 'scor'"),
        pytest.param(
            ["train.distill.teacher=runs/none"],
            "config key 'train.distill.teacher': recsys predict failed: ",
            marks=pytest.mark.slow,
        ),
        (["train.distill={weight: 2}"], "'train.distill.weight' must be at most 1, found 2"),
    ],
)
def test_mistakes(overrides: list[str], said: str, tmp_path: Path) -> None:
    done = fork_train("configs/dlrm_sample.yaml", f"run.dir={tmp_path}/run", *SETTINGS, *overrides)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


def test_scores_of_another_teacher_are_told_with_the_key_of_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of one that was trained anew in the same run directory."""
    refusal = UserError("'runs/t/scores' was written from something else (other checkpoint); name another folder")
    monkeypatch.setattr(taught, "run_command", lambda *_, **__: refusal)
    for given, folder in (([], "runs/t/scores"), ([f"train.distill.scores={tmp_path}"], str(tmp_path))):
        config = load_config("configs/dlrm_sample.yaml", ["train.distill.teacher=runs/t", *given])
        with pytest.raises(UserError) as caught:
            taught.with_scores(config, ALONE)
        first, second = caught.value.args
        assert first == f"config key 'train.distill.teacher': recsys predict failed: {refusal}"
        assert f"'{folder}'" in second and "'train.distill.scores'" in second


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ([], set()),
        (['data.filter={train: "day > 2 and hour < 20"}'], {"day"}),
        (["data.filter=\"col('in stock') or day == 1\"", "data.keep_negatives=0.5"], {"day", "in stock"}),
        (['data.filter={valid: "day > 2"}'], set()),
    ],
)
def test_a_student_has_the_columns_of_its_filter(
    changes: list[str], more: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(taught, "run_command", lambda *words, **_: commands.append(words))
    taught.with_scores(load_config("configs/dlrm_sample.yaml", ["train.distill.teacher=runs/t", *changes]), ALONE)
    kept = commands[0][commands[0].index("--keep") + 1].split(",")
    assert sorted(kept) == sorted({*COLUMNS.split(","), *more})


def test_a_class_that_the_student_has_is_trusted_in_its_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another class, which only the run directory names, no code is executed."""
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(taught, "run_command", lambda *words, **_: commands.append(words))
    for name in ("dlrm", "dcn"):
        (tmp_path / "config.yaml").write_text(f"model: {{name: {name}}}")
        taught.with_scores(load_config("configs/dlrm_sample.yaml", [f"train.distill.teacher={tmp_path}"]), ALONE)
    assert ["--trust-code" in words for words in commands] == [True, False]
    (tmp_path / "config.yaml").write_text("model: {name: my_models.FM}")
    with pytest.raises(
        UserError,
        match=r"`recsys predict .* --trust-code` and train with data.train=.*/scores train.distill.teacher=null",
    ):
        taught.with_scores(load_config("configs/dlrm_sample.yaml", [f"train.distill.teacher={tmp_path}"]), ALONE)


def test_runs_that_begin_at_once_wait_for_the_scores_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As trials of a sweep do."""
    done: list[bool] = []

    def predict(*_: str, **__: bool) -> UserError | None:
        with output_lock() as lock:
            try:
                lock.take(tmp_path)
            except UserError as error:
                return error
            if not done:
                time.sleep(0.5)
            done.append(True)
        return None

    monkeypatch.setattr(taught, "run_command", predict)
    monkeypatch.setattr(taught, "_POLL_S", 0.01)
    config = load_config("configs/dlrm_sample.yaml", [f"train.distill={{teacher: runs/t, scores: {tmp_path}}}"])
    with ThreadPoolExecutor(4) as pool:
        configs = list(pool.map(lambda _: taught.with_scores(config, ALONE), range(4)))
    assert len(done) == 4 and {str(config.data.train) for config in configs} == {str(tmp_path)}


def test_losses_that_do_not_mix_in_a_teacher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from recsys.models.two_tower import TwoTower, TwoTowerConfig

    config = TwoTowerConfig(user_features=["user"], item_features=["item"], item_id="item")
    with pytest.raises(
        UserError, match=r"TwoTower has its own losses, which read no teacher; .* let `losses` call `with_teacher`"
    ):
        TwoTower(config, DenseInputs({"user": 4, "item": 4}, [], distill=DistillConfig()))
    monkeypatch.setattr(taught, "run_command", lambda *_, **__: pytest.fail("scored in vain"))
    with pytest.raises(
        UserError, match=r"TwoTower has its own losses, which read no teacher; .* let `losses` call `with_teacher`"
    ):
        taught.with_scores(load_config("configs/two_tower_sample.yaml", ["train.distill.teacher=runs/t"]), ALONE)
