"""What a config means for a number of ranks."""

import re

import pytest

from recsys.config import load_config
from recsys.config.device import check_ranks, repeated_decoding
from recsys.errors import UserError

SAMPLE = "configs/dlrm_sample.yaml"


def test_ranks_without_a_row_of_a_step_are_refused() -> None:
    config = load_config(SAMPLE, ["train.eval_batch_size=9"])
    check_ranks(config, 9)
    with pytest.raises(UserError, match=r"'train\.eval_batch_size' is 9, so that 1 of 10 ranks would have no row"):
        check_ranks(config, 10)


@pytest.mark.parametrize(
    "world_size, said",
    [(1, None), (8, None), (3, "1.25 times; .*num_streams=9 "), (16, "2 times; .*=16 "), (200, "25 times; .*=200 ")],
)
def test_decoding_more_than_once_is_said(world_size: int, said: str | None) -> None:
    sentence = repeated_decoding(load_config(SAMPLE), world_size)
    assert sentence is None if said is None else re.search(said, sentence or "")
