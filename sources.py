"""The texts: where they come from, and how a file becomes a cleaned text.

`SOURCES` has those known by name, `fetch` brings a book into the cache, `read_text` reads a file.
A text is kept in UTF-8: as a str, a gigabyte of it takes two for the sake of one curly quote.
"""

import codecs
import hashlib
import http.client
import io
import os
import re
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from settings import UserError

TIMEOUT = 10  # seconds without a byte from a server
PAUSES = (0, 1, 4)  # seconds before each try of an address
BLOCK = 1 << 16  # bytes, or ids, that are worked on at a time: they fit into a CPU's cache


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


class Unavailable(UserError):
    """A text that is not on this machine and could not be fetched."""


# ------------------------------------------------------------------------------- downloads


def fetch(book: Book, cache: Path, offline: bool) -> Path:
    """The book's file in the cache, downloaded if it is not there yet. Raises Unavailable.

    urllib will do: one file at a time, and no package to install.
    """
    path = cache / book.file
    if path.exists():
        return path
    if offline:
        raise Unavailable(f"{book.title}: not in {cache}, and offline is set; --from takes a file")
    failures = []
    for address in book.addresses:
        for pause in PAUSES:
            time.sleep(pause)
            try:
                return download(address, book, path)
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem, may_pass = diagnosis(error)
                if not may_pass:
                    break
        failures.append(f"{address}: {problem}")
    raise Unavailable(f"{book.title}: {'; '.join(failures)}; --from takes it from a file")


def download(address: str, book: Book, path: Path) -> Path:
    """Fetches the address into path, which appears only if it is the whole book."""
    request = urllib.request.Request(address, headers={"User-Agent": "fairy-tale-gpt"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
            temporary = Path(folder) / path.name
            receive(response, temporary, book.title)
            read_text(temporary, "utf-8", book)
            os.replace(temporary, path)
    return path


def receive(response: http.client.HTTPResponse, path: Path, title: str) -> None:
    """Writes what a server sends to path. Raises ConnectionError if it is less than announced."""
    size = response.length  # None where the server does not say; it shrinks as bytes come in
    with (
        path.open("wb") as file,
        tqdm.wrapattr(response, "read", size, desc=title, delay=1) as body,
    ):
        shutil.copyfileobj(body, file)
        file.flush()
        os.fsync(file.fileno())
    if response.length:
        raise ConnectionError(f"the last {response.length:,} of {size:,} bytes did not come")


def diagnosis(error: Exception) -> tuple[str, bool]:
    """What went wrong, in a few words, and whether the same address is worth another try.

    Not where no connection came about (URLError): without a network one should know in seconds.
    """
    if isinstance(error, urllib.error.HTTPError):
        passing = error.code >= 500 or error.code == 429  # too many requests
        return f"HTTP {error.code} {error.reason}", passing
    if isinstance(error, TimeoutError):
        return f"nothing came for {TIMEOUT} seconds", True
    cause = getattr(error, "reason", error)  # a URLError wraps what happened
    passing = isinstance(error, ConnectionError | http.client.HTTPException)
    return getattr(cause, "strerror", None) or str(cause), passing


# ------------------------------------------------------------------------------- files


def read_text(path: Path, encoding: str, book: Book | None = None) -> tuple[bytes, dict]:
    """The text of a file, cleaned and in UTF-8, and what meta.json tells of it.

    Raises OSError where it cannot be read, ValueError where it is no text, or not the book.
    """
    data = path.read_bytes()
    record = {"name": path.name, "sha256": hashlib.sha256(data).hexdigest()}
    text = decode(data, encoding)
    del data  # a text may be a gigabyte: two copies at a time, and no more
    parts, cut = strip_gutenberg(text)
    del text
    text = b"\n".join(parts)
    if all(map(str.isspace, blocks(text))):
        left = f" once {', '.join(cut)} are cut" if cut else ""
        raise ValueError(f"nothing but blanks in it{left}")
    if book:
        check_book(text, book)
    return text, record | {"characters": length(text), "cut": cut}


def decode(data: bytes, encoding: str) -> bytes:
    """data in UTF-8, each line end a newline, without a byte order mark.

    Raises ValueError that names the first byte that is no text.
    """
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)(), True)
    text = io.BytesIO()
    try:
        for start in range(0, len(data), BLOCK):
            block = decoder.decode(data[start : start + BLOCK], start + BLOCK >= len(data))
            text.write((block if start else block.removeprefix("\ufeff")).encode())
    except UnicodeError:
        raise ValueError(wrong_byte(data, encoding)) from None
    clean = text.getvalue()
    if b"\0" in clean:
        where = f"a zero at character {length(clean[: clean.index(0)])}"
        raise ValueError(f"{where}: not a text, or one that needs --encoding utf-16-le")
    return clean


def wrong_byte(data: bytes, encoding: str) -> str:
    """Which byte of data is the first that is not in that encoding, and what may be done."""
    at = 0
    try:
        data.decode(encoding)
    except UnicodeError as error:
        at = getattr(error, "start", 0)
    marked = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    other = "utf-16" if marked else "cp1252 (Western Europe) or gbk (Chinese)"
    return (
        f"byte {at} ({data[at : at + 1].hex()}) is not {encoding}; if this is a text, "
        f"say how it is encoded, such as --encoding {other}"
    )


def blocks(text: bytes) -> Iterator[str]:
    """A text as its characters, some at a time."""
    pieces = (text[start : start + BLOCK] for start in range(0, len(text), BLOCK))
    return codecs.iterdecode(pieces, "utf-8")


def length(text: bytes) -> int:
    """How many characters a text has."""
    return sum(map(len, blocks(text)))


# A line that ends a header or begins a licence, or the sentence that closes a book.
MARKERS = re.compile(
    rb"^ *(?:"
    rb"(?P<header>\*+ *START OF (?:\w+ ){0,2}PROJECT GUTENBERG"
    rb"(?:(?:[^*\n]|\n(?!\n)){0,300}\*{2,}.*|.*)"  # a long title runs on to the next line
    rb"|\*+ *END\** ?THE SMALL PRINT.*)"  # the end of a header until about 2002
    rb"|(?P<licence>\*+ *END OF (?:\w+ ){0,2}PROJECT GUTENBERG.*"
    rb"|\*+ *START: FULL LICENSE.*|THE FULL PROJECT GUTENBERG\S{0,3} LICENSE.*)"
    rb"|(?P<closing>(?:The )?(?:End|Ende|Fin)\b.{0,20}\bProje[ck]t Gutenberg.*"
    rb"(?:\n(?!\*)\S.*){0,3})"
    rb")\n?",
    re.MULTILINE | re.IGNORECASE,
)
# Who made the file, where that is the first thing after the header.
CREDITS = re.compile(
    rb"\s*(?:(?:This )?e-?(?:text|book) (?:was )?)?(?:produced|prepared|transcribed) .{0,60}?by "
    rb".*(?:\n.+)*",
    re.IGNORECASE,
)


def strip_gutenberg(text: bytes) -> tuple[list[bytes], list[str]]:
    """The parts of text that are book, and how much was cut that is Project Gutenberg's.

    Not book is what comes before the end of a header, what comes after the beginning of a
    licence, and what lies between a closing sentence and a licence. There may be several books,
    and any of the markers may be missing; a text without them is returned as it is.
    """
    known = b"Gutenberg" in text or b"GUTENBERG" in text  # quick, where a pattern is slow
    markers = [(m.lastgroup, *m.span()) for m in MARKERS.finditer(text)] if known else []
    if not markers:
        return [text], []
    parts: list[bytes] = []
    cut: Counter[str] = Counter()
    last, at = "", 0  # the kind of the marker before, and where that ended
    for kind, start, end in [*markers, ("end", len(text), len(text))]:
        if last == "header" and (credits := CREDITS.match(text, at)):
            cut["credits"] += length(credits[0])
            at = credits.end()
        if kind == "header" or last == "licence" or (last, kind) == ("closing", "licence"):
            cut["header" if kind == "header" else "licence"] += length(text[at:start])
        else:
            parts.append(without_blank_ends(text, at, start))
        cut[kind] += length(text[start:end])
        last, at = kind, end
    notes = [f"{size:,} characters of {kind}" for kind, size in cut.items() if size]
    return [part for part in parts if part], notes


def without_blank_ends(text: bytes, start: int, end: int) -> bytes:
    """text[start:end] without its first and last empty lines."""
    newline = ord("\n")
    while start < end and text[start] == newline:
        start += 1
    while start < end and text[end - 1] == newline:
        end -= 1
    return text[start : end + 1] if start < end else b""  # with the newline of its last line


def check_book(text: bytes, book: Book) -> None:
    """Raises ValueError if text is not that book, or not all of it."""
    if re.match(rb"\s*<(?:!doctype|html|\?xml)", text, re.IGNORECASE):
        raise ValueError(f"a page of HTML, not {book.title}")
    if book.words.encode() not in text.lower():
        raise ValueError(f"not {book.title}: the words {book.words!r} are not in it")
    if (characters := length(text)) < 0.8 * book.characters:
        found = f"{characters:,} characters of about {book.characters:,}"
        raise ValueError(f"not the whole of {book.title}: {found}")
    if book.sha256 and hashlib.sha256(text).hexdigest() != book.sha256:
        raise ValueError(f"not {book.title} as expected: its {characters:,} characters differ")
