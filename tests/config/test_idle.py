"""Settings that another key leaves without effect: each is told, and none that has one."""

from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from recsys.config import idle_settings, load_config
from recsys.errors import UserError
from recsys.step.build import build_dense_half

DENSE, TABLES = "optimizer.dense", "optimizer.tables"


@pytest.mark.parametrize(
    ("config", "given", "instead"),
    [
        ("dlrm_sample", f"{DENSE}.momentum=0.9", [f"{DENSE}.name=sgd"]),
        ("dlrm_sample", "optimizer.schedule.final_factor=0.1", ["optimizer.schedule.name=cosine"]),
        ("dlrm_sample", "precision.loss_scale_growth_steps=null", ["precision.autocast=fp16"]),
        ("dlrm_sample", "train.early_stop.patience=5", ["train.early_stop.metric=auc", "train.eval_every_epochs=1"]),
        ("dlrm_sample", "train.publish.every_steps=10", ["train.publish.dir=published"]),
        ("dlrm_sample", "train.distill.scores=scores", ["train.distill.teacher=runs/a"]),
        ("dlrm_sample", "features.user_id.keep=first", ["features.user_id.max_length=2"]),
        ("dlrm_sample", "tables.user.stochastic_rounding=true", ["tables.user.data_type=FP16"]),
        ("dlrm_sample", f"{TABLES}.beta1=0.8", [f"{TABLES}.name=adam"]),
        ("dlrm_sample", "model.attention_mlp=[8]", ["model.attention={history: item_id}"]),
        ("two_tower_sample", "model.correct_own=false", ["model.logq_correction=true"]),
        ("two_tower_sample", "model.sampling_power=0.5", ["model.sampled_negatives=8"]),
        ("simplex_movielens", "model.negative_weight=2", ["model.loss=binary"]),
        ("dlrm_sample", "tables.user.cache_load_factor=0.1", ["tables.user.compute_kernel=fused_uvm_caching"]),
        ("sasrec_beauty", "model.num_items=9", ["model.loss=gbce"]),
    ],
)
def test_a_setting_without_effect_is_told(config: str, given: str, instead: list[str]) -> None:
    key, _, value = given.partition("=")
    path, none = Path(f"configs/{config}.yaml"), ["model.logq_correction=false"] * (config == "two_tower_sample")
    (told,) = idle_settings(load_config(path, [*none, given]))
    shown, decides = told.split(" changes nothing with ")
    assert shown.partition("=")[0] == key and float_or_text(shown) == float_or_text(f"{key}={value}")
    assert decides.partition("=")[0] == instead[0].partition("=")[0]
    assert idle_settings(load_config(path, [given, *instead])) == []


def float_or_text(setting: str) -> float | str:
    value = setting.partition("=")[2]
    return float(value) if value.replace(".", "").isdigit() else value


def test_an_optimizer_of_several_tables_is_told_of_once() -> None:
    config = load_config("configs/dlrm_sample.yaml", [f"{TABLES}.name=sgd", f"{TABLES}.eps=1e-4"])
    assert idle_settings(config) == [f"{TABLES}.eps=0.0001 changes nothing with {TABLES}.name=sgd"]


def test_caches_are_not_idle_where_a_fit_may_choose_them() -> None:
    given = ["tables.user.cache_load_factor=0.1", "memory.fit=true"]
    assert idle_settings(load_config("configs/dlrm_sample.yaml", given)) == []


def test_an_optimizer_of_no_table_is_told() -> None:
    given, path = [f"{TABLES}.learning_rate=0.2"], "configs/fm_frappe.yaml"
    tables = load_config(path).tables
    *others, last = (f"tables.{table}.optimizer={{learning_rate: 0.1}}" for table in tables)
    assert idle_settings(load_config(path, [*given, *others])) == []
    (told,) = idle_settings(load_config(path, [*given, *others, last]))
    assert told == f"{TABLES} changes nothing, since each table has an optimizer of its own"


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_activation_checkpointing_of_a_model_without_mlps_is_told(path: Path) -> None:
    config = load_config(path, ["train.activation_checkpointing=true"])
    with torch.device("meta"):
        model = build_dense_half(config, lambda: (torch.zeros(0), 0)).model
    told = "train.activation_checkpointing=true changes nothing, since the model has no MLP"
    assert (told in idle_settings(config)) is not any(isinstance(m, CheckpointWrapper) for m in model.modules())


def test_a_value_for_null_ids_is_refused() -> None:
    with pytest.raises(UserError, match=r"'features\.hour\.fill' is for features of type float"):
        load_config("configs/dlrm_sample.yaml", ["features.hour.fill=5"])
