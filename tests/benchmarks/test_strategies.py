"""The strategies of benchmarks/compare_strategies.py: each makes a config that holds, and takes what its name says."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from recsys.config import Config, load_config

ROOT = Path(__file__).resolve().parents[2]

import compare_strategies as compare  # noqa: E402

CONFIGS = [f"configs/{name}.yaml" for name in ("dlrm_frappe", "dlrm_movielens", "two_tower_movielens_1m")]


def settings(config: str, strategy: compare.Strategy, folder: Path) -> Config:
    path, overrides = compare.share_a_table(config, [], folder) if strategy.shared else (config, [])
    return load_config(path, [*overrides, *strategy.overrides])


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_every_strategy_is_a_config(config: str, tmp_path: Path) -> None:
    whole = load_config(str(ROOT / config))
    given = compare.strategies(whole, ["seed=5"], ["optimizer.tables.learning_rate=0.25"], (), ["seed=6"])
    found = {strategy.name: settings(str(ROOT / config), strategy, tmp_path) for strategy in given}
    assert len(found) == len(given)
    assert found[compare.PLAIN].seed == 5
    assert found["FP16 tables"].optimizer.tables.learning_rate == 0.25

    def elements(name: str) -> int:
        return sum(table.num_embeddings * table.embedding_dim for table in found[name].tables.values())

    assert elements("half the dimension") == elements(compare.PLAIN) / 2
    for name, share in (("hashed to 1/4 of the rows", 0.25), ("rows for the most frequent ids, 50 %", 0.5)):
        assert share <= elements(name) / elements(compare.PLAIN) < share + 0.1
    assert 0.3 < elements("experts: an eighth of the ids wide, the rest a quarter") / elements(compare.PLAIN) < 0.9
    assert elements("one shared table of half the rows") < 0.7 * elements(compare.PLAIN)
    stacks = [name for name in found if name.startswith("stack")]
    sizes = [elements(name) for name in stacks]
    assert [found[name].seed for name in stacks] == [whole.seed, 6, 6, 6]
    assert sizes[0] == 2 * sizes[1] and sizes[1] > sizes[2] == sizes[3]


def test_the_table_holds_each_against_plain_torch() -> None:
    memory = {"table_weight": 8 << 20, "table_optimizer": 24 << 20, "dense_weight": 1 << 20}
    small = {"table_weight": 2 << 20, "dense_weight": 1 << 20}
    rows = {
        compare.PLAIN: [run(memory, 0.80) | {"peak_bytes": 4 << 20}, run(memory, 0.82)],
        "less": [run(small, 0.805), run(small, 0.795)],
    }
    strategies = {name: {"runs": runs, "summary": compare.summarise(runs, "auc")} for name, runs in rows.items()}
    table = compare.as_markdown({"metric": "auc", "strategies": strategies}).splitlines()
    assert table[2] == "| plain torch | 32.00 | 1.0× | 8.00 | 1.00 | 3 | 5 | 4 | 1,000 | 0.8100 ± 0.0141 | +0.0000 |"
    assert table[3] == "| less | 2.00 | 16.0× | 2.00 | 1.00 | 3 | 5 | – | 1,000 | 0.8000 ± 0.0071 | -0.0100 |"


def run(memory: dict[str, int], auc: float) -> dict[str, object]:
    return {
        "memory": memory,
        "loader_bytes": 3 << 20,
        "peak_rss_bytes": 5 << 20,
        "samples_per_s": 1000.0,
        "test": {"auc": auc},
    }


def test_the_plot_has_a_bar_by_bytes_and_a_dot_by_metric() -> None:
    sizes = {"plain torch": (1 << 20, 0.5), "a": (1 << 18, 0.4), "b <": (1 << 16, 0.6)}
    rows = {name: {"summary": {"table_bytes": size, "auc": auc}} for name, (size, auc) in sizes.items()}
    drawn = compare.as_svg({"metric": "auc", "strategies": rows})
    texts = [element.text for element in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert texts == [
        *("plain torch", "1.000 MiB", "a", "0.250 MiB", "b <", "0.062 MiB"),
        *("0.5000", "0.4000", "0.6000"),
    ]
    places = [float(place) for place in re.findall(r'cx="([\d.]+)"', drawn)]
    assert places[0] - places[1] == places[2] - places[0] == 100
    widths = [float(width) for width in re.findall(r'class="bar" .* width="([\d.]+)"', drawn)]
    assert widths == [320.0, 192.0, 64.0]  # on a scale of powers of two, from half the least
