"""Linear layers in INT8: rounded by hand, and what ONNX Runtime computes of the graph of an export."""

import numpy as np
import pytest
import torch
from torch import nn

from recsys.step.int8 import Int8Linear


def test_weights_and_inputs_are_rounded() -> None:
    layer = nn.Linear(2, 1)
    layer.weight.data, layer.bias.data = torch.tensor([[64.0, 10.4]]), torch.tensor([1.0])
    x = torch.tensor([[127.0, 0.4], [100.5, 254.0], [0.0, 0.0]])  # steps of 1, of 2, and of a row of 0
    with torch.no_grad(), Int8Linear():
        assert layer(x).flatten().tolist() == [64 * 127 + 1, 64 * 100 + 10 * 254 + 1, 1]
        assert layer(-x).flatten().tolist() == [-64 * 127 + 1, -64 * 100 - 10 * 254 + 1, 1]
        assert layer(x[1:2]) == layer(x)[1] and layer(torch.zeros(0, 2)).shape == (0, 1)
        free = nn.Linear(2, 1, bias=False)
        assert free(x).equal(x @ free.weight.T)
    assert layer(x)[0, 0] != 64 * 127 + 1, "behind the context all is as it was"


@pytest.mark.slow
def test_it_is_what_onnx_runtime_computes() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    from recsys.serving.export_int8 import in_int8

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)).eval()
    program = torch.export.export(model, (torch.randn(7, 200),), dynamic_shapes=({0: torch.export.Dim("rows")},))
    graph = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False).model_proto
    whole = len(graph.SerializeToString())
    small = in_int8(graph).SerializeToString()
    assert len(small) < whole / 3
    session = onnxruntime.InferenceSession(small, providers=["CPUExecutionProvider"])
    for rows in (1, 5, 100):
        x = torch.randn(rows, 200)
        x[0] = 0
        (theirs,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        with torch.no_grad(), Int8Linear():
            np.testing.assert_allclose(model(x).numpy(), theirs, rtol=0, atol=1e-3)
        with torch.no_grad():
            assert rows == 1 or np.abs(model(x).numpy() - theirs).max() > 1e-5, "which is not FP32"
