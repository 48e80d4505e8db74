"""Linear layers of an ONNX graph in INT8, as `Int8Linear` computes them."""

from typing import Any

import torch

from recsys.step.int8 import STEPS, int8_weights


def in_int8(model: Any) -> Any:
    """Convert linear layers with a bias of an ONNX model to INT8, in place, and return it; inputs are scaled by row.

    ONNX Runtime's own quantize_dynamic scales inputs by the whole batch, so that a row's scores depend on other rows.
    """
    from onnx import numpy_helper

    graph = model.graph
    weights = {weight.name: weight for weight in graph.initializer}
    nodes, done = [], set[str]()
    for node in graph.node:
        transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        if node.op_type != "Gemm" or not transposed or node.input[1] not in weights or len(node.input) < 3:
            nodes.append(node)
            continue
        x, weight, bias = node.input
        if weight not in done:
            done.add(weight)
            codes, scale = int8_weights(torch.from_numpy(numpy_helper.to_array(weights[weight]).copy()))
            _add(graph, f"{weight}.codes", codes.T.to(torch.int8))
            _add(graph, f"{weight}.scale", scale.flatten())
        nodes += _layer(node.output[0], x, weight, bias)
    if done:
        constants = {"steps": torch.tensor(float(STEPS)), "zero": torch.tensor(128, dtype=torch.uint8)}
        constants |= {"axis": torch.tensor([1]), "shift": torch.tensor(128.0)}
        constants |= {"tiny": torch.tensor(torch.finfo(torch.float32).tiny)}
        for name, value in constants.items():
            _add(graph, f"int8.{name}", value)
    del graph.node[:]
    graph.node.extend(nodes)
    read = {name for node in nodes for name in node.input}
    initializers = [weight for weight in graph.initializer if weight.name in read]
    del graph.initializer[:]
    graph.initializer.extend(initializers)
    return model


def _add(graph: Any, name: str, value: torch.Tensor) -> None:
    from onnx import numpy_helper

    graph.initializer.append(numpy_helper.from_array(value.contiguous().numpy(), name))


def _layer(output: str, x: str, weight: str, bias: str) -> list[Any]:
    """Return the nodes of a layer: x divided by the step of its row, as bytes around 128, times the codes."""
    from onnx import TensorProto, helper

    def node(operator: str, name: str, *inputs: str, **options: Any) -> Any:
        return helper.make_node(operator, [*inputs], [name], f"{output}/{name}", **options)

    of = {name: f"{output}.{name}" for name in ("size", "largest", "part", "step", "steps", "whole", "moved", "bytes")}
    of |= {name: f"{output}.{name}" for name in ("sums", "numbers", "rows", "columns")}
    return [
        node("Abs", of["size"], x),
        node("ReduceMax", of["largest"], of["size"], "int8.axis", keepdims=1),
        node("Div", of["part"], of["largest"], "int8.steps"),
        node("Max", of["step"], of["part"], "int8.tiny"),
        node("Div", of["steps"], x, of["step"]),
        node("Round", of["whole"], of["steps"]),
        node("Add", of["moved"], of["whole"], "int8.shift"),
        node("Cast", of["bytes"], of["moved"], to=TensorProto.UINT8),
        node("MatMulInteger", of["sums"], of["bytes"], f"{weight}.codes", "int8.zero"),
        node("Cast", of["numbers"], of["sums"], to=TensorProto.FLOAT),
        node("Mul", of["rows"], of["numbers"], of["step"]),
        node("Mul", of["columns"], of["rows"], f"{weight}.scale"),
        node("Add", output, of["columns"], bias),
    ]
