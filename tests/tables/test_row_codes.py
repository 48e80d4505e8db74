"""Vectors quantised row by row: values computed by hand, bytes, and errors no larger than half a step."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from recsys.config.choices import RowCode
from recsys.tables.row_codes import add_missing_shapes, coded_row_bytes, encode_rows, quantize_rows

LEVELS = {RowCode.INT8: 255, RowCode.INT4: 15, RowCode.INT2: 3}


@pytest.mark.parametrize(
    ("code", "row", "expected"),
    [
        # Scale 1/3 of the range: -1, 0, 1 and 2 are codes 0 to 3.
        (RowCode.INT2, [-1.0, 0.4, 0.6, 2.0] * 2, [-1.0, 0.0, 1.0, 2.0] * 2),
        # Scale 0.5 from 1 on: 4.3 is 6.6 steps, and code 7.
        (RowCode.INT4, [1.0, 4.3, 8.5, 8.2], [1.0, 4.5, 8.5, 8.0]),
        # Scale 2, bias -10.
        (RowCode.INT8, [-10.0, 0.9, 1.1, 500.0], [-10.0, 0.0, 2.0, 500.0]),
        (RowCode.FP16, [1.0 + 2**-12, 0.0, -3.0, 2.0**-24], [1.0, 0.0, -3.0, 2.0**-24]),
        (RowCode.INT2, [0.5] * 8, [0.5] * 8),
    ],
)
def test_values_by_hand(code: RowCode, row: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(quantize_rows(torch.tensor([row]), code), torch.tensor([expected]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("code", RowCode)
@pytest.mark.parametrize("columns", [8, 24, 64])
def test_each_row_is_off_by_half_a_step_of_its_own_at_most(code: RowCode, columns: int) -> None:
    rows = (
        torch.randn(200, columns, generator=torch.Generator().manual_seed(columns))
        * torch.logspace(-2, 2, 200)[:, None]
    )
    error = (quantize_rows(rows, code) - rows).abs().amax(1)
    step = 2**-10 * rows.abs().amax(1)
    if code in LEVELS:
        step = (rows.amax(1) - rows.amin(1)) / LEVELS[code] + 2**-10 * rows.abs().amax(1)  # bias and scale are rounded
    assert (error <= step / 2 + 2**-10 * rows.abs().amax(1)).all()
    assert quantize_rows(rows[:0], code).shape == (0, columns)
    one_by_one = torch.cat([encode_rows(row[None], code) for row in rows])
    assert one_by_one.equal(encode_rows(rows, code)), "a row's codes follow from the row alone"


def test_bytes() -> None:
    sizes = {code: [coded_row_bytes(columns, code) for columns in (64, 16)] for code in RowCode}
    assert sizes == {
        RowCode.FP16: [128, 32],
        RowCode.INT8: [72, 24],
        RowCode.INT4: [36, 12],
        RowCode.INT2: [20, 8],
    }
    assert 64 * 4 / 36 >= 7 and 16 * 4 / 12 >= 5.3


@pytest.mark.parametrize("code", RowCode)
def test_shapes_without_values(code: RowCode) -> None:
    """A rehearsed step goes by these; FBGEMM 1.6 lacks one of them."""
    add_missing_shapes()
    with FakeTensorMode():
        rows = quantize_rows(torch.zeros(3, 8), code)
    assert rows.shape == (3, 8) and rows.dtype == torch.float32
