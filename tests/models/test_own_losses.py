"""What a model of one's own returns, and its losses: taken by their names and shapes, or refused by a sentence."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recsys.config import Device, LabelConfig
from recsys.errors import UserError
from recsys.models.base import DenseInputs, Model
from recsys.models.columns import in_order_of_tasks
from recsys.runtime.world import open_world
from recsys.serving.predict import scores_of_rows
from recsys.step.micro_batches import StepLoss, task_weights


def losses_of(outputs: torch.Tensor | tuple[torch.Tensor, ...], *names: str) -> dict[str, torch.Tensor]:
    model = Model(DenseInputs({}, [], {name: LabelConfig() for name in names}))
    labels, weights = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.ones(2)
    batch = SimpleNamespace(labels=labels[:, : len(names)], weights=weights, label_weights=lambda label: weights)
    return model.losses(outputs, batch)  # type: ignore[arg-type]


def test_outputs_have_a_number_for_each_row_and_label() -> None:
    outputs = torch.tensor([1.0, -2.0])
    by_hand = math.log1p(math.exp(-1)) + math.log1p(math.exp(-2))
    assert losses_of(outputs, "click")["click"].item() == pytest.approx(by_hand)
    # As layers give it: each label is set against its own row, and not against all.
    assert losses_of(outputs[:, None], "click") == losses_of(outputs, "click")
    assert losses_of(torch.stack([outputs, -outputs], 1), "click", "buy")["buy"].item() == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("outputs", "names", "found", "wanted"),
    [
        (torch.zeros(2, 2), ["click"], "[2, 2]", "[rows]"),
        (torch.zeros(1, 2), ["click"], "[1, 2]", "[rows]"),
        (torch.zeros(()), ["click"], "[]", "[rows]"),
        (torch.zeros(2), ["click", "buy"], "[2]", "[rows, 2]"),
        (torch.zeros(4), ["click", "buy"], "[4]", "[rows, 2]"),
        ((torch.zeros(2), torch.zeros(2)), ["click"], "a tuple", "[rows]"),
    ],
)
def test_other_outputs_are_refused(outputs: Any, names: list[str], found: str, wanted: str) -> None:
    with pytest.raises(UserError) as caught:
        losses_of(outputs, *names)
    assert f"for 2 rows the model's forward gave {found}, but data.labels" in str(caught.value)
    assert f"a number for each row and label, {wanted}; return that" in str(caught.value)


def test_a_loss_without_a_gradient_is_refused() -> None:
    model = Model(DenseInputs({}, [], {"click": LabelConfig()}))
    model.denominator = lambda batch: batch.weights.sum()  # type: ignore[method-assign]
    batch: Any = SimpleNamespace(labels=torch.ones(2, 1), weights=torch.ones(2), label_weights=lambda _: torch.ones(2))
    with pytest.raises(UserError, match=r"'model\.name': the loss has no gradient, .* without detach\(\)"):
        StepLoss(model, {}, batch).add(torch.zeros(2), batch)
    with torch.no_grad():
        StepLoss(model, {}, batch).add(torch.zeros(2), batch)
    assert StepLoss(model, {}, batch).add(torch.zeros(2, requires_grad=True), batch).requires_grad


def step_loss(losses: Any, *names: str) -> torch.Tensor:
    """Return the loss of a step whose model returns `losses`; the second label of two has weight 3."""
    labels = {name: LabelConfig(weight=1.0 + 2 * place) for place, name in enumerate(names)}
    model: Any = SimpleNamespace(losses=lambda *_: losses, denominator=lambda batch: batch.weights.sum(), num_parts=1)
    batch: Any = SimpleNamespace(weights=torch.ones(2), label_weights=lambda _: torch.ones(2))
    with open_world(Device.cpu, 1), torch.no_grad():
        return StepLoss(model, task_weights(labels), batch).add(torch.zeros(2), batch)


def test_losses_go_by_their_names() -> None:
    """A model with losses of its own may return them in any order; the weights are those of data.labels."""
    losses = {"click": torch.tensor(1.0), "buy": torch.tensor(10.0)}
    assert step_loss(losses, "click", "buy") == step_loss(dict(reversed(losses.items())), "click", "buy") == 31
    assert step_loss({"any": torch.tensor(2.0)}, "click") == 2


@pytest.mark.parametrize(
    ("losses", "names", "said"),
    [
        ({"click": torch.tensor(1.0), "aux": torch.tensor(1.0)}, ["click"], "'aux' of .* one name"),
        ({"click": torch.tensor(1.0)}, ["click", "buy"], "mapping of click, buy to"),
        ({"click": torch.ones(2)}, ["click"], r"of \[2\]"),
        ({}, ["click"], "none, but"),
        (torch.tensor(1.0), ["click"], "a tensor, but"),
    ],
)
def test_other_losses_are_refused(losses: Any, names: list[str], said: str) -> None:
    with pytest.raises(UserError, match=rf"'model\.name': the model's losses gave .*{said}"):
        in_order_of_tasks(losses, names)


def test_predictions_have_a_number_for_each_row() -> None:
    def predicted(scores: torch.Tensor) -> Any:
        dense: Any = SimpleNamespace(model=SimpleNamespace(predictions=lambda outputs: {"score": outputs}))
        opened: Any = SimpleNamespace(model=SimpleNamespace(module=SimpleNamespace(dense=dense)))
        batch: Any = SimpleNamespace(weights=torch.ones(2))
        return scores_of_rows(opened)(SimpleNamespace(outputs=scores, batch=batch))  # type: ignore[arg-type]

    assert predicted(torch.tensor([0.5, 1.0])).to_pydict() == {"score": [0.5, 1.0]}
    with pytest.raises(UserError, match=r"predictions gave 'score' of \[2, 1\], but must give a number for each row"):
        predicted(torch.zeros(2, 1))
