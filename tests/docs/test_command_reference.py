"""docs/commands.md is what scripts/command_reference.py makes of the parsers, and says something of every word."""

import re

from scripts.command_reference import PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python scripts/command_reference.py"


def test_every_word_has_a_meaning() -> None:
    rows = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) > 100 and not [word for word, _, meaning in rows if not meaning]
    assert ("--trials TRIALS", "`40`", "number of trials, over all processes") in rows
    assert ("--space FILE\\|key=… …", "*required*") in [row[:2] for row in rows]
