"""The tales that ship: enough of them, in plain characters, and every one its own."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "data" / "tales"
RUN = 60  # characters in a row that no two texts may share


@pytest.fixture(scope="module")
def tales() -> dict[str, str]:
    return {path.name: path.read_bytes().decode() for path in sorted(FOLDER.glob("*.txt"))}


def runs(text: str) -> Iterator[int]:
    """The hash of each run of characters, any whitespace being one space."""
    folded = " ".join(text.split())
    return (hash(folded[i : i + RUN]) for i in range(len(folded) - RUN + 1))


def test_there_are_enough(tales):
    assert len(tales) >= 80
    assert sum(map(len, tales.values())) >= 350_000


def test_only_plain_characters(tales):
    """A character that comes twice in the corpus is a row of weights that learns nothing."""
    odd = {name: re.findall(r"[^A-Za-z0-9 \n.,;:!?'\"()-]", text) for name, text in tales.items()}
    assert not {name: set(found) for name, found in odd.items() if found}


def test_form_is_a_title_and_wrapped_paragraphs(tales):
    """A blank line between all, no spaces at line ends, one newline at the end."""
    form = re.compile(r"[^\s].{0,76}\S\n(\n(\S|\S.{0,76}\S)\n((\S|\S.{0,76}\S)\n)*)+")
    assert not [name for name, text in tales.items() if not form.fullmatch(text)]


def test_titles_differ_and_name_the_files(tales):
    titles = [text.partition("\n")[0] for text in tales.values()]
    assert len(set(titles)) == len(titles)
    slugs = [re.sub("[^a-z0-9]+", "-", t.lower().replace("'", "")).strip("-") for t in titles]
    assert [f"{slug}.txt" for slug in slugs] == list(tales)


def test_no_two_tales_share_a_run(tales):
    owner: dict[int, str] = {}
    shared = set()
    for name, text in tales.items():
        for run in runs(text):
            if owner.setdefault(run, name) != name:
                shared.add((owner[run], name))
    assert not shared


def test_no_tale_shares_a_run_with_a_known_book(tales, texts):
    owner = {run: name for name, text in tales.items() for run in runs(text)}
    books = [path.read_text("utf-8-sig") for path in texts.glob("pg*.txt")]
    assert books
    assert not {owner[run] for book in books for run in runs(book) if run in owner}


def test_readme_gives_them_to_the_public():
    assert "CC0" in (FOLDER / "README.md").read_text("utf-8")
