"""Imported by the process that `launch.fork_train` forks off: what programs import, also where they do so late."""

import contextlib
from importlib import import_module

from recsys.runtime.environment import importing

LATE = (
    *("numpy.ma", "pyarrow.dataset", "torch.utils.tensorboard"),
    *("onnxruntime", "onnxscript.function_libs.torch_lib.ops", "sympy.tensor.tensor"),
    *("torch.export._trace", "torch.onnx._internal.exporter._core", "torch._inductor.ir"),
)

with importing():
    from launch import ROOT

    import recsys.serving.compress
    import recsys.serving.export
    import recsys.serving.predict
    import recsys.training.run  # noqa: F401
    from recsys.config import load_config

    for name in LATE:
        with contextlib.suppress(ImportError):
            import_module(name)
    for name in ("dlrm", "two_tower"):
        load_config(f"{ROOT}/configs/{name}_sample.yaml")  # keys with their types and defaults are kept
