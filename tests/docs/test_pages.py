"""The pages for readers: links lead somewhere, files that they name are there, and the first config loads."""

import re
from pathlib import Path

import pytest
from launch import ROOT
from pages import PAGES, blocks

from recsys.config import load_config

_FILE = r"`((?:[\w-]+/)+[\w.-]+\.(?:py|sh|yaml|sbatch))`"  # with a folder, which may be one of recsys


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        if path.startswith("https://"):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page: Path) -> None:
    for name in re.findall(_FILE, page.read_text()):
        assert (ROOT / name).exists() or (ROOT / "recsys" / name).exists(), name


def test_the_readme_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    assert all(f"({page.relative_to(ROOT)})" in readme for page in PAGES if page != ROOT / "README.md")


def test_the_first_config_of_the_readme_is_whole(tmp_path: Path) -> None:
    (text,) = [block.text for block in blocks(ROOT / "README.md") if block.title == "my.yaml"]
    (tmp_path / "first.yaml").write_text(text)
    config = load_config(tmp_path / "first.yaml")
    assert list(config.tables) == ["user", "item"]


def test_figures_of_techniques_are_those_of_the_benchmark() -> None:
    figure = r"(\d+\.\d\d)(?: MiB,| \|.*\|) (0\.\d{4})"
    tables = (ROOT / "benchmarks" / f"strategies_{data}.md" for data in ("movielens_1m", "frappe"))
    measured = re.findall(figure, "".join(table.read_text() for table in tables))
    told = re.findall(figure, (ROOT / "docs" / "techniques.md").read_text())
    assert len(told) > 25 and set(told) <= set(measured)
