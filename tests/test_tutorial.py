"""docs/tutorial.ipynb: its cells run from top to bottom, and what they show is what the text says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, environment

_SHOWN = """
print(json.dumps({
    "users": len(best), "films": sorted({len(row) for row in best["items"].to_pylist()}), "metrics": metrics,
    "even": np.mean([[int(item[5:]) % 2 == user % 2 for item in items]
                     for user, items in zip(best["user_id"].to_pylist(), best["items"].to_pylist())]),
    "scores": scores["score"].to_pylist(),
}))
"""


@pytest.mark.slow
def test_the_cells_run(tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "docs/tutorial.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    env = {**environment(), "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    script = "\n\n".join([*cells, _SHOWN])
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = json.loads(done.stdout.splitlines()[-1])
    assert shown["users"] == 200 and shown["films"] == [20] and shown["even"] > 0.9
    assert shown["metrics"]["recall@20"] > 0.15 and shown["scores"][0] > shown["scores"][1]
