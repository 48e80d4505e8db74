"""Values of `key=value`: a comment in one would leave out a part of it without a word."""

import pytest
from launch import ROOT

from recsys.config import as_value, load_config
from recsys.errors import UserError

SAMPLE = ROOT / "configs" / "dlrm_sample.yaml"


@pytest.mark.parametrize("value", ["runs/try #3", "#3", "[a, b] # c", "{a: b} #"])
def test_a_value_with_a_comment_is_refused(value: str) -> None:
    with pytest.raises(UserError, match=r"is not readable YAML: '#.*' would be a comment; put the value in quotes"):
        load_config(SAMPLE, [f"run.dir={value}"])


@pytest.mark.parametrize("path", ["runs/try #3", "#3", "a#3", "a, b: [c]", "it's", 'a "b"', "ü\tv", "1e-3", "null"])
def test_a_path_in_quotes_is_read_as_it_is(path: str) -> None:
    assert load_config(SAMPLE, [f"run.name=a{len(path)}", f"data.test={as_value(path)}"]).data.test == path
