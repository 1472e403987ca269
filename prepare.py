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
import json
import os
import re
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

import settings
from settings import UserError, resolve, run, setting
from sources import BLOCK, SOURCES, Book, Source, Unavailable, blocks, fetch, read_text
from tokenizer import CharTokenizer

FORMAT = 1  # of the folder
ARRAYS = ("train", "val", "train_paragraphs", "val_paragraphs")


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
        source = SOURCES.get(self.source)
        if not source:
            hint = f"{nearest(self.source, SOURCES)}; your own goes as --text FILE --name NAME"
            yield {"source"}, f"source = {self.source!r}: no text is known by that name{hint}"
        elif self.text and self.source != "tales":
            yield {"source", "text"}, "source and text exclude each other; give one"
        elif self.from_ and len(self.from_) != len(source.books):
            titles = ", ".join(book.title for book in source.books)
            wanted = f"{len(source.books)} files" + f": {titles}" * bool(titles)
            yield {"from", "source"}, f"from: expected {wanted}; {len(self.from_)} given"
        if self.text and not self.name:
            yield {"text", "name"}, "name = none: a text of your own needs one; add --name NAME"
        if self.name is not None:
            taken = {"cache", *SOURCES} - ({self.source} if not self.text else set())
            if not re.fullmatch(r"\w[\w.-]*", self.name) or self.name in taken:
                rule = "expected letters, digits and _ . -, and not the name of a source or cache"
                yield {"name", "source", "text"}, f"name = {self.name!r}: {rule}"
        try:
            "".encode(self.encoding)
        except (LookupError, ValueError):
            rule = "Python knows no such text encoding; try utf-8, cp1252, gbk or utf-16"
            yield {"encoding"}, f"encoding = {self.encoding!r}: {rule}"

    def record(self) -> dict[str, object]:
        """What the result depends on besides the text."""
        names = ("encoding", "split", "val_fraction", "min_words", "seed")
        return {name: getattr(self, name) for name in names}


def main(argv: list[str]) -> None:
    """Prepares what the arguments ask for, or lists what there is."""
    chosen = resolve(PrepareSettings, argv, about=__doc__, positional="source")
    if chosen.list:
        print(*table(data_folder(chosen.data_dir)), sep="\n")
        return
    name = prepare(chosen).name
    config = {"tales": "fairy_tales_cpu", "fairy_tales": "fairy_tales"}.get(name)
    command = f"config/{config}.py" if config else f"config/fairy_tales_cpu.py --dataset {name}"
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
    starts = paragraph_starts(ids, tokenizer.characters, chosen.min_words)
    meta["split"] = chosen.split if len(starts) > 2 else "position"
    arrays = split(ids, starts, meta["split"], chosen.val_fraction, chosen.seed)
    del ids
    meta |= {"tokenizer": tokenizer.state(), "counts": count(arrays, tokenizer)}
    try:
        write(folder, meta, arrays)
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
        near = nearest(name_or_path, {*SOURCES, *prepared(data_folder(data_dir))})
        hint = f"{near}; python prepare.py --text FILE --name NAME makes one"
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


# ------------------------------------------------------------------------------- from texts to ids


def read_sources(chosen: PrepareSettings) -> tuple[bytes, list[dict]]:
    """All texts cleaned and joined, a blank line between, and what meta.json tells of each.

    Raises UserError with every file that cannot be used.
    """
    problems: list[str] = []
    texts, records = [], []
    for path, book in find_files(chosen, problems):
        try:
            text, record = read_text(path, chosen.encoding, book)
            texts.append(text)
            records.append(record)
        except (OSError, ValueError) as error:
            problems.append(f"{path}: {getattr(error, 'strerror', None) or error}")
    if problems:
        raise UserError("\n".join(problems))
    texts[:-1] = [text.rstrip(b"\n") for text in texts[:-1]]
    return b"\n\n".join(texts), records


def find_files(chosen: PrepareSettings, problems: list[str]) -> list[tuple[Path, Book | None]]:
    """The files to read, in order, each with the book that it should be; fetched if need be."""
    books = SOURCES[chosen.source].books
    if books:
        cache = data_folder(chosen.data_dir) / "cache"
        paths = chosen.from_ or [fetch(book, cache, chosen.offline) for book in books]
        return list(zip(map(Path, paths), books, strict=True))
    files: list[Path] = []
    for path in map(Path, chosen.text or [settings.ROOT / "data" / "tales"]):
        inside = sorted(path.glob("*.[tT][xX][tT]")) if path.is_dir() else [path]
        problems += [] if inside else [f"{path}: a folder without .txt files"]
        files += inside
    return [(file, None) for file in files]


def encode(text: bytes) -> tuple[CharTokenizer, np.ndarray]:
    """The tokenizer for text, and text as its ids, in the smallest integers that hold them."""
    seen, size = np.zeros(sys.maxunicode + 1, bool), 0
    for codes in code_points(text, "vocabulary"):
        seen[codes] = True
        size += len(codes)
    characters = np.flatnonzero(seen)
    table = np.zeros(len(seen), np.min_scalar_type(len(characters) - 1))  # code point to id
    table[characters] = np.arange(len(characters))
    ids, end = np.empty(size, table.dtype), 0
    for codes in code_points(text, "characters"):
        ids[end : end + len(codes)] = table.take(codes)  # quicker than table[codes]
        end += len(codes)
    return CharTokenizer(map(chr, characters)), ids


def code_points(text: bytes, task: str) -> Iterator[np.ndarray]:
    """A text as its characters' numbers in Unicode, some at a time, with a bar for the task."""
    count = -(-len(text) // BLOCK)
    for block in tqdm(blocks(text), task, count, delay=1, leave=False):
        yield np.frombuffer(block.encode("utf-32-le"), "<u4")


def paragraph_starts(ids: np.ndarray, characters: str, min_words: int) -> np.ndarray:
    """Where each paragraph starts, and where the last one ends.

    Lines are gathered until they have min_words words (as str.split counts them); the lines left
    over are the last paragraph, or the end of it if they are blank.
    """
    blank = np.array([character.isspace() for character in characters])
    newline = np.array([character == "\n" for character in characters])
    starts, words, wanted, between = [0], 0, min_words, True
    for start in tqdm(range(0, len(ids), BLOCK), "paragraphs", delay=1, leave=False):
        block = ids[start : start + BLOCK]
        blanks = blank.take(block)
        counts = words + np.cumsum(np.append(between, blanks[:-1]) & ~blanks)  # of words begun
        lines = np.flatnonzero(newline.take(block))
        totals, line = counts[lines].tolist(), 0
        while (line := bisect_left(totals, wanted, line)) < len(totals):
            starts.append(start + int(lines[line]) + 1)
            wanted = totals[line] + min_words
        words, between = int(counts[-1]), blanks[-1]
    if words == wanted - min_words:
        starts.pop()
    return np.array([*starts, len(ids)])


# ------------------------------------------------------------------------------- from ids to files


def split(
    ids: np.ndarray, starts: np.ndarray, how: str, val_fraction: float, seed: int
) -> dict[str, np.ndarray]:
    """The arrays of data/<name>/: for each split its ids, and where its paragraphs start and end.

    By position, the paragraph in which the validation text begins is divided.
    Raises UserError for a text of one character.
    """
    if len(ids) < 2:
        raise UserError("the text is one character long; to be split it needs two")
    if how == "position":
        first = np.clip(int(len(ids) * (1 - val_fraction)), 1, len(ids) - 1)
        starts = np.union1d(starts, [first])
        train, val = np.split(np.arange(len(starts) - 1), np.searchsorted(starts, [first]))
    else:
        order = np.random.default_rng(seed).permutation(len(starts) - 1)
        size = np.clip(round(len(order) * val_fraction), 1, len(order) - 1)
        val, train = np.split(order, [size])
    arrays = {}
    for name, order in (("train", train), ("val", val)):
        arrays[name], arrays[f"{name}_paragraphs"] = gather(ids, starts, order)
    return arrays


def gather(ids: np.ndarray, starts: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Those paragraphs of ids in that order, end to end; and their starts, with the last end."""
    new = np.concatenate(([0], np.cumsum(np.diff(starts)[order])))
    out = np.empty(new[-1], ids.dtype)
    for i, paragraph in enumerate(tqdm(order, "shuffling", delay=1, leave=False)):
        out[new[i] : new[i + 1]] = ids[starts[paragraph] : starts[paragraph + 1]]
    return out, new


def count(arrays: dict[str, np.ndarray], tokenizer: CharTokenizer) -> dict[str, int]:
    """How many characters, paragraphs and different characters there are, for meta.json."""
    counts = {"vocabulary": tokenizer.vocab_size}
    for name in ("train", "val"):
        counts[f"{name}_characters"] = len(arrays[name])
        counts[f"{name}_paragraphs"] = len(arrays[f"{name}_paragraphs"]) - 1
    for unit in ("characters", "paragraphs"):
        counts[unit] = counts[f"train_{unit}"] + counts[f"val_{unit}"]
    return counts


def write(folder: Path, meta: dict, arrays: dict[str, np.ndarray]) -> None:
    """Makes the files beside the folder, then moves them in, so that none is ever half-written.

    meta.json leaves first and comes last: a folder that has one is whole.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        built = Path(temporary)
        for name, array in arrays.items():
            np.save(built / f"{name}.npy", array)
        told = json.dumps(meta | {"fingerprint": fingerprint(built)}, ensure_ascii=False, indent=1)
        (built / "meta.json").write_text(told, "utf-8")
        for path in built.iterdir():
            with path.open("rb+") as file:
                os.fsync(file.fileno())  # on the disk, before it takes the place of another
        folder.mkdir(exist_ok=True)
        (folder / "meta.json").unlink(missing_ok=True)
        for path in (*built.glob("*.npy"), built / "meta.json"):
            os.replace(path, folder / path.name)


def fingerprint(folder: Path) -> str:
    """The sha256 of what is in the four arrays, one after another: two runs used the same text."""
    digest = hashlib.sha256()
    for name in ARRAYS:
        digest.update(np.load(folder / f"{name}.npy", mmap_mode="r"))
    return digest.hexdigest()


def is_prepared(folder: Path, wanted: dict) -> bool:
    """Whether the folder holds just this text, undamaged. Raises UserError if it holds another."""
    if not (meta := read_meta(folder)):
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
        meta = json.loads((folder / "meta.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return meta if isinstance(meta, dict) else {}


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
    made = prepared(data)
    for name in dict.fromkeys([*SOURCES, *made]):
        source = SOURCES.get(name, Source("a text of your own"))
        size = sum(book.characters for book in source.books)
        cached = all((data / "cache" / book.file).exists() for book in source.books)
        state = "in the cache" if cached else "to be fetched"
        if name == "tales":
            files = (settings.ROOT / "data" / "tales").glob("*.txt")
            size, state = sum(file.stat().st_size for file in files), "in the repository"
        if name in made:
            size, state = made[name]["counts"]["characters"], "prepared"
        yield f"{name:16} {size:>13,} characters  {state:17} {source.title}"


def prepared(data: Path) -> dict[str, dict]:
    """What meta.json says of each text that is prepared in that folder, by its name."""
    metas = {path.parent.name: read_meta(path.parent) for path in sorted(data.glob("*/meta.json"))}
    return {name: meta for name, meta in metas.items() if meta.get("format") == FORMAT}


def data_folder(data_dir: str | None) -> Path:
    """Where prepared texts lie."""
    return Path(data_dir) if data_dir else settings.ROOT / "data"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that this one may have been meant for, if there is one."""
    near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else ""


if __name__ == "__main__":
    run(main)
