"""Blocks of the pages: what a reader would type, in order, and HTML comments with instructions for the tests.

`<!-- run: COMMANDS -->` is run as a block that readers do not see; `<!-- not run: REASON -->` precedes a block that is
only parsed. A block with `title="FILE"` is written to that file.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from launch import ROOT, environment

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "data" / "README.md"])
_PART = re.compile(
    r"^ *<!-- (?P<word>run|not run):\s(?P<said>.*?)-->"
    r"|^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_COPIED = ("benchmarks", "configs")  # folders in which the commands of a page may write


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, or a comment with commands."""

    page: Path
    line: int
    language: str
    title: str  # name of the file that it is written to, or empty
    text: str
    not_run: str  # the reason why it is not run, or empty

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def script(self) -> str:
        """The block as lines of bash; empty for blocks that are only for reading."""
        if self.title:
            return f"mkdir -p $(dirname '{self.title}')\ncat >'{self.title}' <<'END_OF_BLOCK'\n{self.text}END_OF_BLOCK"
        if self.language == "python":
            return f"python - <<'END_OF_BLOCK'\n{self.text}END_OF_BLOCK"
        return self.text if self.language == "bash" else ""


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in order."""
    text, found, reason = page.read_text(), [], ""
    for part in _PART.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        if part["word"] == "not run":
            reason = part["said"].strip()
        elif part["word"] == "run":
            found.append(Block(page, line, "bash", "", f"{part['said'].strip()}\n", ""))
        else:
            language, _, rest = part["info"].partition(" ")
            title = re.search(r'title="([^"]+)"', rest)
            body = re.sub(f"^{part['indent']}", "", part["text"], flags=re.MULTILINE)
            found.append(Block(page, line, language, title[1] if title else "", body, reason))
            reason = ""
    return found


def run_page(page: Path, folder: Path) -> str:
    """Run the blocks of a page in one shell, in a folder that looks like a clone of the repository.

    Returns:
        Standard output.

    Raises:
        AssertionError: a block has failed; the message names its page and line.
    """
    _clone(folder)
    lines = ["set -euo pipefail"]
    for block in blocks(page):
        if not block.not_run and block.script:
            lines += [f"echo '{block.place}' >'{folder}/.place'", block.script]
    (folder / ".page.sh").write_text("\n".join([*lines, ""]))
    path = f"{folder}/.bin{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**environment(), "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = ["bash", ".page.sh"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, f"{(folder / '.place').read_text()}{done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout


def _clone(folder: Path) -> None:
    """Make a folder look like a clone; files that commands only read are links."""
    for entry in ROOT.iterdir():
        if entry.name in _COPIED:
            shutil.copytree(entry, folder / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif entry.name not in ("data", "runs", "build", ".git"):
            (folder / entry.name).symlink_to(entry)
    (folder / "data").mkdir()
    (folder / "data" / "sample").symlink_to(ROOT / "data" / "sample")
    (folder / ".bin").mkdir()
    # The address is given because torchrun otherwise asks the network for this host's name.
    launcher = "torch.distributed.run --local-addr 127.0.0.1"
    for name, module in {"recsys": "recsys", "torchrun": launcher}.items():
        (folder / ".bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        (folder / ".bin" / name).chmod(0o755)
