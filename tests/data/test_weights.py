"""A column of weights may hold numbers of any type, as the contract of the data says."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rows import OPTIONS

from recsys.data.checks import check_weights
from recsys.data.loader import Loader
from recsys.data.parquet import open_dataset
from recsys.data.spec import BatchSpec, FloatColumn, IdColumn
from recsys.errors import UserError
from recsys.ids import IdentityMapping

WEIGHT = FloatColumn("data.weight_column", "weight", None)


@pytest.mark.parametrize(
    "column",
    [
        pa.array(np.array([0, 0.5, 2], np.float16)),
        pa.array([0, 0.5, 2.0], pa.float64()),
        pa.array([0, 0.5, 2.0]).dictionary_encode(),
        pa.array([Decimal("0.0"), Decimal("0.5"), Decimal("2.0")]),
        pa.array([False, True, True]),
        pa.array([0, 1, 2], pa.uint8()),
        pa.array([0, 1, 2], pa.duration("s")),
    ],
    ids=lambda column: str(column.type),
)
def test_weights_of_every_type(column: Any, tmp_path: Path) -> None:
    values = {"none": pa.concat_arrays([column[:1]] * 3), "some": column}
    for name, weights in values.items():
        pq.write_table(pa.table({"row": [0, 1, 2], "weight": weights}), tmp_path / f"{name}.parquet")
    keys = dict.fromkeys(("row", "weight"), "key")
    datasets = {name: open_dataset("data.train", str(tmp_path / f"{name}.parquet"), keys) for name in values}
    with pytest.raises(UserError, match=r"data\.weight_column\) is 0 in every row"):
        check_weights(datasets["none"], WEIGHT)
    check_weights(datasets["some"], WEIGHT)
    spec = BatchSpec([IdColumn("row", "row", IdentityMapping(8))], [], weight=WEIGHT)
    (batch,) = Loader(datasets["some"], spec, OPTIONS, 8).batches()
    of_rows = dict(zip(batch.ids["row"].values().tolist(), batch.weights[batch.ids["row"].lengths() > 0], strict=True))
    scalars = [scalar.as_py() for scalar in column]
    assert of_rows == {row: float(getattr(x, "total_seconds", lambda x=x: x)()) for row, x in enumerate(scalars)}
