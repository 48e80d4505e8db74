"""Initial weights: a function of (seed, table, row, column), uniform, and the same for any sharding."""

import numpy as np
import pytest
import torch
from launch import ROOT

from recsys.config import Device, TableConfig, load_config
from recsys.runtime.counter_random import make_key
from recsys.runtime.machine import topology_of
from recsys.runtime.uniform import uniform
from recsys.runtime.world import open_world
from recsys.step.build import build_step
from recsys.tables import spec
from recsys.tables.shard import plan_tables, shard_model
from recsys.tables.spec import fill_initial, init_range

GOLDEN = 0x9E3779B97F4A7C15


def table_weights(rows: int, columns: int, data_type: torch.dtype = torch.float32, **changes) -> torch.Tensor:
    settings = {"seed": 1, "table": "item", "bound": 0.1, **changes}
    weights = torch.full((rows, columns), float("nan"), dtype=data_type)
    fill_initial(weights, 0, 0, **settings)
    return weights


def reference_uniform(key: int, row: int, column: int) -> float:
    """SplitMix64 at counter (row, column) from a key, in Python's own integers."""
    x = (((row << 20) + column) * GOLDEN + key) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return ((x ^ x >> 31) >> 40) / 2**24


def test_uniform_is_splitmix64():
    rows, columns = [0, 1, 2, 77, 10**6, 2**33, 2**43], [0, 1, 63, 2047, 2**20 - 1]
    for key in (0, 1, 2**63, 2**64 - 1, make_key(1, "table", "item")):
        found = uniform(key, torch.tensor(rows), torch.tensor(columns))
        assert found.dtype == torch.float32
        assert found.tolist() == [[reference_uniform(key, row, column) for column in columns] for row in rows]


def test_keys_tell_parts_apart():
    keys = [make_key(*parts) for parts in [(1, "a"), (2, "a"), (1, "b"), ("1a",), (1, "a", 0), (11, "a"), (1, 1, "a")]]
    assert len(set(keys)) == 7
    assert make_key(1, "table", "item") == 0xD6E5868D780FC995


def test_weights_of_earlier_versions():
    expected = [
        [-0.17900556325912476, 0.06981164216995239, -0.12706393003463745],
        [0.4740052819252014, 0.4731132388114929, 0.2844608426094055],
    ]
    assert table_weights(2, 3, bound=0.5).tolist() == expected


def cuts(size: int, generator: np.random.Generator) -> list[int]:
    inner = generator.choice(np.arange(1, size), generator.integers(0, 4), replace=False)
    return [0, *sorted(inner.tolist()), size]


@pytest.mark.parametrize("data_type", [torch.float32, torch.float16])
def test_any_split_gives_the_same_table(data_type, monkeypatch):
    whole = table_weights(100, 24, data_type)
    generator = np.random.default_rng(0)
    for trial in range(20):
        monkeypatch.setitem(spec.CHUNK_ELEMENTS, "cpu", int(generator.choice([1, 37, 500, 1 << 20])))
        row_cuts, column_cuts = cuts(100, generator), cuts(24, generator)
        built = torch.full_like(whole, float("nan"))
        for r, row in enumerate(row_cuts[:-1]):
            for c, column in enumerate(column_cuts[:-1]):
                shape = row_cuts[r + 1] - row, column_cuts[c + 1] - column
                shard = torch.full(shape, float("nan"), dtype=data_type)
                fill_initial(shard, row, column, seed=1, table="item", bound=0.1)
                built[row : row_cuts[r + 1], column : column_cuts[c + 1]] = shard
        assert torch.equal(built, whole), trial


def test_a_shard_may_be_a_view_and_may_want_a_gradient():
    whole = table_weights(10, 8)
    storage = torch.nn.Parameter(torch.zeros(10, 16))
    fill_initial(storage[:, 4:12], 0, 0, 1, "item", 0.1)
    assert torch.equal(storage[:, 4:12], whole)
    assert not storage[:, :4].any() and not storage[:, 12:].any()
    fill_initial(torch.empty(0, 8), 10, 0, 1, "item", 0.1)


def test_half_precision_is_rounded_full_precision():
    assert torch.equal(table_weights(50, 8, torch.float16), table_weights(50, 8).half())


@pytest.mark.parametrize("data_type", [torch.float32, torch.float16])
@pytest.mark.parametrize("bound", [0.0, 1e-3, 0.1, 3.0])
def test_weights_lie_inside_the_bound(data_type, bound):
    weights = table_weights(500, 16, data_type, bound=bound)
    assert weights.abs().max() <= torch.tensor(bound, dtype=data_type)
    assert weights.abs().max() >= torch.tensor(0.99 * bound, dtype=data_type)


def test_weights_are_uniform_and_independent():
    weights = table_weights(5000, 40, bound=1.0).double()
    n = weights.numel()
    assert abs(float(weights.mean())) < 4 / (3 * n) ** 0.5
    assert float(weights.var()) == pytest.approx(1 / 3, rel=0.01)
    counts = torch.histc(weights, 100, -1, 1)
    assert float(((counts - n / 100) ** 2 / (n / 100)).sum()) < 170  # 99 degrees of freedom, 1e-5 level
    for shift in (1, 2, 64, 1024):
        assert abs(float((weights[shift:] * weights[:-shift]).mean())) < 0.004
    for shift in (1, 7):
        assert abs(float((weights[:, shift:] * weights[:, :-shift]).mean())) < 0.004
    assert len(weights.unique()) > 0.98 * n


@pytest.mark.parametrize("changes", [{"seed": 2}, {"table": "user"}])
def test_seed_and_table_change_the_weights(changes):
    one, other = table_weights(500, 16, bound=1.0), table_weights(500, 16, bound=1.0, **changes)
    assert abs(float((one * other).mean())) < 0.02
    assert (one == other).float().mean() < 0.01


def test_bound_scales_the_same_numbers():
    torch.testing.assert_close(table_weights(20, 4, bound=0.3), table_weights(20, 4, bound=0.1) * 3)


def test_default_bound_is_that_of_torchrec():
    assert init_range(TableConfig(num_embeddings=400, embedding_dim=4)) == pytest.approx(0.05)
    assert init_range(TableConfig(num_embeddings=400, embedding_dim=4, init_range=0.2)) == 0.2
    assert init_range(TableConfig(num_embeddings=400, embedding_dim=4, init_range=0.0)) == 0


def test_sharding_draws_no_weights_that_are_then_replaced():
    """torchrec would, twice and by one thread: four fifths of the time that tables of gigabytes take to be there."""
    config = load_config(ROOT / "configs/dlrm_sample.yaml")
    with open_world(Device.cpu, 1) as world:
        step = build_step(config, lambda: (torch.zeros(0), 0))
        plan = plan_tables(step, config, topology_of(config, world))
        before = torch.get_rng_state()
        shard_model(step, plan, config, world)
        assert torch.equal(torch.get_rng_state(), before)
