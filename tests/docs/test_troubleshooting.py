"""docs/troubleshooting.md: its messages are those of the code."""

import ast
import re

import pytest
from launch import ROOT

MESSAGES = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """All texts of the code, with `…` for what is put into them; of shell scripts their lines."""
    sources = [path.read_text() for path in (ROOT / "recsys").rglob("*.py")]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    strings = {_text(node) for node in nodes if id(node) not in docstrings}
    return [text for text in strings if " " in text] + [(ROOT / "scripts" / "setup.sh").read_text()]


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) if isinstance(value, ast.Constant) else "…" for value in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return ""


@pytest.mark.parametrize("message", MESSAGES)
def test_the_code_says_it(message: str, texts: list[str]) -> None:
    pattern = re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)
    assert any(pattern.search(text) for text in texts)


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 40
