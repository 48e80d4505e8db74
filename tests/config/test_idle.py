"""Settings that another key leaves without effect: each is told, and none that has one."""

from pathlib import Path

import pytest

from recsys.config import idle_settings, load_config

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
