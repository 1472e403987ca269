"""Prepares a text for training: cleaned, cut into paragraphs, split, stored as token ids.

    python prepare.py                                the tales that ship with the repository
    python prepare.py fairy_tales                    Grimm and Andersen, from Project Gutenberg
    python prepare.py --text FILE_OR_FOLDER --name NAME         a text of your own
    python prepare.py --list                         what there is

The result is the folder data/NAME. Asked for again with the same text and settings, it is left as
it is; with others it is refused, because a run may have been trained on it, until you say
--overwrite or choose another --name.
"""

import difflib
import hashlib
import http.client
import json
import os
import re
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

import settings
from settings import UserError, resolve, run, setting
from tokenizer import CharTokenizer

FORMAT = 1  # of the folder; batches.py reads it
ARRAYS = ("train.npy", "val.npy", "train_paragraphs.npy", "val_paragraphs.npy")
BLOCK = 1 << 20  # characters, or bytes, taken at a time
TIMEOUT = 10  # seconds without a byte from a server
PAUSES = (0, 1, 4)  # seconds before each try of an address


@dataclass(frozen=True)
class Book:
    """A text that can be fetched: where from, and how to tell it from a login page."""

    file: str  # its name in data/cache/
    title: str
    characters: int  # about; editions differ
    words: str  # that stand in it, in lower case
    addresses: tuple[str, ...]
    sha256: str = ""  # of the cleaned text, where just one edition will do


@dataclass(frozen=True)
class Source:
    """A text that is known by name; without books it ships with the repository."""

    title: str
    books: tuple[Book, ...] = ()


GRIMM = Book(
    "grimm.txt", "Grimms' Fairy Tales (Gutenberg #2591)", 520_000, "hans in luck",
    ("https://www.gutenberg.org/cache/epub/2591/pg2591.txt",
     "https://gutenberg.pglaf.org/cache/epub/2591/pg2591.txt"),
)  # fmt: skip
ANDERSEN = Book(
    "andersen.txt", "Fairy Tales of Hans Christian Andersen (Gutenberg #27200)", 1_996_000,
    "ugly duckling",
    ("https://www.gutenberg.org/cache/epub/27200/pg27200.txt",
     "https://gutenberg.pglaf.org/cache/epub/27200/pg27200.txt"),
)  # fmt: skip
SHAKESPEARE = Book(
    "shakespeare.txt", "tiny Shakespeare", 1_115_394, "first citizen",
    ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
     "https://storage.googleapis.com/download.tensorflow.org/data/shakespeare.txt"),
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)  # fmt: skip
SOURCES = {
    "tales": Source("fairy tales written for this repository"),
    "fairy_tales": Source("the tales of the Brothers Grimm and of Andersen", (GRIMM, ANDERSEN)),
    "shakespeare": Source("scenes of Shakespeare, as used by char-rnn and nanoGPT", (SHAKESPEARE,)),
}


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """What to prepare, and how"""

    source: str = setting("tales", "a text known by name; --list shows them")
    text: tuple[str, ...] = setting((), "your own instead: files, or folders of .txt files")
    name: str | None = setting(None, "folder to make under data/; none: the source's name")
    from_: tuple[str, ...] = setting((), "the source's texts as files, in place of fetching them")
    encoding: str = setting("utf-8", "how the files are encoded, such as cp1252 or gbk")
    split: str = setting(
        "paragraphs", "validate on paragraphs chosen at random, or on the end of the text",
        ("paragraphs", "position"),
    )  # fmt: skip
    val_fraction: float = setting(0.1, "share of the text kept for validation", "(0, 1)")
    min_words: int = setting(50, "lines are gathered until a paragraph has so many", "[1, inf)")
    seed: int = setting(1337, "of the paragraphs' order", "[0, 9223372036854775807]")
    data_dir: str | None = setting(None, "where prepared texts lie; none: data/ beside the scripts")
    offline: bool = setting(False, "use what is on this machine; download nothing")
    overwrite: bool = setting(False, "replace a prepared text that differs")
    list: bool = setting(False, "print the texts that are known or prepared, and stop")

    def conflicts(self) -> Iterator[tuple[set[str], str]]:
        """Every rule that is broken, with the names of the settings it is about."""
        if self.source not in SOURCES:
            hint = f"{nearest(self.source, SOURCES)}; your own text goes as --text FILE --name NAME"
            yield {"source"}, f"source = {self.source!r}: there is none of that name{hint}"
        elif self.text and self.source != "tales":
            yield {"source", "text"}, "source and text exclude each other; give one"
        if self.text and not self.name:
            yield {"text", "name"}, "name = none: a text of your own needs one; add --name NAME"
        if self.name is not None:
            taken = {"cache", *SOURCES} - ({self.source} if not self.text else set())
            if not re.fullmatch(r"\w[\w.-]*", self.name) or self.name in taken:
                rule = "expected letters, digits and _ . -, and not the name of a source or cache"
                yield {"name", "source", "text"}, f"name = {self.name!r}: {rule}"
        books = SOURCES.get(self.source, Source("")).books if not self.text else ()
        if self.from_ and len(self.from_) != len(books):
            wanted = f"{len(books)} files" + ": " * bool(books) + ", ".join(b.title for b in books)
            yield {"from", "source"}, f"from: expected {wanted}; {len(self.from_)} given"
        try:
            "".encode(self.encoding)
        except LookupError:
            rule = "Python knows no such text encoding; try utf-8, cp1252, gbk or utf-16"
            yield {"encoding"}, f"encoding = {self.encoding!r}: {rule}"

    def record(self) -> dict[str, object]:
        """What the prepared text depends on, besides the text."""
        names = ("encoding", "split", "val_fraction", "min_words", "seed")
        return {name: getattr(self, name) for name in names}


class Unavailable(UserError):
    """A text that is not on this machine and could not be fetched."""


def main(argv: list[str]) -> None:
    """Prepares what the arguments ask for, or lists what there is."""
    chosen = resolve(PrepareSettings, argv, about=__doc__, positional="source")
    if chosen.list:
        print(*table(data_folder(chosen.data_dir)), sep="\n")
        return
    name = prepare(chosen).name
    config = {"tales": "fairy_tales_cpu", "fairy_tales": "fairy_tales"}.get(name)
    command = f"config/{config}.py" if config else f"config/fairy_tales.py --dataset {name}"
    place = f" --data_dir {chosen.data_dir}" if chosen.data_dir else ""
    print(f"next: python train.py {command}{place}")


def prepare(chosen: PrepareSettings) -> Path:
    """Makes data/<name>/ and says what is in it. Returns that folder.

    Raises UserError for texts that are missing, wrongly encoded or blank (all at once), and where
    the folder holds another prepared text and `overwrite` is not set; Unavailable for a download
    that failed. The folder is changed only once everything is made, and meta.json comes last: a
    folder that has one is whole.
    """
    folder = data_folder(chosen.data_dir) / (chosen.name or chosen.source)
    text, sources = read_sources(chosen)
    meta = {"format": FORMAT, "settings": chosen.record(), "sources": sources}
    if not chosen.overwrite and is_prepared(folder, meta):
        print(f"{folder}: prepared already from the same text and settings; left as it is")
        return folder
    tokenizer, ids = encode(text)
    del text  # as large as the ids, and no longer needed
    starts = paragraph_starts(ids, tokenizer, chosen.min_words)
    starts, *order = split(starts, chosen)
    meta |= {"name": folder.name, "tokenizer": tokenizer.state()}
    try:
        meta |= write(folder, ids, starts, order, meta)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror or error}") from error
    print(*summary(folder, meta, chosen), sep="\n")
    return folder
