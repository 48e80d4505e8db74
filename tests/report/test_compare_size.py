"""Comparing runs of wide configs: the time grows with the keys, and not with their square."""

import time
from pathlib import Path

from recsys.report.compare import differing_keys
from recsys.report.record import Record


def _run(num_features: int, **changed: object) -> Record:
    record = Record(Path("run"))
    features = {f"features.f{i}.{key}": 1 for i in range(num_features) for key in ("table", "nulls", "keep", "column")}
    record.__dict__["config"] = {**features, "train.epochs": 1, **changed}  # in place of a config.yaml that is read
    return record


def test_keys_of_wide_configs_are_compared_quickly() -> None:
    runs = [_run(10_000, **{"features.f7.keep": 2, "seed": 1}), _run(10_001, **{"train.publish.dir": "out", "seed": 2})]
    start = time.process_time()
    assert differing_keys(runs) == [
        ["features.f10000.*", "–", "there"],
        ["features.f7.keep", "2", "1"],
        ["seed", "1", "2"],
        ["train.publish.*", "–", "there"],
    ]
    assert time.process_time() - start < 10
