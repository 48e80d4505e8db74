"""Numbers that a network learns badly of are told by name, and features that hold what it is to find."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import ROOT

from recsys.config import load_config
from recsys.data.checks import labels_as_features, large_numbers
from recsys.data.inputs import Inputs, open_inputs
from recsys.data.parquet import read_head
from recsys.data.spec import FloatColumn, Transform
from recsys.runtime.world import World


def scaled(world: World, folder: Path, scale: float) -> Inputs:
    """Open the sample with the prices of one file, which are then around `scale` and null or infinite somewhere."""
    table = pq.read_table(ROOT / "data/sample/train")
    prices = np.random.default_rng(1).normal(0, scale, len(table))
    prices[7] = np.inf
    column = pa.array(prices, mask=np.arange(len(table)) % 9 == 0)
    table = table.set_column(table.column_names.index("price"), "price", column)
    pq.write_table(table, folder / "a.parquet")
    data = [f"data.train={folder}", "data.valid=null", "data.test=null", "train.max_bad_steps=1",
            "features.price.log1p=false"]  # fmt: skip
    return open_inputs(load_config(ROOT / "configs/dlrm_sample.yaml", data), world)


@pytest.mark.parametrize("scale", [0.01, 1, 20, 30, 200, 1e4, 1e9])
def test_features_and_labels_are_told_by_their_size(scale: float, tmp_path: Path, world: World) -> None:
    inputs = scaled(world, tmp_path, scale)
    train, spec = inputs.datasets["train"], inputs.spec("train")
    told = large_numbers(read_head(train, 1000), spec)
    assert bool(told) == (scale > 20) and len(told) < 2
    assert all("'features.price'" in line and "standardise" in line for line in told)
    (price,) = spec.floats
    divided = replace(spec, floats=[replace(price, transform=Transform(mean=0.0, std=scale))])
    assert not large_numbers(read_head(train, 1000), divided)
    label = FloatColumn("data.labels.watch", "price", finite=False)
    told = large_numbers(read_head(train, 1000), replace(spec, floats=[], labels=[*spec.labels, label]))
    assert bool(told) == (scale > 20) and all("'data.labels.watch'" in line and "units" in line for line in told)


def test_the_sample_and_its_first_config_are_told_nothing(world: World) -> None:
    inputs = open_inputs(load_config(ROOT / "configs/dlrm_sample.yaml"), world)
    assert large_numbers(read_head(inputs.datasets["train"], 1000), inputs.spec("train")) == []
    raw = open_inputs(load_config(ROOT / "configs/dlrm_sample.yaml", ["features.price.log1p=false"]), world)
    (told,) = large_numbers(read_head(raw.datasets["train"], 1000), raw.spec("train"))
    assert "'features.price'" in told


def test_a_feature_of_which_a_label_is_made_is_told(world: World) -> None:
    def told(label: str) -> list[str]:
        features = "features.seen={type: float, column: label}", "features.both={cross: [user_id, label], table: user}"
        options = [f"data.labels={{click: {label}}}", "data.label_column=null", *features]
        inputs = open_inputs(load_config(ROOT / "configs/dlrm_sample.yaml", options), world)
        return labels_as_features(inputs.config, inputs.spec("train").labels)

    assert [line.partition(": ")[0] for line in told("label")] == [
        "config key 'features.seen'",
        "config key 'features.both'",
    ]
    (of_hour,) = told("hour > 12")
    assert "'features.hour': column 'hour' is all that data.labels.click is made of, so" in of_hour
    assert told("label == 1 and hour < 12") == []
