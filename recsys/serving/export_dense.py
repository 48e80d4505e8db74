"""The dense part of a finished run as ONNX graphs over one file of weights, and by `torch.export`."""

import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsys.checkpoint import Source
from recsys.checkpoint.tensor_files import read_tensors
from recsys.config import Config
from recsys.errors import UserError
from recsys.models.base import Model, Vectors
from recsys.runtime.files import replace_file
from recsys.runtime.versions import is_installed
from recsys.serving.export_int8 import in_int8
from recsys.serving.export_tables import Files
from recsys.serving.finished import dense_weights
from recsys.serving.rebase import WEIGHTS
from recsys.step.build import build_dense_half
from recsys.step.int8 import Int8Linear
from recsys.tables.module_names import parameter_name

_ALIGNED = 64  # bytes at which the weights of the ONNX graphs begin
_PREFIX = "model."  # of names of weights in a graph
_CLOSE = 1e-5
_CLOSE_INT8 = 1e-2  # as a number halfway between two steps may be rounded to either
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def check_packages() -> None:
    """Raise a UserError if a package that exports need is missing."""
    missing = [name for name in _PACKAGES if not is_installed(name)]
    if missing:
        raise UserError(
            f"export needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            f"`bash scripts/setup.sh` installs them, without a clone the wheel's extra export (there is no onnxruntime "
            f"for Python 3.10: export with 3.11 or later, any Python reads the run)"
        )


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that the export was made with."""
    return {name: version(name) for name in _PACKAGES}


def load_dense(config: Config, source: Source) -> Model:
    """Return the dense part of a checkpoint, on the CPU, in eval mode.

    Raises:
        UserError: the model's class has other parameters than the checkpoint.
    """
    model: Model = build_dense_half(config, lambda: (torch.zeros(1), 0)).model
    targets = dense_weights(model, source)
    read_tensors(source.path, {name: source.marker.tensors[name] for name in targets}, targets)
    return model.eval()


@dataclass(frozen=True)
class GraphInputs:
    """Inputs of graphs of the dense part.

    Attributes:
        dims: embedding_dim of the id features. sequences: most ids in a list, or None for any number, of the features
            that are read as a vector for each id.
        weighted: whether ids have weights.
    """

    dims: Mapping[str, int]
    num_floats: int
    sequences: Mapping[str, int | None]
    weighted: bool

    def names(self, features: Sequence[str]) -> list[str]:
        """Return the names of a graph's inputs for some features, with the floats before them."""
        names = ["floats"]
        for name in features:
            prefixes = ["values", "lengths", *(["weights"] if self.weighted else [])]
            names += [f"{prefix}:{name}" for prefix in (prefixes if name in self.sequences else ["vector"])]
        return names

    def draw(self, features: Sequence[str], num_rows: int, generator: torch.Generator) -> list[torch.Tensor]:
        """Return random values of these inputs, in the order of `names`: float32, and int64 lengths."""
        tensors = [torch.randn(num_rows, self.num_floats, generator=generator)]
        for name in features:
            if name not in self.sequences:
                tensors.append(torch.randn(num_rows, self.dims[name], generator=generator))
                continue
            longest = min(4, self.sequences[name] or 4)
            lengths = torch.randint(0, longest + 1, (num_rows,), generator=generator)
            lengths[-2:] = min(3, longest)  # torch.export would make a constant of a total of 1
            ids = int(lengths.sum())
            tensors += [torch.randn(ids, self.dims[name], generator=generator), lengths]
            tensors += [torch.rand(ids, generator=generator)] if self.weighted else []
        return tensors


class Graph(nn.Module):
    """The dense part as a function of tensors, in the order of `GraphInputs.names`.

    Args:
        features: id features among the inputs; the others have an empty list in every row.
        results: computes the outputs of the graph from those of the model.
    """

    def __init__(
        self, model: Model, inputs: GraphInputs, features: Sequence[str], results: Callable[[Any], Any]
    ) -> None:
        super().__init__()
        self.model, self._inputs, self._features, self._results = model, inputs, list(features), results

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs, each [rows, …]."""
        inputs = iter(tensors)
        floats = next(inputs)
        vectors: Vectors = {}
        for name, dim in self._inputs.dims.items():
            is_given = name in self._features
            if name not in self._inputs.sequences:
                vectors[name] = next(inputs) if is_given else floats.new_zeros(floats.shape[0], dim)
                continue
            values = next(inputs) if is_given else floats.new_zeros(0, dim)
            lengths = next(inputs) if is_given else torch.zeros(floats.shape[0], dtype=torch.int64)
            weights = (next(inputs) if is_given else floats.new_zeros(0)) if self._inputs.weighted else None
            vectors[name] = JaggedTensor(values, lengths=lengths, weights=weights)
        return tuple(self._results(self.model(vectors, floats)))


@dataclass(frozen=True)
class GraphSpec:
    """One graph of an export.

    Attributes:
        features: id and float features that it reads. outputs: names. results: computes them from the model's outputs.
    """

    name: str
    file: str
    features: list[str]
    outputs: list[str]
    results: Callable[[Any], Any]


class DenseExport:
    """Writes the weights of a model, and graphs that read them.

    Args:
        in_int8: linear layers are rounded to INT8, and graphs hold their weights themselves.
    """

    def __init__(self, files: Files, model: Model, inputs: GraphInputs, in_int8: bool) -> None:
        self._files, self._model, self._inputs, self._in_int8 = files, model, inputs, in_int8
        self._weights = {parameter_name(name): value for name, value in model.state_dict().items()}
        self._places, at = dict[str, int](), 0
        for name, value in self._weights.items():
            self._places[name] = at
            at += -(-value.numel() * value.element_size() // _ALIGNED) * _ALIGNED

    def write_weights(self) -> dict[str, Any]:
        """Write the weights of all graphs; return their entry in the manifest."""
        self._files.write(WEIGHTS, weight_chunks(self._model), always_verified=False)
        tensors = {
            name: {
                "offset": self._places[name],
                "shape": list(value.shape),
                "dtype": str(value.dtype).removeprefix("torch."),
            }
            for name, value in self._weights.items()
        }
        return {"file": WEIGHTS, "tensors": tensors}

    def predictions(self) -> tuple[list[str], Callable[[Any], Any]]:
        """Return the names of the model's predictions, and a function from its outputs to the predictions."""
        ids, generator = list(self._inputs.dims), torch.Generator().manual_seed(0)
        with torch.no_grad():  # a tuple of what `predictions` returns is one of its names
            names = Graph(self._model, self._inputs, ids, self._model.predictions)(
                *self._inputs.draw(ids, 2, generator)
            )
        return [str(name) for name in names], lambda outputs: self._model.predictions(outputs).values()

    def write_graph(self, spec: GraphSpec) -> torch.export.ExportedProgram:
        """Write an ONNX graph, compare it with the model, and return what it was made from.

        Raises:
            UserError: torch cannot export the model, or the graph gives other numbers.
        """
        features = [name for name in spec.features if name in self._inputs.dims]
        graph = Graph(self._model, self._inputs, features, spec.results).eval()
        program, onnx = self._exported(graph, features, spec.outputs)
        model = in_int8(onnx.model_proto) if self._in_int8 else self._with_places(onnx.model_proto)
        self._files.write(spec.file, iter([model.SerializeToString()]))
        self._compare(spec.file, graph, features)
        return program

    def _exported(self, graph: Graph, features: Sequence[str], outputs: Sequence[str]) -> tuple[Any, Any]:
        names = self._inputs.names(features)
        example = self._inputs.draw(features, 7, torch.Generator().manual_seed(0))
        rows = torch.export.Dim("rows")
        ids = {name: torch.export.Dim(f"ids_{number}") for number, name in enumerate(features)}
        input_names = [name.partition(":") for name in names]
        shapes = [{0: ids[name] if prefix in ("values", "weights") else rows} for prefix, _, name in input_names]
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch about its own code
                graph(*example)  # so that tensors made at the first call are real, not fake ones
                program = torch.export.export(graph, tuple(example), dynamic_shapes=(tuple(shapes),), strict=True)
                onnx = torch.onnx.export(
                    program,
                    dynamo=True,
                    input_names=names,
                    output_names=list(outputs),
                    optimize=False,  # optimizing would fold weights into each other
                    verbose=False,
                    custom_translation_table=translations(),
                )
        except Exception as error:  # its type depends on what the model does that cannot be exported
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"torch cannot export model '{type(self._model).__name__}' ({type(error).__name__}: {reason}); its "
                f"forward may use only operators that torch.export and ONNX have"
            ) from error
        return program, onnx

    def _with_places(self, graph: Any) -> Any:
        """Return an ONNX model whose weights refer to the file of weights."""
        import onnx

        names = {_PREFIX + name: parameter_name(name) for name in self._model.state_dict()}
        for node in graph.graph.node:
            node.ClearField("metadata_props")  # the node's place in the code
        for tensor in graph.graph.initializer:
            if tensor.name in names:
                size = len(tensor.raw_data)
                tensor.ClearField("raw_data")
                tensor.data_location = onnx.TensorProto.EXTERNAL
                facts = {"location": WEIGHTS, "offset": self._places[names[tensor.name]], "length": size}
                for key, value in facts.items():
                    tensor.external_data.add(key=key, value=str(value))
        return graph

    def _compare(self, file: str, graph: Graph, features: Sequence[str]) -> None:
        """Compare a graph in ONNX Runtime with the model in torch, on random rows: one, and many."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors: warnings are about missed optimizations
        path, providers = str(self._files.folder / file), ["CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(path, options, providers=providers)
        names = self._inputs.names(features)
        for num_rows in (1, 100):
            tensors = self._inputs.draw(features, num_rows, torch.Generator().manual_seed(num_rows))
            read = {node.name for node in session.get_inputs()}
            feed = {name: value.numpy() for name, value in zip(names, tensors, strict=True) if name in read}
            with torch.no_grad(), Int8Linear() if self._in_int8 else nullcontext():
                expected = [output.numpy() for output in graph(*tensors)]
            for ours, theirs in zip(expected, session.run(None, feed), strict=True):
                worst = float(np.max(np.abs(ours - theirs) / np.maximum(1, np.abs(ours)), initial=0.0))
                if not worst <= (_CLOSE_INT8 if self._in_int8 else _CLOSE):
                    raise UserError(
                        f"'{file}' and model '{type(self._model).__name__}' in torch differ by {worst:.3g} in ONNX "
                        f"Runtime; report it with the model"
                    )


def write_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write the program that `torch.export` has made of a model.

    Raises:
        OSError: it cannot be written; its `filename` is set.
    """
    content = io.BytesIO()  # if torch itself cannot write a file, it gives no reason
    torch.export.save(program, content)
    replace_file(path, content.getvalue())


def translations() -> dict[Any, Any]:
    """Return translations of PyTorch operators to ONNX that replace those of the exporter, which do not work here."""
    return {
        torch.ops.aten.repeat_interleave.Tensor: _repeat_interleave,
        torch.ops.aten.squeeze.dim: _squeeze,
        torch.ops.aten.log_sigmoid.default: _log_sigmoid,
    }


def weight_chunks(model: nn.Module) -> Iterator[Any]:
    """Yield the bytes of the file of weights, from a model on any device."""
    for value in model.state_dict().values():
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        yield content
        yield bytes(-len(content) % _ALIGNED)


def _repeat_interleave(repeats: Any, output_size: Any = None) -> Any:
    """Translate repeat_interleave: the row of each id, from the number of ids of each row.

    It is the cumulative sum of marks at the ends of rows. The translation of the exporter needs memory for rows × ids.
    """
    from onnxscript import opset18

    op: Any = opset18
    zero, one = op.Constant(value_ints=[0]), op.Constant(value_ints=[1])
    ends = op.CumSum(repeats, zero)
    total = op.Gather(ends, op.Constant(value_ints=[-1]))
    marks = op.ScatterElements(
        op.Expand(zero, op.Add(total, one)), ends, op.Expand(one, op.Shape(ends)), axis=0, reduction="add"
    )
    return op.Slice(op.CumSum(marks, zero), zero, total, zero)


def _log_sigmoid(tensor: Any) -> Any:
    """Translate the logarithm of a sigmoid; the exporter takes the log of ONNX Runtime's sigmoid, which is right only
    to 1e-7, and so to no digit if it is small."""
    from onnxscript import opset18

    op: Any = opset18
    return op.Neg(op.Softplus(op.Neg(tensor)))


def _squeeze(tensor: Any, dim: int) -> Any:
    """Translate squeeze, which keeps a dimension other than 1; the exporter's own gives a graph that fails."""
    from onnxscript import opset18

    op: Any = opset18
    if tensor.shape is not None and isinstance(tensor.shape[dim], int) and tensor.shape[dim] != 1:
        return op.Identity(tensor)
    return op.Squeeze(tensor, op.Constant(value_ints=[dim]))
