"""Section `track` of a config: which services get the figures of a run."""

from dataclasses import dataclass

from recsys.config.choices import Tracker


@dataclass
class TrackConfig:
    """Section `run.track`: where the lines of metrics.jsonl go too, and what goes there beside them."""

    to: list[Tracker] | None = None  # null: TensorBoard, where it is installed; []: nowhere else
    project: str = "recsys"  # of W&B; of MLflow the experiment
    row_norms: bool = False  # histograms of the lengths of the tables' rows, at evaluations of data.valid
    item_vectors: bool = False  # retrieval: at the end the vectors of data.items, to TensorBoard's projector
