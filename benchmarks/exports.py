"""Exports of configs: compare what score.py computes in an environment without torch with what the run computes.

    python -m venv /tmp/without-torch && /tmp/without-torch/bin/pip install numpy pyarrow onnxruntime
    python benchmarks/exports.py configs/*.yaml docs/own_model.md --python /tmp/without-torch/bin/python \\
        --out benchmarks/exports.json

Each config trains 40 steps on its data, which its first lines say how to prepare, and is exported; for a page, these
are the config and the model in its blocks. 10,000 rows are drawn from its test part, with items drawn from data.items;
a retrieval model also recommends 20 items for each. The output has the largest differences of scores (in lists, place
by place), and how many lists have different items in some place: equal scores may come in any order. A config that is
in the output file already is left out.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recsys.runtime.environment import prepare_environment  # noqa: E402

prepare_environment()  # before pyarrow is imported

import pyarrow as pa  # noqa: E402
import pyarrow.dataset as ds  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from recsys.config import Config, load_config  # noqa: E402
from recsys.runtime.versions import git_commit  # noqa: E402

ROWS, STEPS, K = 10_000, 40, 20
NO_EVALUATION = ("data.valid=null", "data.test=null", "train.early_stop.metric=null", "train.eval_every_epochs=null",
                 "optimizer.schedule.name=constant")  # fmt: skip


def draw_rows(config: Config) -> pa.Table:
    """Return rows of the test part (else valid, else train); for a retrieval model each has the columns of an item."""
    generator, data = np.random.default_rng(0), config.data
    rows = ds.dataset(str(ROOT / str(data.test or data.valid or data.train))).to_table()
    rows = rows.take(generator.integers(0, len(rows), ROWS))
    if data.items:
        items = ds.dataset(str(ROOT / str(data.items))).to_table()
        items = items.take(generator.integers(0, len(items), ROWS))
        for name in set(items.column_names) - set(rows.column_names):
            rows = rows.append_column(name, items[name])
    return rows


def numbers(column: pa.ChunkedArray) -> np.ndarray:
    """Return scores, or those of all lists end to end, as float64."""
    array = column.combine_chunks()
    return np.asarray(array if pa.types.is_floating(array.type) else array.flatten(), np.float64)


def config_of_page(page: Path, folder: Path) -> Path:
    """Write each block of a page that has a file name as its title to that file; return the path of the config."""
    blocks = re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', page.read_text(), re.DOTALL | re.MULTILINE)
    for title, text in blocks:
        (folder / title).write_text(text)
    return next(folder / title for title, _ in blocks if title.endswith(".yaml"))


def compare(config: Path, python: Path, folder: Path) -> dict[str, float | int]:
    """Train, export, and return how much scores and items of the run and of score.py differ."""

    def recsys(*words: object) -> None:
        command = [sys.executable, "-m", "recsys", *map(str, words)]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=environment)

    if config.suffix == ".md":
        config = config_of_page(config, folder)
        sys.path.insert(0, str(folder))
    loaded = load_config(str(config), [])
    data, run, export = folder / "rows.parquet", folder / "run", folder / "export"
    pq.write_table(draw_rows(loaded), data, row_group_size=3000)
    recsys("train", config.resolve(), f"run.dir={run}", f"train.max_steps={STEPS}", *NO_EVALUATION)
    recsys("export", run, export, "--trust-code")
    differences: dict[str, float | int] = {}
    tasks: dict[str, tuple[object, ...]] = {"predict": ()}
    if loaded.data.items:
        tasks["recommend"] = ("--k", K)
    for task, options in tasks.items():
        ours, theirs = folder / task, folder / f"{task}.parquet"
        recsys(task, run, data, ours, "--trust-code", *options)
        command = [python.absolute(), "-I", export / "score.py", task, data, theirs, *options]
        subprocess.run([*map(str, command)], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        a, b = pq.read_table(ours), pq.read_table(theirs)
        if a.column_names != b.column_names or not len(a) == len(b) == ROWS:
            sys.exit(f"{config}: {len(a)} rows of {a.column_names}, and {len(b)} of {b.column_names}")
        scores = [name for name in a.column_names if name.startswith("score")]
        differences[f"{task}_difference"] = max(
            float(np.abs(numbers(a[name]) - numbers(b[name])).max()) for name in scores
        )
        others = [name for name in a.column_names if name not in scores]
        pairs = zip(a.select(others).to_pylist(), b.select(others).to_pylist(), strict=True)
        differences[f"{task}_rows_that_differ"] = sum(x != y for x, y in pairs)
    return differences


def main() -> None:
    """Compare one config after the other, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", metavar="CONFIG", type=Path, nargs="+")
    parser.add_argument("--python", type=Path, required=True, help="of an environment without torch")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    arguments = parser.parse_args()
    if not subprocess.run([arguments.python, "-c", "import torch"], capture_output=True).returncode:
        sys.exit(f"{arguments.python}: torch is installed there")
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for config in arguments.configs:
        if config.stem not in results:
            with tempfile.TemporaryDirectory() as folder:
                results[config.stem] = compare(config, arguments.python, Path(folder)) | {"commit": git_commit()}
            print(config.stem, results[config.stem], flush=True)
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
