"""A model of one's own: what it says that it needs, such as items by any key; needs that do not fit; optional keys."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Optional

import pytest
import torch
import torch.nn.functional as F
from launch import ROOT, must_train
from retrieval import write_retrieval

from recsys.config import ModelConfig, load_config
from recsys.config.model import Needs
from recsys.config.model_checks import check_model
from recsys.data.batch import Batch
from recsys.errors import UserError
from recsys.memory.dry_run import rehearse_run
from recsys.models.base import DenseInputs, Vectors
from recsys.models.items import gather
from recsys.models.retrieval import RetrievalConfig, RetrievalModel, first_ids, gather_rows


@dataclass
class ProductsConfig(RetrievalConfig):
    name: str = "test_own_needs.Products"

    def needs(self) -> Needs:
        return Needs(labels=False, item_id="item", item_features=("item", "year"), vector_dim=8, sampled_items=16)


class Products(RetrievalModel):
    """Dot products of the vectors of users and of items, against drawn ones; without a key `item_id`, or a layer."""

    Config = ProductsConfig

    def __init__(self, config: ProductsConfig, inputs: DenseInputs) -> None:
        super().__init__(inputs)
        self.config = config

    def forward(self, vectors: Vectors, floats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return vectors["user"] + vectors["history"], vectors["item"]

    def losses(self, outputs: tuple[torch.Tensor, torch.Tensor], batch: Batch) -> dict[str, torch.Tensor]:
        (users, items), end = outputs, batch.sampled.start
        drawn, keys = gather_rows(items[end:]), first_ids(batch, "item")
        is_own = gather(keys[end:]) == keys[:end, None]
        others = (users[:end] @ drawn.T).masked_fill(is_own, -torch.inf)
        logits = torch.cat([(users[:end] * items[:end]).sum(dim=1, keepdim=True), others], dim=1)
        losses = F.cross_entropy(logits, logits.new_zeros(end, dtype=torch.long), reduction="none")
        return {"softmax": (losses * batch.weights[:end]).sum()}


def own_config(folder: Path) -> Path:
    config = write_retrieval(folder)
    text = config.read_text()
    model = f"model: {{name: {__name__}.Products, top_k: [5]}}"
    config.write_text(f"{text[: text.index('model:')]}{model}\n{text[text.index('train: {global') :]}")
    return config


def test_items_go_by_what_the_model_needs_not_by_a_key_of_that_name(tmp_path: Path) -> None:
    config = own_config(tmp_path)
    settings = f"run.dir={tmp_path / 'run'}", "train.max_steps=2", "data.valid=null"
    must_train(str(config), *settings, cwd=Path(__file__).parent)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]["test"].keys() >= {"recall@5"}


class UsersAlone(Products):
    def forward(self, vectors: Vectors, floats: torch.Tensor) -> torch.Tensor:
        return vectors["user"]

    def losses(self, outputs: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
        return {"length": (outputs.square().sum(dim=1) * batch.weights).sum()}


@dataclass
class WiderConfig(ProductsConfig):
    def needs(self) -> Needs:
        return replace(super().needs(), vector_dim=9)


class Wider(Products):
    Config = WiderConfig


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("Wider", r"gave \[64, 8\] and \[64, 8\] in evaluation, .* \[rows, 9\] each by Needs\.vector_dim"),
        ("UsersAlone", r"gave \[64, 8\] in evaluation, .* \[rows, 8\] each"),
    ],
)
def test_vectors_that_cannot_be_ranked_are_refused_before_training(model: str, said: str, tmp_path: Path) -> None:
    config = load_config(own_config(tmp_path), [f"model.name={__name__}.{model}"])
    with pytest.raises(UserError, match=said):
        rehearse_run(config)


@dataclass
class OwnConfig(ModelConfig):
    name: str = "own.Model"
    wanted: Needs = field(default_factory=Needs)

    def needs(self) -> Needs:
        return self.wanted


ITEMS = {"labels": False, "item_id": "item_id", "item_features": ("item_id",), "vector_dim": 8}


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ({"sequences": ("histroy",)}, r"each id of feature 'histroy', and no id feature .* did you mean 'history'"),
        ({"log_shares_of": "item"}, r"of the ids of feature 'item', and no id feature has that name"),
        ({"training_features": ("price",)}, r"in training alone feature 'price', and no feature has that name"),
        ({"item_features": ("item_id", "pirce")}, r"reads of items feature 'pirce', and no feature"),
        ({"item_id": "item", "item_features": ("item_id",)}, r"by 'item', which is not one of its item features"),
        ({"item_id": None, "sampled_items": 8}, r"names no feature that identifies them; add Needs\.item_id"),
        ({"sampled_items": 8, "sampling_power": 0.5}, r"set it to Needs\.item_id, 'item_id', found None"),
    ],
)
def test_needs_that_do_not_hold_together(needs: dict[str, object], said: str) -> None:
    config = load_config(ROOT / "configs" / "two_tower_sample.yaml")
    with pytest.raises(UserError, match=said):
        check_model(replace(config, model=OwnConfig(wanted=Needs(**{**ITEMS, **needs}))))


def test_items_that_are_drawn_of_no_file() -> None:
    config = load_config(ROOT / "configs" / "two_tower_sample.yaml")
    without = replace(config.data, items=None, valid=None, test=None)
    with pytest.raises(UserError, match=r"'data\.items' is not set, but model own\.Model samples items from it"):
        check_model(replace(config, data=without, model=OwnConfig(wanted=Needs(**ITEMS, sampled_items=8))))


@dataclass
class KeysConfig(WiderConfig):
    width: Optional[int] = None  # noqa: UP045
    widths: Optional[list[int]] = None  # noqa: UP045


class Keys(Products):
    Config = KeysConfig


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("width=wide", r"'model\.width' must be a whole number or null, found 'wide'"),
        ("widths=3", r"'model\.widths' must be a list, each a whole number, found 3"),
        ("widths=[wide]", r"'model\.widths\[0\]' must be a whole number, found 'wide'"),
    ],
)
def test_wrong_values_of_optional_keys(change: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        load_config(own_config(tmp_path), [f"model.name={__name__}.Keys", f"model.{change}"])
