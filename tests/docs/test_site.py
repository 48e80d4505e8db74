"""The site of the pages: mkdocs builds it without a warning, so links and anchors lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_page_is_there(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    pages |= {
        Path(name) for name in ("index.html", "data.html", "tutorial.html", "contributing.html", "changelog.html")
    }
    assert {page for page in pages if not (site / page).is_file()} == set()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?:[^\" >]+)", page.read_text())
        assert not loaded, (page.name, loaded)


def test_links_to_files_of_the_repository_have_a_copy(site: Path) -> None:
    text = (site / "models.html").read_text()
    assert 'href="files/configs/esasrec_beauty.yaml"' in text and 'href="benchmarks.html"' in text
    assert (site / "files/configs/esasrec_beauty.yaml").read_bytes() == (
        ROOT / "configs" / "esasrec_beauty.yaml"
    ).read_bytes()
