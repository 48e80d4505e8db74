"""All modules that programs import, even late, for the process from which `launch.fork_train` forks others."""

import contextlib
from importlib import import_module

from recsys.runtime.environment import importing

LATE = (
    *("numpy.ma", "pyarrow.dataset", "torch.utils.tensorboard"),
    *("onnxruntime", "onnxscript.function_libs.torch_lib.ops", "sympy.tensor.tensor"),
    *("torch.export._trace", "torch.onnx._internal.exporter._core", "torch._inductor.ir"),
)

with importing():
    import torch
    from launch import ROOT

    import recsys.serving.compress
    import recsys.serving.export
    import recsys.serving.predict
    import recsys.training.run  # noqa: F401
    from recsys.config import load_config
    from recsys.memory import DataFacts
    from recsys.memory.trace import rehearse
    from recsys.runtime.world import rehearse_world

    for name in LATE:
        with contextlib.suppress(ImportError):
            import_module(name)
    # The keys, with their types and defaults, stay in memory.
    _, config = (load_config(f"{ROOT}/configs/{name}_sample.yaml") for name in ("two_tower", "dlrm"))
    # So does what torch prepares at its first step on fake tensors, a sixth of a short run. If there may be a GPU, a
    # backward pass starts threads, which a forked process would not have.
    if torch.version.cuda is None:
        facts = DataFacts(dict.fromkeys(config.features, 1.0), 4, 0, (), {}, "made up")
        with rehearse_world(1, 1, torch.device("cpu")):
            rehearse(config, facts, 64, torch.device("cpu"))
