"""What a person sees: pages of five kinds of run and the site in headless Chromium, narrow and wide, light and dark.

It takes Chromium (Debian's package `chromium`) and the extra `browser`. The screenshots, for a look, lie below the
folder that `--basetemp` names: bash scripts/test.sh -m slow tests/report/test_browser.py --basetemp /tmp/seen
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from launch import ROOT, fork_train

from recsys.__main__ import main

sync_api = pytest.importorskip("playwright.sync_api", reason="the extra `browser` is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="the extra `browser` is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]

OFTEN = ("train.epochs=2", "train.eval_every_steps=8", "train.log_every_steps=2")
RANKER = "configs/dlrm_sample.yaml"
LABELS = f"""base: {ROOT}/{RANKER}
data: {{label_column: null, labels: {{click: label, early: hour < 12}}}}
model: {{name: mmoe, num_experts: 2, expert_mlp: [16], tower_mlp: [8]}}
"""
LONG = f"""base: {ROOT}/{RANKER}
data: {{label_column: null, labels: {{a_name_wider_than_the_half_of_a_phone: label, other: label}}}}
"""
LOOKS = [(scheme, width) for scheme in ("light", "dark") for width in (390, 1280)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each kind, and the page that compares two."""
    folder = tmp_path_factory.mktemp("runs")

    def train(name: str, config: str, *keys: str, nproc: int = 1) -> None:
        done = fork_train(config, f"run.dir={folder}/{name}", *OFTEN, *keys, nproc=nproc, timeout=600)
        assert done.returncode == (name == "failed"), done.stderr[-3000:]

    train("ranker", RANKER, "run.profile_steps=4")
    train("two", RANKER, nproc=2)
    train("failed", RANKER, "optimizer.dense.name=sgd", "optimizer.dense.learning_rate=1e30")
    (folder / "labels.yaml").write_text(LABELS)
    train("multitask", f"{folder}/labels.yaml")
    (folder / "long.yaml").write_text(LONG)
    train("long", f"{folder}/long.yaml")
    clicks = ["data/sample/train", "--where", "label == 1", "--time", "day", "--item-features", "category"]
    assert main(["prepare", "retrieval", *clicks, "--out", f"{folder}/clicks"]) == 0
    parts = (f"data.{part}={folder}/clicks/{part}" for part in ("train", "valid", "test", "items"))
    train("retrieval", "configs/two_tower_sample.yaml", *parts)
    both = [str(folder / name) for name in ("ranker", "multitask")]
    (folder / "compared").mkdir()
    assert main(["compare", *both, "--out", str(folder / "compared" / "report.html")]) == 0
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@contextmanager
def opened(browser: Any, path: Path, scheme: str = "light", width: int = 1280) -> Iterator[Any]:
    """Open a file; in the end fail if the page has said something, or has asked for what is no file."""
    context, found = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}), []
    page = context.new_page()
    page.on("console", lambda message: found.append(message.text))
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("request", lambda asked: asked.url.startswith(("file:", "data:")) or found.append(asked.url))
    page.goto(path.resolve().as_uri())
    yield page
    context.close()
    assert found == []


@pytest.mark.parametrize(("scheme", "width"), LOOKS)
@pytest.mark.parametrize("name", ["ranker", "retrieval", "multitask", "long", "failed", "two", "compared"])
def test_a_page_of_a_run(name: str, scheme: str, width: int, runs: Path, browser: Any) -> None:
    with opened(browser, runs / name / "report.html", scheme, width) as page:
        page.screenshot(path=runs / f"{name}-{scheme}-{width}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        checked = axe.Axe().run(page).response
        told = [(rule["id"], rule["impact"], rule["nodes"][0]["html"]) for rule in checked["violations"]]
        assert told == [] and len(checked["passes"]) > 15


def test_the_site_is_searched_without_a_server(tmp_path: Path, browser: Any) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
    for name in ("index.html", "tutorials/daily.html"):
        with opened(browser, tmp_path / name) as page:
            page.fill("input.md-search__input", "row-wise Adagrad")
            page.wait_for_selector(".md-search-result__link")
