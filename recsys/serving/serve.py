"""HTTP server of the export in this folder: python serve.py; it needs litserve and what score.py needs.

    curl localhost:8000/predict -H 'content-type: application/json' -d '{"user_id": [7, 7], "item_id": [3, 5]}'

A request has a list for each column that the run reads (here two), with a value for each row; the answer has a list for
each score. A mistake in the rows is answered with status 400 and a sentence that names it, a body that is not JSON of
lists with status 422.
"""

import math
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import litserve
import pyarrow as pa
from fastapi import HTTPException  # litserve is built on it
from score import ExportError, Scorer


def typed(values: Any) -> Any:
    """Return the values of a column; whole numbers from 2**63 on are uint64, a type that JSON does not have."""
    if isinstance(values, list):
        try:
            return pa.array(values)
        except OverflowError:
            for kind in (pa.uint64(), pa.list_(pa.uint64())):
                with suppress(OverflowError, TypeError, ValueError, pa.ArrowException):
                    return pa.array(values, kind)
        except (TypeError, ValueError, pa.ArrowException):
            pass
    return values  # if there is a mistake in them, the scorer reports it


class Scores(litserve.LitAPI):
    """Scores the rows of a request."""

    def setup(self, device: str) -> None:
        """Open the export, once in each worker."""
        self.scorer = Scorer(Path(__file__).parent)

    def decode_request(self, request: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Return the columns of a request; FastAPI refuses a body that does not have this type."""
        return request

    def predict(self, request: dict[str, list[Any]]) -> dict[str, list[float]]:
        """Return the scores of the rows of a request."""
        rows = {name: typed(values) for name, values in request.items()}
        try:
            scores: dict[str, list[float]] = self.scorer.score(rows).to_pydict()
        except ExportError as error:
            raise HTTPException(400, str(error)) from error
        for name, values in scores.items():
            for row, value in enumerate(values):
                if not math.isfinite(value):  # JSON has no number for it
                    raise HTTPException(400, f"row {row} has {name} {value}; a number of it is too large for the model")
        return scores


def end_by(first: int) -> None:
    """Let SIGTERM end the process `first` as Ctrl-C does; litserve then ends its other processes, which end at once."""

    def end(number: int, _: Any) -> None:
        if os.getpid() == first:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


if __name__ == "__main__":
    end_by(os.getpid())
    litserve.LitServer(Scores()).run(port=8000)
