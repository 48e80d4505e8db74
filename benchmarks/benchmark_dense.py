"""What `train.dense_sharding` saves and costs by the width of the dense part; see `benchmark.py dense --help`."""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import yaml
from benchmark_peaks import Case, train, write_rows

from recsys.runtime.versions import installed_versions

FORMS = ("none", "optimizer")
BATCH = 1024


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Carry out `benchmark.py dense`: runs of both forms in turn, medians over the repeats."""
    found = {}
    for width in arguments.widths:
        case = Case(rows=20_000, ids=4, dim=32, num_embeddings=10_000, model={"top_mlp": [width, width]})
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "config.yaml"
            write_rows(case, Path(folder) / "data")
            config.write_text(yaml.safe_dump(case.settings(Path(folder) / "data")))
            runs: dict[str, list[dict[str, Any]]] = {form: [] for form in FORMS}
            for repeat in range(arguments.repeats):
                for form in FORMS:
                    run_dir = Path(folder) / f"{form}-{repeat}"
                    settings = (
                        f"train.dense_sharding={form}",
                        f"train.max_steps={arguments.steps}",
                        *arguments.overrides,
                    )
                    reports = train(config, run_dir, arguments.ranks, f"train.global_batch_size={BATCH}", *settings)
                    runs[form].append(_figures(reports, run_dir))
        forms = {
            form: {key: statistics.median(each[key] for each in runs[form]) for key in runs[form][0]} for form in FORMS
        }
        ratios = {key: round(forms["optimizer"][key] / value, 4) for key, value in forms["none"].items()}
        found[str(width)] = {**forms, "ratio": ratios}
        print(f"two layers of {width}, {arguments.ranks} ranks, optimizer / none: {ratios}", flush=True)
    chosen = {key: getattr(arguments, key) for key in ("ranks", "steps", "repeats", "overrides")}
    return {**chosen, "widths": found, "versions": installed_versions()}


def _figures(reports: list[dict[str, Any]], run_dir: Path) -> dict[str, float]:
    """Return bytes of the fullest rank and the time of a step."""
    result = json.loads((run_dir / "result.json").read_text())
    dense = [report["dense"]["measured"] for report in reports]
    return {
        "parameter_bytes": max(each["parameter_bytes"] for each in dense),
        "optimizer_bytes": max(each["optimizer_bytes"] for each in dense),
        "dense_bytes": max(sum(each.values()) for each in dense),
        "peak_bytes": max(report["peak"]["measured_bytes"] for report in reports),
        "predicted_peak_bytes": max(report["peak"]["predicted_bytes"] for report in reports),
        "ms_a_step": 1e3 * BATCH / result["samples_per_s"],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `benchmark.py dense`."""
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 1024, 2048, 4096], help="of both layers")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file to write")
