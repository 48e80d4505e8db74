"""What cannot be quantised, or has not been pruned, is told in a sentence that names the key."""

import pytest

from recsys.config import load_config
from recsys.errors import UserError

TABLES = ("item", "user", "category", "device", "hour")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tables.user={sharding_type: data_parallel, quantize: INT8}", "row_wise, column_wise, found data_parallel"),
        ("tables.user={embedding_dim: 12, quantize: INT2}", "multiple of 8, found 12; use INT4"),
        ("tables.user={mapping: vocabulary, kept_rows: a.parquet}", "name a shorter tables.user.vocabulary"),
        ("tables.user.quantize=INT3", "must be one of FP16, INT8, INT4, INT2 or null, found 'INT3'"),
    ],
)
def test_mistakes(override: str, said: str) -> None:
    with pytest.raises(UserError, match=r"config key 'tables\.user\.") as error:
        load_config("configs/dlrm_sample.yaml", [override])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["precision.dense_int8=true"], r"'precision\.dense_int8': train\.publish writes FP32 layers"),
        (
            ["tables.user.data_type=FP8", "tables.user.init_range=0.1"],
            r"'tables\.user\.data_type': .* found FP8; use FP16",
        ),
        (
            ["train.publish.tables=int2", *(f"tables.{name}.embedding_dim=12" for name in TABLES)],
            r"'train\.publish\.tables': int2 needs .* multiple of 8, found 12 of tables\.user; use int4",
        ),
    ],
)
def test_what_cannot_be_published_is_refused_at_the_start(overrides: list[str], said: str) -> None:
    """Without a folder to publish to it may be trained; a table with a code of its own is written in that."""
    publish = ["train.publish.dir=a", "train.publish.every_steps=1"]
    with pytest.raises(UserError, match=f"config key {said}"):
        load_config("configs/dlrm_sample.yaml", [*publish, *overrides])
    load_config("configs/dlrm_sample.yaml", overrides)
    if "train.publish.tables=int2" in overrides:
        codes = [f"tables.{name}={{quantize: INT4, sharding_type: row_wise}}" for name in TABLES]
        load_config("configs/dlrm_sample.yaml", [*publish, *overrides, *codes])


@pytest.mark.parametrize("mapping", ["hash", "identity", "quotient_remainder"])
def test_all_rows_of_a_table_may_be_pruned(mapping: str) -> None:
    """Then there are two: that of null, and the one that the others share."""
    table = f"mapping: {mapping}, kept_rows: a.parquet" + ", num_ids: 500" * (mapping == "quotient_remainder")
    load_config("configs/dlrm_sample.yaml", [f"tables.user={{num_embeddings: 2, {table}}}"])
    with pytest.raises(UserError, match=r"config key 'tables\.user\.num_embeddings' must be at least 2, found 1"):
        load_config("configs/dlrm_sample.yaml", [f"tables.user={{num_embeddings: 1, {table}}}"])
