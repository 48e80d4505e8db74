"""Section `model` of a config: keys that every model has, what it needs from the data, and where its class is."""

import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import MISSING

from recsys.config.choices import LabelLoss
from recsys.errors import UserError, nearest

if TYPE_CHECKING:
    from recsys.config.schema import Config

MODELS = {
    "dcn": "recsys.models.dcn.DCN",
    "deepfm": "recsys.models.fm.DeepFM",
    "dlrm": "recsys.models.dlrm.DLRM",
    "esmm": "recsys.models.esmm.ESMM",
    "final_mlp": "recsys.models.final_mlp.FinalMLP",
    "fm": "recsys.models.fm.FM",
    "logistic_regression": "recsys.models.logistic_regression.LogisticRegression",
    "mmoe": "recsys.models.mmoe.MMoE",
    "ple": "recsys.models.ple.PLE",
    "sasrec": "recsys.models.sasrec.SASRec",
    "simplex": "recsys.models.simplex.SimpleX",
    "two_tower": "recsys.models.two_tower.TwoTower",
    "ultragcn": "recsys.models.ultragcn.UltraGCN",
    "wukong": "recsys.models.wukong.Wukong",
}
LABEL_METRICS = {LabelLoss.binary: ("auc", "log_loss", "normalized_entropy"), LabelLoss.squared: ("rmse", "mae")}


@dataclass(frozen=True)
class Needs:
    """Data that a model reads in addition to all features of a row.

    Attributes:
        labels: whether it is trained and evaluated on labels of rows.
        ordered_labels: whether a label can be positive only in rows in which the label before it is.
        sequences: id features whose lists it reads as a vector for each id, not one for the list.
        item_id: of a retrieval model, the feature that identifies the items of data.items.
        item_features: of a retrieval model, the features of items; all others are a user's.
        items_in_rows: of a retrieval model, whether rows of data.train have an item with its features; otherwise only
            drawn items have rows.
        training_features: features that it reads only in training; other data need no column for them.
        vector_dim: of a retrieval model, the width of the vectors of users and items.
        log_shares_of: id feature; the model reads the logarithms of the shares that its table rows have in data.train.
        sampled_items: number of items of data.items drawn for a global batch, as rows behind those of the data.
        sampling_power: items are drawn by their counts in data.train to this power; above 0, it needs `log_shares_of`.
    """

    labels: bool = True
    ordered_labels: bool = False
    sequences: tuple[str, ...] = ()
    item_id: str | None = None
    item_features: tuple[str, ...] = ()
    items_in_rows: bool = True
    training_features: tuple[str, ...] = ()
    vector_dim: int = 0
    log_shares_of: str | None = None
    sampled_items: int = 0
    sampling_power: float = 0.0


@dataclass
class ModelConfig:
    """Section of a model; each model's `Config` extends it.

    Attributes:
        free: names of keys that may differ when a checkpoint of the model is loaded.
        shapes: names of keys that change the shape of a tensor, which is compared when tensors are loaded.
        mlps: key with the widths of the layers of an MLP → its module, for MLPs whose neurons may be pruned: no other
            module gets its widths from that key.
        deciding: key → the key that decides whether it has an effect, and the values with which it does; none: all
            values except null, false, 0 and empty ones. A run reports keys without effect.
    """

    name: str = MISSING

    free: ClassVar[tuple[str, ...]] = ()
    shapes: ClassVar[tuple[str, ...]] = ()
    mlps: ClassVar[Mapping[str, str]] = {}
    deciding: ClassVar[Mapping[str, tuple[str, tuple[Any, ...]]]] = {}

    def needs(self) -> Needs:
        """Return what the model reads of the data."""
        return Needs()

    def has_mlps(self) -> bool:
        """Return whether the model has a `torch.nn.Sequential`, which train.activation_checkpointing is for."""
        return True

    def check(self, config: "Config") -> None:
        """Refuse a section that does not fit the features and tables; bounds of numbers are checked before.

        Raises:
            UserError: names the key, what was found and what is allowed.
        """

    def metric_names(self, config: "Config") -> list[str]:
        """Return the names of the metrics of an evaluation."""
        labels = config.labels()
        return [
            f"{name}.{metric}" if len(labels) > 1 else metric
            for name, label in labels.items()
            for metric in LABEL_METRICS[label.loss]
        ]

    def layer_inputs(self, ids: Sequence[str], floats: Sequence[str]) -> dict[str, list[str]]:
        """Return the features that a layer reads side by side, by its parameter, of all `ids` and `floats`."""
        return {"model": [*ids, *floats]}

    def meaning(self, config: "Config") -> dict[str, Any]:
        """Return the settings of the model that are compared when a checkpoint is loaded, by key."""
        return asdict(self)


def find_model(name: str, is_trusted: bool = True) -> Any:
    """Return the class of a model: one of `MODELS`, or a user's own by its dotted name, which is imported.

    Args:
        is_trusted: whether the user has named the class, not only a run directory.

    Raises:
        UserError: there is no such model, it cannot be imported, or the class is no model.
    """
    key = "config key 'model.name'"
    if name not in MODELS and not re.fullmatch(r"(?:[^\W\d]\w*\.)+[^\W\d]\w*", name):
        problem = f"there is no model '{name}'{nearest(name, MODELS)}" if name else "not set, and needs a value"
        raise UserError(f"{key}: {problem} (known: {', '.join(MODELS)}, or package.module.Class of your own)")
    if name not in MODELS and not is_trusted:
        raise UserError(
            f"{key}: the run was trained with the class '{name}', whose code would be executed; add --trust-code if "
            f"you trust it"
        )
    module_name, _, class_name = MODELS.get(name, name).rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # behind all else, so that nothing there hides a package
    try:
        model = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        if name in MODELS:
            raise  # a package that models here need is missing; no PYTHONPATH mends that
        raise UserError(
            f"{key}: the class '{name}' cannot be imported ({error}); its module has to be installed, or found from "
            f"the current folder or PYTHONPATH"
        ) from error
    section = getattr(model, "Config", None)
    if not (isinstance(model, type) and isinstance(section, type) and issubclass(section, ModelConfig)):
        raise UserError(
            f"{key}: '{name}' is not a model, which is a class derived from recsys.models.Model, with `Config` "
            f"derived from recsys.config.ModelConfig"
        )
    for base in section.__mro__:
        if issubclass(base, ModelConfig) and "__dataclass_fields__" not in vars(base):
            raise UserError(
                f"{key}: the class {base.__qualname__} is not a dataclass, so its fields would not be keys of the "
                f"config; write @dataclass above it"
            )
    return model
