"""Section `track` of a config: which services get the figures of a run."""

from dataclasses import dataclass

from recsys.config.choices import Tracker


@dataclass
class TrackConfig:
    """Section `run.track`: trackers that get the lines of metrics.jsonl, and what else they get."""

    to: list[Tracker] | None = None  # `null`: TensorBoard, if it is installed; `[]`: none
    project: str = "recsys"  # project of W&B, or experiment of MLflow
    row_norms: bool = False  # histograms of the lengths of table rows, at each evaluation of data.valid
    item_vectors: bool = False  # retrieval: at the end, the vectors of data.items for the projector of TensorBoard
