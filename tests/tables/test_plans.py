"""Every sharding type, number of ranks and table precision learns what one process of plain torch modules learns."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from checkpoints import load_tables
from launch import fork_train, losses_of, must_train
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsys.config import Config, DataType, Device, Pooling, ShardingChoice, TableOptimizerConfig, load_config
from recsys.config.choices import COLUMN_SPLITS, DenseOptimizer
from recsys.config.features import float_features, id_features
from recsys.config.table_optimizers import TableOptimizer
from recsys.data.batch import Batch
from recsys.data.inputs import open_inputs
from recsys.models import DenseInputs
from recsys.models.dlrm import DLRM
from recsys.runtime.world import open_world
from recsys.tables.spec import fill_initial, init_range

STEPS = 30
KINDS = [choice for choice in ShardingChoice if choice is not ShardingChoice.auto]
# A list, one table of two features, weighted rows, and tables of so few rows that many ids share them.
CONFIG = """\
data: {train: data/sample/train, label_column: label, weight_column: weight, window_mib: 1}
features:
  user_id: {table: user}
  item_id: {table: item}
  history: {table: item, max_length: 10}
  category: {table: category}
  hour: {table: hour}
  price: {type: float}
tables:
  user: {num_embeddings: 300, embedding_dim: 16}
  item: {num_embeddings: 100, embedding_dim: 16}
  category: {num_embeddings: 30, embedding_dim: 16, pooling: mean}
  hour: {num_embeddings: 24, embedding_dim: 16, mapping: identity}
model: {name: dlrm, bottom_mlp: [16], top_mlp: [32, 16]}
train: {global_batch_size: 256, max_steps: 30, epochs: 9, log_every_steps: 1}
"""


def overrides(kind: str, dtype: str, optimizer: str) -> list[str]:
    tables = ("user", "item", "category", "hour")
    return [
        f"optimizer.tables.name={optimizer}",
        # With eps near 0 the first step of a row is of full size whatever its gradient is, also where that is but the
        # rounding of a sum that cancels; in FP16, two correct sums may then differ in their sign.
        f"optimizer.tables.eps={1e-4 if dtype == 'FP16' else 1e-8}",
        "tables.item.pooling=mean",
        "tables.category.pooling=mean",
        *(f"tables.{table}.data_type={dtype}" for table in tables),
        *(f"tables.{table}.sharding_type={kind}" for table in tables),
    ]


class Reference:
    """The tables as plain tensors, the optimizers' rules written out; `on_gpu`: as kernels there round."""

    def __init__(self, config: Config, on_gpu: bool) -> None:
        self.config, self.on_gpu = config, on_gpu
        torch.manual_seed(config.seed)
        dims = {f: config.tables[config.features[f].table].embedding_dim for f in id_features(config)}
        self.dense = DLRM(config.model, DenseInputs(dims, float_features(config), config.labels()))
        self.optimizer = torch.optim.Adam(self.dense.parameters(), config.optimizer.dense.learning_rate)
        self.tables, self.state = {}, {}
        for name, table in config.tables.items():
            dtype = torch.float16 if table.data_type is DataType.FP16 else torch.float32
            self.tables[name] = torch.empty(table.num_embeddings, table.embedding_dim, dtype=dtype)
            fill_initial(self.tables[name], 0, 0, config.seed, name, init_range(table))
            self.state[name] = torch.zeros(2, table.num_embeddings, table.embedding_dim)
        self.num_updates = 0

    def step(self, batch: Batch) -> float:
        leaves = {name: weights.float().clone().requires_grad_() for name, weights in self.tables.items()}
        pooled = {}
        for name in id_features(self.config):
            table, jagged = self.config.features[name].table, batch.ids[name]
            if name in self.config.unpooled_features():
                pooled[name] = JaggedTensor(leaves[table][jagged.values()], jagged.weights_or_none(), jagged.lengths())
                continue
            mode = "mean" if self.config.tables[table].pooling is Pooling.mean else "sum"
            pooled[name] = F.embedding_bag(
                jagged.values(),
                leaves[table],
                jagged.offsets()[:-1].to(jagged.values()),
                mode=mode,
                per_sample_weights=jagged.weights_or_none(),
            )
        logits = self.dense(pooled, batch.floats)
        total = F.binary_cross_entropy_with_logits(logits, batch.labels[:, 0], batch.weights, reduction="sum")
        loss = total / batch.weights.sum()
        self.optimizer.zero_grad()
        (loss + self._penalty(leaves, batch)).backward()
        if self.config.optimizer.dense.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.dense.parameters(), self.config.optimizer.dense.clip_norm)
        self.optimizer.step()
        self.num_updates += 1
        for name, leaf in leaves.items():
            features = [feature for feature in id_features(self.config) if self.config.features[feature].table == name]
            rows = torch.cat([batch.ids[feature].values() for feature in features]).unique()
            if self.config.tables[name].l2_all_rows:
                rows = torch.arange(len(leaf))
            state = [each[rows] for each in self.state[name]]
            self.tables[name][rows] = self._updated(name, leaf.detach()[rows], leaf.grad[rows], state).to(
                self.tables[name].dtype
            )
            self.state[name][:, rows] = torch.stack(state)
        return loss.item()

    def _penalty(self, leaves: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return the mean over rows of the squared lengths of vectors as tables give them: of ids or of sums."""
        total = torch.zeros(())
        for name in id_features(self.config):
            table, jagged = self.config.features[name].table, batch.ids[name]
            vectors, rows = leaves[table][jagged.values()], torch.repeat_interleave(jagged.lengths())
            if table not in self.config.unpooled_tables():
                sums = torch.zeros(len(batch.weights), vectors.shape[1])
                vectors, rows = sums.index_add(0, rows, vectors), torch.arange(len(batch.weights))
            squares = vectors.square().sum(dim=1) * batch.weights[rows]
            total = total + self.config.tables[table].l2 / 2 * squares.sum()
        whole = [self.config.tables[name].l2_all_rows / 2 * leaf.square().sum() for name, leaf in leaves.items()]
        return total / batch.weights.sum() + sum(whole)

    def _updated(
        self, table: str, weights: torch.Tensor, gradient: torch.Tensor, state: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return rows that the batch looked up after their update, and change their state."""
        settings, (first, second) = self.config.table_optimizer(table), state
        rate, eps = settings.learning_rate, settings.eps
        if settings.name is TableOptimizer.sgd:
            return weights - rate * gradient
        if settings.name is TableOptimizer.adam:
            first += (1 - settings.beta1) * (gradient - first)
            second += (1 - settings.beta2) * (gradient**2 - second)
            mean, squares = (
                each / (1 - beta**self.num_updates)
                for each, beta in ((first, settings.beta1), (second, settings.beta2))
            )
            return weights - rate * mean / (squares.sqrt() + eps)
        if settings.name is TableOptimizer.ftrl:
            return self._ftrl(settings, weights, gradient, first, second)
        rowwise = settings.name is TableOptimizer.rowwise_adagrad
        first += (gradient**2).mean(dim=1, keepdim=True) if rowwise else gradient**2
        step = rate * gradient / (first.sqrt() + eps)
        # FBGEMM's Adagrad on CPU rounds the step to the weights' type before it subtracts it.
        return weights - (step if rowwise or self.on_gpu else step.to(self.tables[table].dtype))

    @staticmethod
    def _ftrl(
        settings: TableOptimizerConfig,
        weights: torch.Tensor,
        gradient: torch.Tensor,
        z: torch.Tensor,
        n: torch.Tensor,
    ) -> torch.Tensor:
        """Algorithm 1 of McMahan et al. 2013, with lambda2 of 0, and z such that it begins at the initial weights."""
        alpha, beta, l1 = settings.learning_rate, settings.eps, settings.l1
        begins = (n == 0) & (gradient != 0)
        z -= begins * beta / alpha * weights
        sigma = ((n + gradient**2).sqrt() - n.sqrt()) / alpha
        z += gradient - sigma * weights
        n += gradient**2
        solved = torch.where(z.abs() <= l1, 0.0, -(z - z.sign() * l1) / ((beta + n.sqrt()) / alpha))
        return torch.where(n > 0, solved, weights)


@cache
def reference(folder: Path, *options: str, on_gpu: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of each step, and the tables after the last."""
    config = load_config(write(folder), options)
    with open_world(Device.cpu, 1) as world:
        trained = Reference(config, on_gpu)
        inputs = open_inputs(config, world)
        with closing(inputs.loader("train").batches(None, config.train.epochs)) as batches:
            losses = [trained.step(batch) for batch in islice(batches, STEPS)]
    return losses, trained.tables


def write(folder: Path) -> Path:
    path = folder / "plans.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("plans")


def trained(folder: Path, world_size: int, options: Sequence[str]) -> tuple[list[float], dict[str, torch.Tensor]]:
    run_dir = folder / f"run-{world_size}"
    must_train(str(write(folder)), f"run.dir={run_dir}", "run.overwrite=true", *options, nproc=world_size)
    result: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    assert result["world_size"] == world_size
    for rank in range(world_size):
        report = json.loads((run_dir / f"memory/rank_{rank}.json").read_text())
        assert all(line["predicted_bytes"] == line["measured_bytes"] for line in report["lines"])
    return losses_of(run_dir), load_tables(run_dir / f"checkpoints/step-{STEPS:09d}")


def assert_as_plain_torch(
    folder: Path, world_size: int, plan: Sequence[str], options: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Hold what a plan learns to what plain torch learns with the options alone; return the tables of both."""
    losses, tables = trained(folder, world_size, (*options, *plan))
    expected, expected_tables = reference(folder, *options)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)
    for name, weights in expected_tables.items():
        tolerance = 1e-3 if weights.dtype is torch.float16 else 1e-5
        torch.testing.assert_close(tables[name], weights, rtol=tolerance, atol=tolerance)
    return tables, expected_tables


def cases() -> Iterator[Any]:
    for kind, world_size, dtype in product(KINDS, (1, 2, 4), ("FP32", "FP16")):
        marks = [] if (kind.name, world_size, dtype) == ("row_wise", 2, "FP32") else [pytest.mark.slow]
        yield pytest.param(kind, world_size, dtype, marks=marks, id=f"{kind.name}-{world_size}-{dtype}")


@pytest.mark.parametrize("kind, world_size, dtype", list(cases()))
def test_a_plan_learns_what_plain_torch_learns(kind: ShardingChoice, world_size: int, dtype: str, folder: Path) -> None:
    """FP16: values that differ in the last bit of FP32 may be rounded to neighbours, 2**-10 of them apart.

    So after n updates weights may be n * 2**-10 of the largest weight apart, if all goes the same way.
    """
    optimizer = "adagrad" if kind in COLUMN_SPLITS else "rowwise_adagrad"
    options = overrides(kind.name, dtype, optimizer)
    losses, tables = trained(folder, world_size, options)
    expected, expected_tables = reference(folder, *overrides("table_wise", dtype, optimizer))
    assert len(losses) == STEPS
    exact = dtype == "FP32"
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5 if exact else 1e-3)
    for name, weights in expected_tables.items():
        atol = 1e-5 if exact else STEPS * 2**-10 * float(weights.abs().max())
        torch.testing.assert_close(tables[name].float(), weights.float(), rtol=1e-5, atol=atol)


@pytest.mark.slow
def test_each_table_with_a_plan_and_an_optimizer_of_its_own(folder: Path) -> None:
    options = (
        "tables.user={sharding_type: row_wise, optimizer: {name: sgd, learning_rate: 0.3}}",
        "tables.item={sharding_type: data_parallel, optimizer: {name: adagrad, learning_rate: 0.02, eps: 1e-5}}",
        "tables.category={sharding_type: column_wise, optimizer: {name: adagrad}}",
        "tables.hour={sharding_type: data_parallel, optimizer: {name: rowwise_adagrad}}",
        "optimizer.dense.clip_norm=0.1",
    )
    assert_as_plain_torch(folder, 2, (), options)


MIXED = {"user": "row_wise", "item": "column_wise", "category": "table_wise", "hour": "data_parallel"}


def mixed(optimizer: str) -> tuple[str, ...]:
    # So wide that torchrec's planner splits columns.
    plan = (f"tables.{table}={{sharding_type: {kind}, embedding_dim: 256}}" for table, kind in MIXED.items())
    l1 = "optimizer.tables.l1=2e-3" if optimizer == "ftrl" else "optimizer.tables.learning_rate=0.01"
    return f"optimizer.tables.name={optimizer}", l1, "optimizer.tables.eps=1e-4", *plan


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["adam", "ftrl"])
def test_what_fbgemm_lacks_is_trained_in_torch(optimizer: str, world_size: int, folder: Path) -> None:
    """On every plan as on plain tensors, beside a table of FBGEMM's and lists looked up id by id."""
    options = (*mixed(optimizer), *ATTENTION, "tables.category.optimizer={name: sgd, learning_rate: 0.3}")
    tables, expected = assert_as_plain_torch(folder, world_size, (), options)
    for name, weights in expected.items():
        zeros = int((weights == 0).sum())
        assert (zeros > weights.numel() / 20) == (optimizer == "ftrl" and name != "category")
        assert abs(int((tables[name] == 0).sum()) - zeros) <= 2  # the threshold itself is met up to rounding


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("item, category", [("row_wise", "table_wise"), ("table_wise", "table_row_wise")])
def test_averages_in_a_mixed_plan(item: str, category: str, world_size: int, folder: Path) -> None:
    options = (f"tables.item={{sharding_type: {item}, pooling: mean}}", f"tables.category.sharding_type={category}")
    assert_as_plain_torch(folder, world_size, (), options)


ATTENTION = ("model.attention={history: item_id}", "tables.item.pooling=mean", "tables.category.pooling=sum")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise", "auto"])
def test_vectors_of_single_ids(kind: str, world_size: int, folder: Path) -> None:
    """The table's other feature comes as averages of the same collection."""
    optimizer = "optimizer.tables.name=" + ("adagrad" if kind == "column_wise" else "rowwise_adagrad")
    plan = f"tables.item.sharding_type={kind}", "train.micro_batch_size=50"
    assert_as_plain_torch(folder, world_size, plan, (*ATTENTION, optimizer))


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["{history: item_id}", "{item_id: user_id}"])
def test_weights_of_single_ids(attention: str, folder: Path, tmp_path: Path) -> None:
    """In the second case the weighted list is summed of vectors of single ids."""
    rows = ds.dataset("data/sample/train").to_table()
    weights = [[0.5 + i for i in range(len(ids or []))] for ids in rows["history"].to_pylist()]
    pq.write_table(rows.append_column("by_age", pa.array(weights)), tmp_path / "rows.parquet")
    options = (
        f"data.train={tmp_path}/rows.parquet",
        "features.history.weights=by_age",
        f"model.attention={attention}",
        "tables.category.pooling=sum",
    )
    assert_as_plain_torch(folder, 2, ["tables.item.sharding_type=row_wise"], options)


@pytest.mark.slow
def test_vectors_of_single_ids_from_all_tables(tmp_path: Path) -> None:
    """No table is left that gives sums; the one there is is FP16."""
    config = tmp_path / "attention.yaml"
    config.write_text(
        "data: {train: data/sample/train, label_column: label}\n"
        "features: {user_id: {table: shared}, history: {table: shared, max_length: 5}, item_id: {table: shared}}\n"
        "tables: {shared: {num_embeddings: 300, embedding_dim: 8, data_type: FP16, optimizer: {name: sgd}}}\n"
        "model: {name: dlrm, attention: {history: user_id, item_id: user_id}}\n"
        "train: {global_batch_size: 64, max_steps: 5, log_every_steps: 1}\n"
    )
    losses = []
    for nproc in (1, 2):
        run_dir = tmp_path / str(nproc)
        must_train(str(config), f"run.dir={run_dir}", "tables.shared.sharding_type=row_wise", nproc=nproc)
        losses.append(losses_of(run_dir))
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", [each.name for each in DenseOptimizer])
def test_dense_optimizers_on_two_ranks(name: str, folder: Path) -> None:
    options = (f"optimizer.dense.name={name}", *(["optimizer.dense.momentum=0.9"] if name == "sgd" else []))
    losses, tables = trained(folder, 2, options)
    alone, tables_alone = trained(folder, 1, options)
    torch.testing.assert_close(losses, alone, rtol=0, atol=1e-5)
    for weights, weights_alone in zip(tables.values(), tables_alone.values(), strict=True):
        torch.testing.assert_close(weights, weights_alone, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_plan_is_saved_and_loaded(folder: Path) -> None:
    own = ("tables.user.sharding_type=row_wise", "tables.item.sharding_type=data_parallel")
    losses, _ = trained(folder, 2, own)
    plan = folder / "plan.json"
    plan.write_text((folder / "run-2/plan.json").read_text())
    again, _ = trained(folder, 2, (f"run.plan={plan}",))
    assert again == losses and (folder / "run-2/plan.json").read_text() == plan.read_text()
    for nproc, options, said in (
        (1, (f"run.plan={plan}",), "is for 2 ranks, and this run has 1"),
        (2, (f"run.plan={plan}", "tables.user.num_embeddings=200"), "has table 'user' as 300 × 16"),
        (1, (f"run.plan={folder}/none.json",), "is not a plan that a run has written"),
    ):
        done = fork_train(str(write(folder)), f"run.dir={folder}/wrong", *options, nproc=nproc)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
