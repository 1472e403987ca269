"""The README keeps its word: its settings, its layout and its commands are those of the code."""

import dataclasses
import itertools
import re
import shlex

import pytest
from conftest import REPOSITORY

import prepare
import sample
import settings
from settings import Field, TrainSettings, hinted, show

README = (REPOSITORY / "README.md").read_text("utf-8")
COMMANDS = {
    "train.py": (TrainSettings, "config"),
    "prepare.py": (prepare.PrepareSettings, "source"),
    "sample.py": (sample.SampleSettings, ""),
}


def table_row(field: Field) -> str:
    """The line of the README's settings table that a field makes."""
    return f"| `{field.name}` | {show(field.default)} | {field.expected()} | {field.meaning} |"


def test_settings_table_is_made_from_the_settings():
    """Renew it with: python -m pytest tests/test_readme.py, whose failure prints the rows."""
    groups = [base for base in TrainSettings.__bases__ if base is not settings.Actions]
    fields = itertools.chain.from_iterable(
        itertools.starmap(Field, hinted(group)) for group in groups
    )
    rows = [table_row(field) for field in fields]
    missing = [row for row in rows if row not in README]
    assert not missing, "\n".join(rows)


def test_layout_tells_the_files_and_their_lengths():
    """A length in the layout is within a tenth of the file's; every script is there."""
    told = dict(re.findall(r"^(\w+\.py) +(\d+) ", README, re.MULTILINE))
    files = {path.name: path for path in REPOSITORY.glob("*.py")}
    assert told.keys() == files.keys()
    for name, count in told.items():
        lines = len(files[name].read_text("utf-8").splitlines())
        assert abs(int(count) - lines) <= lines / 10, f"{name} has {lines} lines"


def commands() -> list[str]:
    """Each line of the README's code blocks that runs one of our scripts."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    lines = itertools.chain.from_iterable(block.splitlines() for block in blocks)
    found = (re.search(r"python ((\w+\.py)\b[^#&|]*)", line) for line in lines)
    return [match[1] for match in found if match and match[2] in COMMANDS]


@pytest.mark.parametrize("command", commands())
def test_commands_use_settings_that_exist(command, monkeypatch):
    """Each command in the README is understood by the script that it names."""
    monkeypatch.chdir(REPOSITORY)
    script, *arguments = shlex.split(command)
    kind, positional = COMMANDS[script]
    chosen = settings.resolve(kind, arguments, "", positional)
    assert dataclasses.is_dataclass(chosen)
