"""What libraries keep is predicted by what a config has them do."""

import pytest
from launch import ROOT

from recsys.config import load_config
from recsys.memory.libraries import library_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("overrides", "num_threads", "on_gpu", "mib"),
    [
        ([], 2, False, 0),
        (["train.compile=true"], 2, False, 110),
        (["train.compile=true"], 0, True, 0),  # a GPU's process has more before, which the constant of its kind counts
        (["precision.autocast=bf16"], 2, False, 12),
        ([], 3, False, 106),
        ([], 0, False, 0),
    ],
)
def test_what_a_config_has_them_keep(overrides: list[str], num_threads: int, on_gpu: bool, mib: int) -> None:
    plain, config = (load_config(f"{ROOT}/configs/dlrm_sample.yaml", keys) for keys in ([], overrides))
    sizes = [library_bytes(each, "later", 1, threads, on_gpu) for each, threads in ((plain, 0), (config, num_threads))]
    assert sizes[1] - sizes[0] == mib * MIB
    assert library_bytes(config, "init", 1, num_threads, on_gpu) == library_bytes(plain, "init", 1, 0, on_gpu)
