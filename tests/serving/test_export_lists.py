"""Graphs of models that read lists id by id, where a list may have few ids."""

from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

from recsys.config.choices import SequenceLayer
from recsys.models import DenseInputs
from recsys.models.sasrec import SASRec, SASRecConfig
from recsys.serving.export_dense import DenseExport, GraphInputs, GraphSpec
from recsys.serving.export_tables import Files


def test_short_lists(tmp_path: Path) -> None:
    """Lists that a graph is made and tried with are no longer than those that the model reads."""
    config = SASRecConfig(
        history="history", item_id="item", dim=4, max_length=1, num_blocks=1, layer=SequenceLayer.hstu
    )
    model = SASRec(config, DenseInputs({"history": 4, "item": 4}, [])).eval()
    inputs = GraphInputs({"history": 4, "item": 4}, 0, {"history": config.max_length + 1}, False)
    dense = DenseExport(Files(tmp_path), model, inputs, False)
    dense.write_weights()
    dense.write_graph(GraphSpec("user", "user.onnx", ["history"], ["user"], lambda both: [both[0].clone()]))
    assert (tmp_path / "user.onnx").exists()
