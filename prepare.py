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
from typing import IO

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
    from_: tuple[str, ...] = setting((), "the source's texts as files in its order, not fetched")
    encoding: str = setting("utf-8", "how the files are encoded, such as cp1252 or gbk")
    split: str = setting(
        "paragraphs", "validate on paragraphs chosen at random, or on the end of the text",
        ("paragraphs", "position"),
    )  # fmt: skip
    val_fraction: float = setting(0.1, "share of the text kept for validation", "(0, 1)")
    min_words: int = setting(50, "lines are gathered until a paragraph has so many", "[1, 1e9]")
    seed: int = setting(1337, "of the paragraphs' order", "[0, 9223372036854775807]")
    data_dir: str | None = setting(None, "where prepared texts lie; none: data/ beside the scripts")
    offline: bool = setting(False, "use what is on this machine; download nothing")
    overwrite: bool = setting(False, "replace a prepared text that differs")
    list: bool = setting(False, "print the texts that are known or prepared, and stop")

    def conflicts(self) -> Iterator[tuple[set[str], str]]:
        """Every rule that is broken, with the names of the settings it is about."""
        if self.source not in SOURCES:
            hint = f"{nearest(self.source, SOURCES)}; your own goes as --text FILE --name NAME"
            yield {"source"}, f"source = {self.source!r}: no text is known by that name{hint}"
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
        except (LookupError, ValueError):
            rule = "Python knows no such text encoding; try utf-8, cp1252, gbk or utf-16"
            yield {"encoding"}, f"encoding = {self.encoding!r}: {rule}"

    def record(self) -> dict[str, object]:
        """What the result depends on besides the text."""
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
    """Makes data/<name>/, says what is in it, and returns that folder.

    Raises UserError for texts that are missing, wrongly encoded or blank, all at once, and where
    the folder holds another prepared text and `overwrite` is not set; Unavailable for a download
    that failed. Nothing in the folder changes before all is made.
    """
    folder = data_folder(chosen.data_dir) / (chosen.name or chosen.source)
    text, sources = read_sources(chosen)
    meta = {"format": FORMAT, "name": folder.name, "settings": chosen.record(), "sources": sources}
    if not chosen.overwrite and is_prepared(folder, meta):
        print(f"{folder}: prepared already from the same text and settings; left as it is")
        return folder
    tokenizer, ids = encode(text)
    del text  # as large as the ids, and no longer needed
    starts = paragraph_starts(ids, tokenizer, chosen.min_words)
    meta |= {"split": chosen.split if len(starts) > 2 else "position"}
    starts, orders = split(starts, meta["split"], chosen.val_fraction, chosen.seed)
    meta |= {"tokenizer": tokenizer.state(), "counts": count(starts, orders, tokenizer)}
    try:
        write(folder, meta, ids, starts, orders)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror or error}") from error
    print(*summary(folder, meta), sep="\n")
    return folder


def ensure_dataset(
    name_or_path: str, data_dir: str | None, offline: bool
) -> tuple[Path, str | None]:
    """The folder of a prepared text, made now if it is missing and prepare.py knows the source.

    Where fairy_tales cannot be fetched, that of `tales`, and a paragraph that says so.
    Raises UserError for a text that is not known, or not to be had.
    """
    for folder in (data_folder(data_dir) / name_or_path, Path(name_or_path)):
        if (folder / "meta.json").exists():
            return folder, None
    if name_or_path not in SOURCES:
        known = {*SOURCES, *prepared(data_folder(data_dir))}
        hint = (
            f"{nearest(name_or_path, known)}; python prepare.py --text FILE --name NAME makes one"
        )
        raise UserError(f"dataset = {name_or_path!r}: no text of that name is prepared{hint}")
    try:
        wanted = PrepareSettings(source=name_or_path, data_dir=data_dir, offline=offline)
        return prepare(wanted), None
    except Unavailable as error:
        if name_or_path != "fairy_tales":
            raise
        message = (
            f"fairy_tales cannot be fetched. {error}. The tales that ship with the repository are "
            "used instead. To have the others, run `python prepare.py fairy_tales` where there is "
            "a network, or `python prepare.py fairy_tales --from GRIMM.txt ANDERSEN.txt`."
        )
    return ensure_dataset("tales", data_dir, offline)[0], message


# ------------------------------------------------------------------------------- the texts


def read_sources(chosen: PrepareSettings) -> tuple[str, list[dict]]:
    """All texts cleaned and joined, a blank line between, and what meta.json tells of each.

    Raises UserError with every file that cannot be used.
    """
    problems: list[str] = []
    texts, records = [], []
    for path, book in find_files(chosen, problems):
        try:
            text, record = read_text(path, chosen.encoding)
            if book:
                check_book(text, book)
            texts.append(text)
            records.append(record)
        except (OSError, ValueError) as error:
            problems.append(f"{path}: {getattr(error, 'strerror', None) or error}")
    if problems:
        raise UserError("\n".join(problems))
    texts[:-1] = [text.rstrip("\n") for text in texts[:-1]]
    return "\n\n".join(texts), records


def find_files(chosen: PrepareSettings, problems: list[str]) -> list[tuple[Path, Book | None]]:
    """The files to read, in order, each with the book that it should be; fetched if need be."""
    books = SOURCES[chosen.source].books
    if chosen.from_:
        return list(zip(map(Path, chosen.from_), books, strict=True))
    if not chosen.text and books:
        cache = data_folder(chosen.data_dir) / "cache"
        return [(fetch(book, cache, chosen.offline), book) for book in books]
    files = []
    for path in map(Path, chosen.text or [settings.ROOT / "data" / "tales"]):
        inside = [path]
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix.lower() == ".txt")
            problems += [] if inside else [f"{path}: a folder without .txt files"]
        files += [(file, None) for file in inside]
    return files


def read_text(path: Path, encoding: str) -> tuple[str, dict]:
    """The text of a file, cleaned, and what meta.json tells of it. Raises OSError or ValueError."""
    data = path.read_bytes()
    record = {"name": path.name, "sha256": hashlib.sha256(data).hexdigest()}
    text = decode(data, encoding)
    del data  # a text may be a gigabyte: two copies at a time, and no more
    text = text.removeprefix("\ufeff")
    text = text.replace("\r\n", "\n")
    text = text.replace("\r", "\n")
    parts, cut = strip_gutenberg(text)
    del text
    text = "\n".join(parts)
    if not text or text.isspace():
        left = f" once {', '.join(cut)} are cut" if cut else ""
        raise ValueError(f"nothing but blanks in it{left}")
    return text, record | {"characters": len(text), "cut": cut}


def decode(data: bytes, encoding: str) -> str:
    """data as text. Raises ValueError that names the first byte that is none."""
    try:
        text = data.decode(encoding)
    except UnicodeError as error:
        at = getattr(error, "start", 0)
        marked = data.startswith((b"\xff\xfe", b"\xfe\xff"))
        other = "utf-16" if marked else "cp1252 (Western Europe) or gbk (Chinese)"
        raise ValueError(
            f"byte {at} ({data[at : at + 1].hex()}) is not {encoding}; if this is a text, "
            f"say how it is encoded, such as --encoding {other}"
        ) from None
    if "\0" in text:
        where = f"a zero at character {text.index(chr(0))}"
        raise ValueError(f"{where}: not a text, or one that needs --encoding utf-16-le")
    return text


# A line that ends a header or begins a licence, or the sentence that closes a book.
MARKERS = re.compile(
    r"^ *(?:"
    r"(?P<header>\*+ *START OF (?:\w+ ){0,2}PROJECT GUTENBERG"
    r"(?:(?:[^*\n]|\n(?!\n)){0,300}\*{2,}.*|.*)"  # a long title runs on to the next line
    r"|\*+ *END\** ?THE SMALL PRINT.*)"  # the end of a header until about 2002
    r"|(?P<licence>\*+ *END OF (?:\w+ ){0,2}PROJECT GUTENBERG.*"
    r"|\*+ *START: FULL LICENSE.*|THE FULL PROJECT GUTENBERG\S{0,3} LICENSE.*)"
    r"|(?P<closing>(?:The )?(?:End|Ende|Fin)\b.{0,20}\bProje[ck]t Gutenberg.*(?:\n(?!\*)\S.*){0,3})"
    r")\n?",
    re.MULTILINE | re.IGNORECASE,
)
# Who made the file, where that is the first thing after the header.
CREDITS = re.compile(
    r"\s*(?:(?:This )?e-?(?:text|book) (?:was )?)?(?:produced|prepared|transcribed) .{0,60}?by "
    r".*(?:\n.+)*",
    re.IGNORECASE,
)


def strip_gutenberg(text: str) -> tuple[list[str], list[str]]:
    """The parts of text that are book, and how much was cut that is Project Gutenberg's.

    Not book is what comes before the end of a header, what comes after the beginning of a
    licence, and what lies between a closing sentence and a licence. There may be several books,
    and any of the markers may be missing; a text without them is returned as it is.
    """
    known = "Gutenberg" in text or "GUTENBERG" in text  # quick, where a pattern is slow
    markers = list(MARKERS.finditer(text)) if known else []
    if not markers:
        return [text], []
    parts: list[str] = []
    cut: Counter[str] = Counter()
    last, at = "", 0  # the kind of the marker before, and where that ended
    for marker in [*markers, None]:
        kind = marker.lastgroup if marker else "end"
        start, end = marker.span() if marker else (len(text), len(text))
        if last == "header" and (credits := CREDITS.match(text, at)):
            cut["credits"] += credits.end() - at
            at = credits.end()
        if kind == "header" or last == "licence" or (last, kind) == ("closing", "licence"):
            cut["header" if kind == "header" else "licence"] += start - at
        else:
            parts.append(without_blank_ends(text, at, start))
        cut[kind] += end - start
        last, at = kind, end
    notes = [f"{size:,} characters of {kind}" for kind, size in cut.items() if size]
    return [part for part in parts if part], notes


def without_blank_ends(text: str, start: int, end: int) -> str:
    """text[start:end] without its first and last empty lines."""
    while start < end and text[start] == "\n":
        start += 1
    while start < end and text[end - 1] == "\n":
        end -= 1
    return text[start : end + 1] if start < end else ""  # with the newline that ends its last line


def check_book(text: str, book: Book) -> None:
    """Raises ValueError if text is not that book, or not all of it."""
    if re.match(r"\s*<(?:!doctype|html|\?xml)", text, re.IGNORECASE):
        raise ValueError(f"a page of HTML, not {book.title}")
    if book.words not in text.lower():
        raise ValueError(f"not {book.title}: the words {book.words!r} are not in it")
    if len(text) < 0.8 * book.characters:
        found = f"{len(text):,} characters of about {book.characters:,}"
        raise ValueError(f"not the whole of {book.title}: {found}")
    if book.sha256 and hashlib.sha256(text.encode()).hexdigest() != book.sha256:
        raise ValueError(f"not {book.title} as expected: its {len(text):,} characters differ")


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
                failure = f"{address}: {reason(error)}"
                if not may_pass(error):
                    break
        failures.append(failure)
    raise Unavailable(f"{book.title}: {'; '.join(failures)}; --from takes it from a file")


def download(address: str, book: Book, path: Path) -> Path:
    """Fetches the address into path, which appears only if it is the whole book."""
    request = urllib.request.Request(address, headers={"User-Agent": "fairy-tale-gpt"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
            temporary = Path(folder) / path.name
            receive(response, temporary, book.title)
            check_book(read_text(temporary, "utf-8")[0], book)
            os.replace(temporary, path)
    return path


def receive(response: http.client.HTTPResponse, path: Path, title: str) -> None:
    """Writes what a server sends to path. Raises ConnectionError if it is less than announced."""
    size = response.length  # None where the server does not say; it shrinks as bytes come in
    with (
        path.open("wb") as file,
        tqdm(total=size, desc=title, unit="B", unit_scale=True, delay=1) as bar,
    ):
        while block := response.read(BLOCK):
            file.write(block)
            bar.update(len(block))
        flush(file)
    if response.length:
        raise ConnectionError(f"the last {response.length:,} of {size:,} bytes did not come")


def may_pass(error: Exception) -> bool:
    """Whether it is worth while to try the same address again.

    Not where no connection came about (URLError): without a network one should know in seconds.
    """
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500 or error.code == 429  # too many requests
    return isinstance(error, TimeoutError | ConnectionError | http.client.HTTPException)


def reason(error: Exception) -> str:
    """What went wrong, in a few words."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, TimeoutError):
        return f"nothing came for {TIMEOUT} seconds"
    cause = getattr(error, "reason", error)  # a URLError wraps what happened
    return getattr(cause, "strerror", None) or str(cause)


# ------------------------------------------------------------------------------- text to ids


def encode(text: str) -> tuple[CharTokenizer, np.ndarray]:
    """The tokenizer for text, and text as its ids, in the smallest integers that hold them."""
    seen = np.zeros(0x110000, bool)  # one for each code point there is
    for codes in code_blocks(text, "vocabulary"):
        seen[codes] = True
    found = np.flatnonzero(seen)
    table = np.zeros(found[-1] + 1, np.min_scalar_type(len(found) - 1))
    table[found] = np.arange(len(found))
    ids = np.empty(len(text), table.dtype)
    for block, codes in enumerate(code_blocks(text, "characters")):
        np.take(table, codes, out=ids[block * BLOCK : block * BLOCK + len(codes)], mode="clip")
    return CharTokenizer(map(chr, found)), ids


def code_blocks(text: str, doing: str) -> Iterator[np.ndarray]:
    """The code points of text, a block at a time."""
    for start in progress(range(0, len(text), BLOCK), doing):
        yield np.frombuffer(text[start : start + BLOCK].encode("utf-32-le"), "<u4")


def progress(parts: Iterable, doing: str) -> Iterable:
    """parts, with a bar if they take longer than a second."""
    return tqdm(parts, desc=doing, delay=1, leave=False)


def paragraph_starts(ids: np.ndarray, tokenizer: CharTokenizer, min_words: int) -> np.ndarray:
    """Where each paragraph starts, and where the last one ends.

    Lines are gathered until they have min_words words (as str.split counts them); the lines left
    over are the last paragraph, or the end of it if they are blank.
    """
    blank = np.array([character.isspace() for character in tokenizer.characters])
    newline = tokenizer.characters.find("\n")
    starts = [np.zeros(1, np.int64)]
    lacking, after_blank = min_words, True  # words that the paragraph under way still needs
    for start in progress(range(0, len(ids), BLOCK), "paragraphs"):
        block = ids[start : start + BLOCK]
        blanks = blank[block]
        first = ~blanks & np.concatenate(([after_blank], blanks[:-1]))  # letters that begin a word
        after_blank = blanks[-1]
        words, ends = np.flatnonzero(first), np.flatnonzero(block == newline)
        counts = np.searchsorted(words, ends)  # words in the block before each line's end
        closing = closing_lines(counts, lacking, min_words)
        starts.append(start + 1 + ends[closing])
        lacking = (counts[closing[-1]] + min_words if closing else lacking) - len(words)
    found = np.concatenate(starts)
    if lacking < min_words:
        return np.append(found, len(ids))
    found[-1] = len(ids)
    return found


def closing_lines(counts: np.ndarray, lacking: int, min_words: int) -> list[int]:
    """The lines at whose ends a paragraph has its words. counts: words before each line's end."""
    following = np.searchsorted(counts, counts + min_words).tolist()  # from one to the next
    line = int(np.searchsorted(counts, lacking))
    lines = []
    while line < len(counts):
        lines.append(line)
        line = following[line]
    return lines


# ------------------------------------------------------------------------------- ids to files


def split(
    starts: np.ndarray, how: str, val_fraction: float, seed: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Where paragraphs start, and which of them go into each split, in which order.

    By position, the paragraph in which the validation text begins is divided.
    Raises UserError for a text of one character.
    """
    characters, paragraphs = int(starts[-1]), len(starts) - 1
    if characters < 2:
        raise UserError("the text is one character long; to be split it needs two")
    if how == "position":
        first = np.clip(int(characters * (1 - val_fraction)), 1, characters - 1)
        starts = np.union1d(starts, [first])
        train, val = np.split(np.arange(len(starts) - 1), np.searchsorted(starts, [first]))
    else:
        order = np.random.default_rng(seed).permutation(paragraphs)
        val, train = np.split(order, [np.clip(round(paragraphs * val_fraction), 1, paragraphs - 1)])
    return starts, {"train": train, "val": val}


def count(
    starts: np.ndarray, orders: dict[str, np.ndarray], tokenizer: CharTokenizer
) -> dict[str, int]:
    """How many characters, paragraphs and different characters there are, for meta.json."""
    counts = {"vocabulary": tokenizer.vocab_size, "characters": int(starts[-1])}
    counts["paragraphs"] = len(starts) - 1
    for name, order in orders.items():
        counts[f"{name}_characters"] = int(np.diff(starts)[order].sum())
        counts[f"{name}_paragraphs"] = len(order)
    return counts


def gather(ids: np.ndarray, starts: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Those paragraphs of ids in that order, end to end; and their starts, with the last end."""
    new = np.concatenate(([0], np.cumsum(np.diff(starts)[order])))
    out = np.empty(new[-1], ids.dtype)
    some = 4096  # paragraphs at a time
    for i in progress(range(0, len(order), some), "shuffling"):
        chosen = order[i : i + some]
        spans = zip(starts[chosen].tolist(), starts[chosen + 1].tolist(), strict=True)
        out[new[i] : new[i + len(chosen)]] = np.concatenate([ids[a:b] for a, b in spans])
    return out, new


def write(
    folder: Path, meta: dict, ids: np.ndarray, starts: np.ndarray, orders: dict[str, np.ndarray]
) -> None:
    """Makes the files beside the folder, then moves them in, so that none is ever half-written.

    meta.json leaves first and comes last: a folder that has one is whole.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        built = Path(temporary)
        for name, order in orders.items():
            tokens, paragraphs = gather(ids, starts, order)
            save(built / f"{name}.npy", tokens)
            save(built / f"{name}_paragraphs.npy", paragraphs)
        meta = meta | {"fingerprint": fingerprint(built)}
        with (built / "meta.json").open("w", encoding="utf-8") as file:
            json.dump(meta, file, ensure_ascii=False, indent=1)
            flush(file)
        folder.mkdir(exist_ok=True)
        (folder / "meta.json").unlink(missing_ok=True)
        for name in (*ARRAYS, "meta.json"):
            os.replace(built / name, folder / name)


def save(path: Path, array: np.ndarray) -> None:
    """Writes the array, and waits until it is on the disk."""
    with path.open("wb") as file:
        np.save(file, array)
        flush(file)


def flush(file: IO) -> None:
    """Waits until what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def fingerprint(folder: Path) -> str:
    """The sha256 of what is in the four arrays, one after another: two runs used the same text."""
    digest = hashlib.sha256()
    for name in ARRAYS:
        digest.update(np.load(folder / name, mmap_mode="r"))
    return digest.hexdigest()


def is_prepared(folder: Path, wanted: dict) -> bool:
    """Whether the folder holds just this text, undamaged. Raises UserError if it holds another."""
    meta = read_meta(folder)
    if not meta:
        return False
    others = [key for key in ("format", "sources") if meta.get(key) != wanted[key]]
    had = meta.get("settings", {})
    others += [key for key, value in wanted["settings"].items() if had.get(key) != value]
    if others:
        advice = "add --overwrite to replace it, or --name to make another"
        raise UserError(f"{folder}: prepared already with other {', '.join(others)}; {advice}")
    try:
        return fingerprint(folder) == meta.get("fingerprint")
    except (OSError, ValueError, EOFError):
        return False


def read_meta(folder: Path) -> dict:
    """What the folder's meta.json says; nothing if there is none, or it is damaged."""
    try:
        return json.loads((folder / "meta.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}


# ------------------------------------------------------------------------------- telling of it


def summary(folder: Path, meta: dict) -> Iterator[str]:
    """The lines that say what was made."""
    for source in meta["sources"]:
        if source["cut"]:
            yield f"{source['name']}: cut " + ", ".join(source["cut"])
    counts, files = meta["counts"], len(meta["sources"])
    yield (
        f"{meta['name']}: {files} file{'s' * (files > 1)}, {counts['characters']:,} characters, "
        f"{counts['vocabulary']:,} of them different; {counts['paragraphs']:,} paragraphs of at "
        f"least {meta['settings']['min_words']} words"
    )
    if meta["split"] != meta["settings"]["split"]:
        yield "there is one paragraph only, so the end of the text is what validates"
    for name, purpose in (("train", "to train on"), ("val", "to validate on")):
        size, paragraphs = counts[f"{name}_characters"], counts[f"{name}_paragraphs"]
        yield f"{purpose}: {size:,} characters in {paragraphs:,} paragraphs"
    yield f"written to {folder}"


def table(data: Path) -> Iterator[str]:
    """A line for each text that is known or prepared: name, size, state, title."""
    for name in dict.fromkeys([*SOURCES, *prepared(data)]):
        source = SOURCES.get(name, Source("a text of your own"))
        size = sum(book.characters for book in source.books)
        cached = [(data / "cache" / book.file).exists() for book in source.books]
        state = "in the cache" if all(cached) else "to be fetched"
        if name == "tales":
            files = (settings.ROOT / "data" / "tales").glob("*.txt")
            size, state = sum(file.stat().st_size for file in files), "in the repository"
        if name in prepared(data):
            size, state = read_meta(data / name)["counts"]["characters"], "prepared"
        yield f"{name:16} {size:>13,} characters  {state:17} {source.title}"


def prepared(data: Path) -> list[str]:
    """The names of the texts that are prepared in that folder."""
    return sorted(
        path.parent.name
        for path in data.glob("*/meta.json")
        if read_meta(path.parent).get("format") == FORMAT
    )


def data_folder(data_dir: str | None) -> Path:
    """Where prepared texts lie."""
    return Path(data_dir) if data_dir else settings.ROOT / "data"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that this one may have been meant for, if there is one."""
    near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else ""


if __name__ == "__main__":
    run(main)
