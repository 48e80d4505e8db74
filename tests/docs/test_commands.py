"""Commands of the README and the pages: all are parsed, and all are run but those that say why not (`pytest -rs`)."""

import contextlib
import dataclasses
import functools
import io
import re
import shlex
import subprocess
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch import ROOT
from pages import PAGES, Block, blocks, run_page

from recsys.__main__ import COMMANDS, main
from recsys.config.model import MODELS, find_model
from recsys.config.schema import Config

BLOCKS = [block for page in PAGES for block in blocks(page)]
LANGUAGES = ("bash", "python", "yaml", "json", "text")
RUN = [page for page in PAGES if any(block.script and not block.not_run for block in blocks(page))]


def name(value: Path | Block) -> str:
    return value.place if isinstance(value, Block) else str(value.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=name)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.not_run], ids=name)
def test_a_block_that_is_not_run(block: Block) -> None:
    pytest.skip(f"{block.place}: {block.not_run}")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_are_fenced(page: Path) -> None:
    """A block that is only indented would not be tested."""
    text = outside_blocks(page)
    assert re.findall(r"(?<=\n\n) {4,}\S.*", text) == [] and "```" not in text


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_in_sentences_parse(page: Path) -> None:
    for said in re.findall(r"`((?:recsys|python|torchrun|sbatch|train\.py) [^`\n]+)`", outside_blocks(page)):
        if not re.search(r"…|NAME|LOW", said):  # which stand for something
            for words in commands(said):
                check_command(words)


def outside_blocks(page: Path) -> str:
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=name)
def test_a_block_parses(block: Block) -> None:
    assert block.language in LANGUAGES
    if block.language == "python":
        compile(block.text, block.place, "exec")
    elif block.language == "yaml":
        content = yaml.safe_load(block.text)
        assert [key for key in _keys(content) if not is_key(key)] == []
    elif block.language == "bash":
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for words in commands(block.text):
            check_command(words)


def test_a_wrong_key_and_a_wrong_option_are_seen() -> None:
    for command in (
        "recsys train a.yaml train.epoch=3",
        "recsys predict a b c --kep x",
        "recsys trian a.yaml",
        "recsys train configs/no.yaml",
    ):
        with pytest.raises(AssertionError):
            check_command(shlex.split(command))
    check_command(shlex.split("recsys recommend runs/a users/ out/ --k 20 tables.item.quantize=INT4 model.top_k=[5]"))


def commands(text: str) -> list[list[str]]:
    """Return the words of each command of this program in lines of bash, from its name on."""
    found = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        with contextlib.suppress(ValueError):  # a quote over several lines, as of a here-document
            words = shlex.split(line, comments=True)
            starts = [
                at for at, word in enumerate(words) if word in ("recsys", "train.py") or word.endswith("train.sbatch")
            ]
            found += [words[at:] for at in starts[:1] if at + 1 < len(words)]
    return found


def check_command(words: list[str]) -> None:
    """Raise an AssertionError for a command, an option or a config key that there is not."""
    ends = [
        at for at, word in enumerate(words) if word in ("&&", "||", "|", ";", "&", ">") or word.startswith((">", "2>"))
    ]
    program, *words = words[: ends[0] if ends else None]
    command = [words.pop(0)] if program == "recsys" else ["train"]
    assert command[0] in COMMANDS, command
    if command[0] in ("prepare", "tables") and words:
        command.append(words.pop(0))
    assert [word for word in words if word.startswith("configs/") and not (ROOT / word).is_file()] == []
    known = re.findall(r"--[a-z][\w-]*", help_of(*command))
    assert [word for word in words if word.startswith("--") and word.partition("=")[0] not in known] == []
    if command[0] not in ("prepare", "tables"):
        keys = [word.partition("=")[0] for word in words if re.match(r"[\w.]+=", word)]
        assert [key for key in keys if not is_key(key)] == []


@functools.cache
def help_of(*command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return shown.getvalue()


def is_key(key: str, section: Any = Config) -> bool:
    """Return whether a config may have a key, such as `tables.item.quantize`."""
    first, _, rest = key.partition(".")
    if key == "base":
        return True
    if key.startswith("model."):
        return any(is_key(rest, find_model(model).Config) for model in MODELS)
    kinds = typing.get_type_hints(section)
    if first not in kinds:
        return False
    kind, parts = kinds[first], typing.get_args(kinds[first])
    if typing.get_origin(kind) is dict:
        rest = rest.partition(".")[2]
    nested = next((part for part in (kind, *parts) if dataclasses.is_dataclass(part)), None)
    return not rest or (nested is not None and is_key(rest, nested))


def _keys(content: Any, above: str = "") -> list[str]:
    """Return the keys of a mapping and of those below it, with dots."""
    if not isinstance(content, dict):
        return [above]
    return [key for name, value in content.items() for key in _keys(value, f"{above}.{name}".lstrip("."))]
