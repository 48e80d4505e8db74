"""Train a config in plain torch: FP32 nn.Embedding tables with dense gradients, and Adam for all parameters.

`compare_strategies.py` compares the rest with this. Data, ids, dense model, loss, early stopping and evaluation are
those of train.py; only the tables and their optimizer are not.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recsys.runtime.environment import prepare_environment
from recsys.runtime.versions import exit_unless_installed

exit_unless_installed()
prepare_environment()  # before pyarrow is imported

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor  # noqa: E402

from recsys.checkpoint import Tensors  # noqa: E402
from recsys.config import Config, load_config  # noqa: E402
from recsys.config.features import id_features  # noqa: E402
from recsys.data.batch import Batch  # noqa: E402
from recsys.data.inputs import open_inputs  # noqa: E402
from recsys.memory import Timeline, measure_dense  # noqa: E402
from recsys.runtime.logs import quiet_libraries, start_logging  # noqa: E402
from recsys.runtime.world import open_world  # noqa: E402
from recsys.step.build import build_dense_half  # noqa: E402
from recsys.tables.spec import fill_initial, init_range  # noqa: E402
from recsys.tables.updates import TableUpdates  # noqa: E402
from recsys.training.build import Built, log_shares  # noqa: E402
from recsys.training.learning import learn_facts  # noqa: E402
from recsys.training.trainer import Trainer  # noqa: E402


class PlainTables(nn.Module):
    """A dense parameter for each table, and lookups in them.

    Args:
        pad: pad each list with row 0 to the longest of the batch, and mask that out of the sum, as is usual without
            jagged tensors.
    """

    def __init__(self, config: Config, pad: bool) -> None:
        super().__init__()
        self._pad = pad
        self._table_of = {name: config.features[name].table or "" for name in id_features(config)}
        self.weights = nn.ParameterDict()
        for name, table in config.tables.items():
            weights = torch.empty(table.num_embeddings, table.embedding_dim)
            fill_initial(weights, 0, 0, config.seed, name, init_range(table))
            self.weights[name] = nn.Parameter(weights)

    def forward(self, ids: KeyedJaggedTensor) -> KeyedTensor:
        """Return the sums of the rows of each feature."""
        lookup = self._padded if self._pad else self._summed
        vectors = [lookup(self.weights[table], ids[name]) for name, table in self._table_of.items()]
        return KeyedTensor(list(self._table_of), [v.shape[1] for v in vectors], torch.cat(vectors, dim=1))

    @staticmethod
    def _summed(weights: torch.Tensor, jagged: JaggedTensor) -> torch.Tensor:
        offsets = jagged.offsets().to(jagged.values().dtype)
        return F.embedding_bag(
            jagged.values(),
            weights,
            offsets,
            mode="sum",
            per_sample_weights=jagged.weights_or_none(),
            include_last_offset=True,
        )

    @staticmethod
    def _padded(weights: torch.Tensor, jagged: JaggedTensor) -> torch.Tensor:
        longest = max(1, int(jagged.lengths().max()))
        ids = jagged.to_padded_dense(longest).long()
        mask = torch.arange(longest) < jagged.lengths()[:, None]
        return (F.embedding(ids, weights) * mask[:, :, None]).sum(dim=1)


class PlainStep(nn.Module):
    """The tables, then the dense half; `module` is the object itself, as if it were wrapped for sharding."""

    def __init__(self, embeddings: PlainTables, dense: nn.Module) -> None:
        super().__init__()
        self.embeddings, self.dense = embeddings, dense

    @property
    def module(self) -> "PlainStep":
        return self

    def forward(self, batch: Batch) -> Any:
        """Do the same as `TrainStep.forward`."""
        return self.dense(self.embeddings(batch.ids), [], batch)


def train(config: Config, run_dir: Path, pad: bool) -> dict[str, Any]:
    """Train like train.py, in one process; return its metrics and the bytes that it held."""
    quiet_libraries()
    config.debug = True  # uses the pipeline without overlap, which does not need torchrec
    config.data.num_threads = config.data.num_threads or 2
    with open_world(config.run.device, config.run.num_threads) as world:
        run_dir.mkdir(parents=True)
        start_logging(run_dir / "logs", world.rank)
        inputs = learn_facts(open_inputs(config, world), run_dir)
        half = build_dense_half(inputs.config, partial(log_shares, inputs))
        tables = PlainTables(inputs.config, pad)
        step = PlainStep(tables, half)
        optimizer = torch.optim.Adam(step.parameters(), config.optimizer.dense.learning_rate)
        tensors = Tensors(tables=dict, table_optimizer=dict, dense=step, dense_optimizer=optimizer)
        built = Built(step, [], optimizer, TableUpdates(step, inputs.config, world), tensors)
        timeline = Timeline(world.device)
        trainer = Trainer(inputs, built, run_dir, timeline)
        trainer.fit()
        timeline.close()
        kinds: dict[str, int] = {}
        for kind, module in (("table", tables), ("dense", half)):
            kinds |= {f"{kind}_{name}": size for name, size in measure_dense(module, optimizer).items()}
        return {
            "metrics": trainer.metrics,
            "steps": trainer.state.step,
            "samples_per_s": trainer.progress.totals()["samples_per_s"],
            "memory": kinds,
            "loader_bytes": sum(trainer.loader.host_bytes.values()),
            "served_bytes": kinds["table_parameter_bytes"],
            "peak_rss_bytes": timeline.peak().peak_bytes,
            "peak_bytes": timeline.peak().peak_bytes - timeline.baseline_bytes,
        }


def main() -> None:
    """Parse the command line, train, write RUN/result.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="run.dir must be among them, a new folder")
    parser.add_argument("--pad", action="store_true", help="fill lists up to the longest of the batch")
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.overrides)
    run_dir = Path(config.run.dir or "")
    result = train(config, run_dir, arguments.pad)
    (run_dir / "result.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
