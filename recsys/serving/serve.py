"""HTTP server of the export beside this file: python serve.py; it needs litserve and what score.py needs.

    curl localhost:8000/predict -H 'content-type: application/json' -d '{"user_id": [7, 7], "item_id": [3, 5]}'

A request has a list for each column, with a value for each row; the answer has a list for each score. A mistake in the
rows is answered by status 400 and a sentence on it.
"""

import math
import signal
from pathlib import Path
from typing import Any

import litserve
from fastapi import HTTPException  # which litserve is built on
from score import ExportError, Scorer


class Scores(litserve.LitAPI):
    """Scores the rows of a request."""

    def setup(self, device: str) -> None:
        """Open the export, once in each worker."""
        self.scorer = Scorer(Path(__file__).parent)

    def predict(self, request: dict[str, list[Any]]) -> dict[str, list[float]]:
        """Return the scores of a request's rows."""
        try:
            scores: dict[str, list[float]] = self.scorer.score(request).to_pydict()
        except ExportError as error:
            raise HTTPException(400, str(error)) from error
        for name, values in scores.items():
            for row, value in enumerate(values):
                if not math.isfinite(value):  # of which JSON has no number
                    raise HTTPException(400, f"row {row} has {name} {value}; a number of it is too large for the model")
        return scores


if __name__ == "__main__":
    # litserve ends its processes after Ctrl-C; after another signal they would stay, and go on to answer.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    litserve.LitServer(Scores()).run(port=8000)
