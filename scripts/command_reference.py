"""Write docs/commands.md, every command with its arguments and options, from the parsers that read them.

    python scripts/command_reference.py

`tests/docs/test_command_reference.py` holds the page to the code.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from recsys import __main__ as program

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
_HEAD = """# Commands

<!-- Written by scripts/command_reference.py from the code that reads command lines: change it there, not here. -->

All arguments of all commands, as their `--help` shows them. What they are for: [the README](../README.md#commands).
`key=value` changes any [key of the config](config.md). `train.py` is `recsys train` for torchrun.
"""


class _ParserFound(BaseException):
    """Raised instead of parsing, with the parser of a command."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command of `recsys`."""
    cls, parse_args = argparse.ArgumentParser, argparse.ArgumentParser.parse_args

    def stop_with_parser(parser: argparse.ArgumentParser, *words: Any) -> argparse.Namespace:
        if parser.prog == "recsys":  # this parser finds the command
            return parse_args(parser, *words)
        raise _ParserFound(parser)

    try:
        with mock.patch.multiple(cls, parse_args=stop_with_parser, parse_intermixed_args=stop_with_parser):
            program.main([command])
    except _ParserFound as end:
        return end.parser
    raise AssertionError(f"recsys {command} reads no words")


def page() -> str:
    """Return the whole page as Markdown."""
    return "\n".join([_HEAD, *(_section(parser_of(command)) for command in program.COMMANDS)])


def _section(parser: argparse.ArgumentParser, level: str = "##", about: str = "") -> str:
    """Return the heading, the description and the arguments of a command, and those of its subcommands."""
    description = " ".join((parser.description or about).split())
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    rows = [_row(action) for action in parser._actions if action not in below and "--help" not in action.option_strings]
    table = ["| Argument | Default | Meaning |", "|---|---|---|", *rows] if rows else []
    usage = [f"`{parser.usage}`\n"] if parser.usage else []
    parts = [f"{level} `{parser.prog}`\n", *usage, f"{description[0].upper()}{description[1:]}\n", *table]
    parts += [""] if rows else []
    for action in below:
        helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        parts += [_section(command, level + "#", helps[name]) for name, command in action.choices.items()]
    return "\n".join(parts)


def _row(action: argparse.Action) -> str:
    """Return the table row of an argument."""
    helped = (action.help or "") % {**vars(action), "prog": ""}
    default, shown = "", f"({action.default})"
    if action.required and action.option_strings:
        default = "*required*"
    elif action.nargs != 0 and str(action.default) not in ("None", "[]", "{}", "()", argparse.SUPPRESS):
        default = f"`{action.default}`"
    meaning = "; ".join(filter(None, [helped.removesuffix(shown).strip(), _choices(action, helped)]))
    cells = (text.replace("|", "\\|") for text in (f"`{' '.join(_words(action))}`", default, meaning))
    return f"| {' | '.join(cells)} |"


def _choices(action: argparse.Action, helped: str) -> str:
    """Return the choices of an argument, unless its help names them."""
    choices = [str(choice) for choice in action.choices or ()]
    return "" if all(choice in helped for choice in choices) else f"one of {', '.join(choices)}"


def _words(action: argparse.Action) -> Iterator[str]:
    """Yield an option and the name of its value, or the name of a positional argument."""
    yield from action.option_strings[:1]
    if action.nargs == 0:
        return
    name = action.metavar or action.dest.upper()
    of_several = action.nargs in ("+", "*")
    yield f"{name if isinstance(name, str) else ' '.join(name)}{' …' if of_several else ''}"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
