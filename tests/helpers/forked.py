"""All modules that programs import, even late, for the process from which `launch.fork_train` forks others."""

import contextlib
from importlib import import_module
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from recsys.runtime.environment import importing

LATE = (
    *("numpy.ma", "pyarrow.dataset", "torch.utils.tensorboard"),
    *("onnxruntime", "onnxscript.function_libs.torch_lib.ops", "sympy.tensor.tensor"),
    *("torch.export._trace", "torch.onnx._internal.exporter._core", "torch._inductor.ir"),
)

with importing():
    import torch
    from launch import ROOT
    from retrieval import CONFIG as RETRIEVAL

    import recsys.serving.compress
    import recsys.serving.export
    import recsys.serving.predict
    import recsys.training.run  # noqa: F401
    from recsys.config import load_config
    from recsys.config.features import rank_rows
    from recsys.memory import DataFacts
    from recsys.memory.trace import layer_page, rehearse
    from recsys.runtime.versions import git_commit
    from recsys.runtime.world import rehearse_world

    for name in LATE:
        with contextlib.suppress(ImportError):
            import_module(name)
    # The commit and the keys of configs, with their types and defaults, stay in memory.
    git_commit()
    with TemporaryDirectory() as folder:
        Path(folder, "c.yaml").write_text(RETRIEVAL)
        names = (f"{ROOT}/configs/two_tower_sample.yaml", f"{ROOT}/configs/dlrm_sample.yaml", f"{folder}/c.yaml")
        _, *configs = map(load_config, names)
    # So does what torch prepares at a step on fake tensors of each shape, a fifth of a short run of a config that many
    # tests train. If there may be a GPU, a backward pass starts threads, which a forked process would not have.
    if torch.version.cuda is None:
        cpu = torch.device("cpu")
        for config, num_ranks in product(configs, (1, 2)):
            rows = rank_rows(config, num_ranks)
            facts = DataFacts(dict.fromkeys(config.features, 1.0), 4, 0, (), {}, "made up")
            with rehearse_world(num_ranks, 1, cpu):
                rehearse(config, facts, rows, cpu)
                layer_page(config, facts, rows)
