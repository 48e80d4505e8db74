"""Tables of fewer rows than ranks, so that a rank has a table without a row."""

from pathlib import Path

import pytest
from launch import losses_of, must_train

CONFIG = (
    "configs/dlrm_sample.yaml",
    *("train.max_steps=6", "train.log_every_steps=1", "data.valid=null", "data.test=null"),
)
_SPLIT = (
    "tables.user.num_embeddings=2",
    *(f"tables.{table}.sharding_type=row_wise" for table in ("user", "category")),
)


@pytest.mark.parametrize(
    "tables",
    [
        ("tables.device.num_embeddings=2", "tables.device.sharding_type=table_row_wise"),
        # In the kernel of a table without a row follows one that is wider, and one that is narrower.
        pytest.param(
            (*_SPLIT, "tables.user.embedding_dim=4", "tables.category.embedding_dim=64"), marks=pytest.mark.slow
        ),
        pytest.param(
            (*_SPLIT, "tables.user.embedding_dim=64", "tables.category.embedding_dim=4"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_rank_may_have_no_row_of_what_it_looks_up(tables: tuple[str, ...], tmp_path: Path) -> None:
    losses = []
    for nproc in (1, 3):
        must_train(*CONFIG, *tables, f"run.dir={tmp_path}/{nproc}", nproc=nproc)
        losses.append(losses_of(tmp_path / f"{nproc}"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
