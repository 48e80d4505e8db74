"""Hooks of mkdocs: pages of the site that are not in docs/, and links to files outside docs/.

On GitHub, Markdown files are read in their places, and links go from file to file. On the site, README.md is the first
page, the notebook is a page, and any other file that a link leads to is copied to files/.
"""

import json
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# File of the repository → page of the site.
PAGES = {
    "README.md": "index.md",
    "data/README.md": "data.md",
    "docs/tutorial.ipynb": "tutorial.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
_SOURCES = {page: source for source, page in PAGES.items()}
_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages from outside docs/, and the files that links refer to."""
    for source, page in PAGES.items():
        path = ROOT / source
        text = _page_of_notebook(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    for file in files.documentation_pages():
        for link in _LINK.findall(file.content_string):
            target = _target(file.src_uri, link)
            uri = _uri(target)
            if uri.startswith("files/") and (ROOT / target).is_file() and uri not in files.src_uris:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links between files of the repository by links between pages of the site."""
    uri = page.file.src_uri
    folder = os.path.dirname(uri) or "."
    return _LINK.sub(lambda link: os.path.relpath(_uri(_target(uri, link[1])), folder), markdown)


def _target(uri: str, link: str) -> str:
    """Return the file of the repository that a link in a page refers to."""
    source = _SOURCES.get(uri, f"docs/{uri}")
    return os.path.normpath(f"{os.path.dirname(source) or '.'}/{link}")


def _uri(target: str) -> str:
    """Return the place of a file of the repository on the site."""
    if target in PAGES:
        return PAGES[target]
    return target.removeprefix("docs/") if target.startswith("docs/") else f"files/{target}"


def _page_of_notebook(path: Path) -> str:
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text("utf-8"))["cells"]]
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells)
