"""prepare.py: texts read, cut into paragraphs, split and stored; its command line."""

import errno
import hashlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import prepare
import settings
import sources
from prepare import PrepareSettings, ensure_dataset
from settings import UserError, resolve
from sources import Book, Source
from tokenizer import load_tokenizer

STORY = "".join(f"Line {i} of a tale about a fox, a well and a lantern.\n" for i in range(300))


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """A repository of its own for each test, with two tales; no proxy, no waiting for the disk."""
    tales = tmp_path / "root" / "data" / "tales"
    tales.mkdir(parents=True)
    (tales / "b.txt").write_text("The Bee\n\n" + STORY, "utf-8")
    (tales / "a.txt").write_text("The Ant\n\n" + STORY, "utf-8")
    monkeypatch.setattr(settings, "ROOT", tmp_path / "root")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(os, "fsync", lambda file: None)
    return tmp_path / "root"


def make(tmp_path: Path, *texts: str | bytes, **chosen) -> Path:
    """Prepares texts as files of one's own, in the order given."""
    files = []
    for i, text in enumerate(texts):
        files.append(tmp_path / f"{i}.txt")
        files[-1].write_bytes(text if isinstance(text, bytes) else text.encode())
    chosen = {"name": "mine", "data_dir": str(tmp_path / "data")} | chosen
    return prepare.prepare(PrepareSettings(text=tuple(map(str, files)), **chosen))


def stored(folder: Path) -> tuple[dict[str, list[str]], dict]:
    """The paragraphs of each split as text, and meta.json."""
    meta = json.loads((folder / "meta.json").read_text("utf-8"))
    decode = load_tokenizer(meta["tokenizer"]).decode
    paragraphs = {}
    for name in ("train", "val"):
        ids, starts = np.load(folder / f"{name}.npy"), np.load(folder / f"{name}_paragraphs.npy")
        assert starts.dtype == np.int64
        assert (starts[0], starts[-1]) == (0, len(ids))
        paragraphs[name] = [decode(ids[a:b]) for a, b in pairwise(starts)]
    return paragraphs, meta


def text_of(folder: Path) -> str:
    """What was prepared, split by position, as one text again."""
    paragraphs, _ = stored(folder)
    return "".join(paragraphs["train"] + paragraphs["val"])


# ------------------------------------------------------------------------------- paragraphs


def plain_paragraphs(text: str, min_words: int) -> list[str]:
    """The rule, written plainly."""
    paragraphs, gathered = [], ""
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        gathered += line
        if gathered.endswith("\n") and len(gathered.split()) >= min_words:
            paragraphs.append(gathered)
            gathered = ""
    if gathered.strip() or not paragraphs:
        paragraphs.append(gathered)
    else:
        paragraphs[-1] += gathered
    return paragraphs


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    "letters", ["ab \n", "a \n\n\n", "春眠不\n", "a\xa0\u3000\x1c\x85\u2028\v\f\n ", "𝄞é \n", "ab "]
)
def test_paragraphs_are_those_of_the_plain_rule(monkeypatch, block, letters):
    """And its ids are those of its characters, in however many blocks they are found."""
    monkeypatch.setattr(prepare, "BLOCK", block)
    monkeypatch.setattr(sources, "BLOCK", block)
    for seed in range(30):
        choose = random.Random(seed)
        text = "x" + "".join(choose.choices(letters, k=choose.randrange(200)))
        min_words = choose.choice([1, 2, 3, 10])
        tokenizer, ids = prepare.encode(text.encode())
        assert tokenizer.decode(ids) == text
        assert tokenizer.characters == "".join(sorted(set(text)))
        starts = prepare.paragraph_starts(ids, tokenizer.characters, min_words).tolist()
        found = [text[a:b] for a, b in pairwise(starts)]
        assert found == plain_paragraphs(text, min_words)


@pytest.mark.parametrize(
    "count, dtype", [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)]
)
def test_ids_are_in_the_smallest_type_that_holds_them(count, dtype):
    text = "".join(map(chr, range(0x10000, 0x10000 + count)))
    tokenizer, ids = prepare.encode(text.encode())
    assert ids.dtype == dtype
    assert ids.tolist() == list(range(count))
    assert tokenizer.vocab_size == count


def test_split_holds_each_paragraph_once_in_shuffled_order(tmp_path):
    """Validation is not the end of the book, and nothing is lost or doubled."""
    folder = make(tmp_path, STORY, min_words=10)
    paragraphs, meta = stored(folder)
    lines = STORY.splitlines(keepends=True)
    assert sorted(paragraphs["train"] + paragraphs["val"]) == sorted(lines)
    assert len(paragraphs["val"]) == 30
    assert paragraphs["train"] != [line for line in lines if line in paragraphs["train"]]
    assert paragraphs["val"] != lines[270:]
    assert meta["counts"] == {
        "vocabulary": len(set(STORY)),
        "characters": len(STORY),
        "paragraphs": 300,
        "train_characters": len("".join(paragraphs["train"])),
        "train_paragraphs": 270,
        "val_characters": len("".join(paragraphs["val"])),
        "val_paragraphs": 30,
    }


def test_seed_and_fraction_decide_the_split(tmp_path):
    def val(**chosen):
        return stored(make(tmp_path, STORY, overwrite=True, min_words=10, **chosen))[0]["val"]

    assert val() == val() != val(seed=2)
    assert len(val(val_fraction=0.5)) == 150
    assert len(val(val_fraction=0.999)) == 299  # at least one paragraph to train on
    assert len(val(val_fraction=0.001)) == 1  # and one to validate


def test_position_split_keeps_the_order(tmp_path):
    """The last tenth validates, to the character, though it begins within a paragraph."""
    folder = make(tmp_path, STORY, split="position")
    paragraphs, meta = stored(folder)
    first = len(STORY) * 9 // 10
    assert "".join(paragraphs["train"]) == STORY[:first]
    assert "".join(paragraphs["val"]) == STORY[first:]
    assert len(paragraphs["train"]) > 10
    assert meta["split"] == "position"


def test_one_paragraph_is_split_by_position(tmp_path, capsys):
    """A text without line ends has no paragraphs to choose from."""
    folder = make(tmp_path, "to be or not to be " * 100)
    paragraphs, _ = stored(folder)
    assert len(paragraphs["train"][0]) == 1710
    assert len(paragraphs["val"][0]) == 190
    assert "one paragraph only" in capsys.readouterr().out


def test_shortest_text(tmp_path):
    assert stored(make(tmp_path, "ab"))[0] == {"train": ["a"], "val": ["b"]}
    with pytest.raises(UserError, match="one character"):
        make(tmp_path, "a", name="short")


# ------------------------------------------------------------------------------- reading


def test_byte_order_mark_and_line_ends_make_no_difference(tmp_path):
    """Otherwise the same book from Windows has another vocabulary and other ids."""
    text = "Es war einmal ein König.\n\nDer schlief.\n" * 30
    plain = make(tmp_path, text, name="plain")
    marked = make(tmp_path, b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(), name="marked")
    mac = make(tmp_path, text.replace("\n", "\r"), name="mac")
    for folder in (marked, mac):
        for path in plain.glob("*.npy"):
            assert (folder / path.name).read_bytes() == path.read_bytes()
        assert stored(folder)[1]["fingerprint"] == stored(plain)[1]["fingerprint"]
        assert stored(folder)[1]["tokenizer"] == stored(plain)[1]["tokenizer"]


def test_characters_are_left_as_they_are(tmp_path):
    """Two ways to write an umlaut are two ways to write it; a newline is the only line end."""
    text = "a\u0308 ä \u2028 \x0c \x85 \u200b\n" * 20
    assert text_of(make(tmp_path, text, split="position")) == text


@pytest.mark.parametrize(
    "data, encoding, message",
    [
        (
            "Schöne Mär\n".encode("cp1252") * 9,
            "cp1252",
            "byte 3 (f6) is not utf-8.*--encoding cp12",
        ),
        ("春眠不觉晓\n".encode("gbk") * 9, "gbk", "byte 0 .* is not utf-8.*gbk"),
        ("A tale\n".encode("utf-16") * 1, "utf-16", "byte 0 .ff. is not utf-8.*--encoding utf-16"),
        ("A tale\n".encode("utf-16-le"), "utf-16-le", "a zero at character 1.*utf-16-le"),
    ],
)
def test_wrong_encoding_is_told_with_the_byte_and_the_way_out(tmp_path, data, encoding, message):
    with pytest.raises(UserError, match=rf"0\.txt: {message}".replace("(f6)", r"\(f6\)")):
        make(tmp_path, data)
    assert not (tmp_path / "data").exists()
    folder = make(tmp_path, data, encoding=encoding, split="position")
    assert text_of(folder) == data.decode(encoding)


def test_all_unusable_files_are_told_at_once_and_nothing_is_written(tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "blank.txt").write_bytes(b"\xef\xbb\xbf \r\n\t\n")
    (tmp_path / "binary.txt").write_bytes(b"\x7fELF\x80")
    names = ("none", "empty.txt", "blank.txt", "binary.txt", "missing.txt")
    text = tuple(str(tmp_path / name) for name in names)
    chosen = PrepareSettings(text=text, name="x", data_dir=str(tmp_path / "data"))
    with pytest.raises(UserError) as error:
        prepare.prepare(chosen)
    lines = str(error.value).splitlines()
    assert len(lines) == 5
    assert all(sum(str(tmp_path / name) in line for line in lines) == 1 for name in names)
    assert not (tmp_path / "data").exists()


def test_files_are_joined_in_the_order_given_folders_by_name(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    names = [f"{i}.{'TXT' if i % 2 else 'txt'}" for i in range(30)]
    for name in reversed(names):
        (folder / name).write_text(f"\n{name}\n\n\n", "utf-8")
    (folder / "note.md").write_text("no", "utf-8")
    (tmp_path / "z.text").write_text("first", "utf-8")
    text = (str(tmp_path / "z.text"), str(folder))
    data_dir = str(tmp_path / "data")
    made = prepare.prepare(
        PrepareSettings(text=text, name="x", data_dir=data_dir, split="position")
    )
    assert text_of(made) == "first\n\n\n" + "\n\n\n".join(sorted(names)) + "\n\n\n"
    assert [source["name"] for source in stored(made)[1]["sources"]] == ["z.text", *sorted(names)]


def test_meta_tells_of_each_source(tmp_path):
    data = b"*** START OF THE PROJECT GUTENBERG EBOOK X ***\r\n\r\nA tale.\r\n"
    _, meta = stored(make(tmp_path, data, STORY))
    cut = {"cut": ["47 characters of header"], "characters": 8, "name": "0.txt"}
    assert meta["sources"][0] == cut | {"sha256": hashlib.sha256(data).hexdigest()}
    assert meta["sources"][1]["cut"] == []
    assert (meta["format"], meta["name"]) == (1, "mine")


@pytest.mark.parametrize("line", ['"Deep is the well," said the fox.\n', "“Deep,” it said.\r\n"])
@pytest.mark.parametrize("books", [1, 2])
def test_memory_stays_below_three_times_the_file(tmp_path, line, books):
    """Kept as a str, a text with curly quotes took six times its size."""
    begin, end = (f"*** {word} OF THE PROJECT GUTENBERG EBOOK ***\n" for word in ("START", "END"))
    book = begin + line * (6_000_000 // len(line.encode()) // books) + end
    text = (book * books).encode()
    tracemalloc.start()
    make(tmp_path, text, min_words=500)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.8 * len(text)


# ------------------------------------------------------------------------------- real texts


def test_shakespeare_is_split_as_nanogpt_does(texts, tmp_path):
    """1,003,854 characters to train on and 111,540 to validate on, for comparison."""
    chosen = PrepareSettings(
        source="shakespeare", from_=(str(texts / "tinyshakespeare.txt"),), split="position"
    )
    counts = stored(prepare.prepare(chosen))[1]["counts"]
    assert counts["vocabulary"] == 65
    assert (counts["train_characters"], counts["val_characters"]) == (1003854, 111540)


def test_books_from_files_are_checked(texts, tmp_path):
    """Swapped, they would still train; a run would not be comparable with any other."""
    books = [str(texts / name) for name in ("pg2591_grimm.txt", "pg27200_andersen.txt")]
    folder = prepare.prepare(PrepareSettings(source="fairy_tales", from_=tuple(books)))
    counts = stored(folder)[1]["counts"]
    assert (counts["characters"], counts["vocabulary"]) == (2516805, 80)
    with pytest.raises(UserError) as error:
        prepare.prepare(PrepareSettings(source="fairy_tales", from_=tuple(books[::-1])))
    assert len(str(error.value).splitlines()) == 2
    with pytest.raises(UserError, match="not tiny Shakespeare"):
        prepare.prepare(PrepareSettings(source="shakespeare", from_=(books[0],)))
    text = (texts / "tinyshakespeare.txt").read_text("utf-8")
    (tmp_path / "changed.txt").write_text(
        text.replace("hear me speak", "hear me Speak", 1), "utf-8"
    )
    with pytest.raises(UserError, match="1,115,394 characters differ"):
        prepare.prepare(
            PrepareSettings(source="shakespeare", from_=(str(tmp_path / "changed.txt"),))
        )


# ------------------------------------------------------------------------------- once and again


def ages(folder: Path) -> list[int]:
    return [path.stat().st_mtime_ns for path in sorted(folder.iterdir())]


def test_the_same_again_changes_nothing(tmp_path, capsys):
    folder = make(tmp_path, STORY)
    before = ages(folder)
    capsys.readouterr()
    assert make(tmp_path, STORY) == folder
    assert "left as it is" in capsys.readouterr().out
    assert ages(folder) == before


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"min_words": 7}, {"split": "position"}, {"val_fraction": 0.2}, {}]
)
def test_another_text_or_setting_is_refused_until_one_insists(tmp_path, change):
    """A run may have been trained on what is there."""
    folder = make(tmp_path, STORY)
    before, fingerprint = ages(folder), stored(folder)[1]["fingerprint"]
    text = STORY if change else STORY + "More."
    with pytest.raises(UserError, match=f"other {next(iter(change), 'sources')}; .*--overwrite"):
        make(tmp_path, text, **change)
    assert ages(folder) == before
    make(tmp_path, text, overwrite=True, **change)
    assert stored(folder)[1]["fingerprint"] != fingerprint


@pytest.mark.parametrize("name", [*(f"{name}.npy" for name in prepare.ARRAYS), "meta.json"])
@pytest.mark.parametrize(
    "damage",
    [Path.unlink, lambda path: os.truncate(path, 50), lambda path: path.write_text("[]", "utf-8")],
)
def test_damaged_folder_is_made_anew(tmp_path, name, damage):
    """train.py sends the user here for it; "prepared already" would be no help."""
    folder = make(tmp_path, STORY)
    before = stored(folder)
    damage(folder / name)
    make(tmp_path, STORY)
    assert stored(folder) == before


def test_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    folder = make(tmp_path, STORY)
    before, files = ages(folder), sorted((tmp_path / "data").iterdir())

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(UserError, match="mine: No space left"):
        make(tmp_path, STORY + "More.", overwrite=True)
    assert ages(folder) == before
    with pytest.raises(UserError, match="other: No space left"):
        make(tmp_path, STORY, name="other")
    assert sorted((tmp_path / "data").iterdir()) == files


@pytest.mark.parametrize("moves", range(5))
def test_interrupted_move_leaves_a_folder_that_does_not_count(tmp_path, monkeypatch, moves):
    """meta.json goes first and comes last, so new and old arrays are never used together."""
    folder = make(tmp_path, STORY)
    move, left = os.replace, iter(range(moves))

    def interrupted(source, target):
        if next(left, None) is None:
            raise KeyboardInterrupt
        move(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, STORY + "More.", overwrite=True)
    assert not (folder / "meta.json").exists()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["mine"]


# ------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    "argv, messages",
    [
        ("fairy_tale", [r"source = 'fairy_tale'.*\(did you mean fairy_tales\?\)"]),
        ("book.txt", ["source = 'book.txt'.*--text FILE --name NAME"]),
        ("--text a.txt", ["name = none: .*--name NAME"]),
        ("shakespeare --text a.txt --name x", ["source and text exclude each other"]),
        ("--text a.txt --name tales", ["name = 'tales'"]),
        ("--text a.txt --name cache", ["name = 'cache'"]),
        ("--text a.txt --name ../x", ["name = '../x'"]),
        ("shakespeare --name fairy_tales", ["name = 'fairy_tales'"]),
        ("fairy_tales --from a.txt", ["from: expected 2 files: Grimm.*; 1 given"]),
        ("--from a.txt", ["from: expected 0 files; 1 given"]),
        ("--encoding utf-99 --val_fraction 1", ["val_fraction = '1'", "encoding = 'utf-99'"]),
        ("--encoding hex", ["encoding = 'hex'"]),
    ],
)
def test_command_line_mistakes_are_told_before_anything_is_read(argv, messages):
    with pytest.raises(UserError) as error:
        resolve(PrepareSettings, argv.split(), about="", positional="source")
    lines = str(error.value).splitlines()
    assert len(lines) == len(messages)
    assert all(re.match(m, line) for m, line in zip(messages, lines, strict=True)), lines


def test_main_prepares_the_tales_and_tells_how_to_go_on(root, capsys):
    prepare.main([])
    out = capsys.readouterr().out
    assert "tales: 2 files" in out
    assert "next: python train.py config/fairy_tales_cpu.py\n" in out
    assert text_of(root / "data" / "tales").count("The Ant") == 1
    assert sorted(p.suffix for p in (root / "data" / "tales").iterdir()).count(".txt") == 2


def test_list_shows_what_is_known_cached_and_prepared_without_a_network(tmp_path, capsys, root):
    data = root / "data"
    (data / "cache").mkdir()
    (data / "cache" / "shakespeare.txt").write_text("anything", "utf-8")
    make(tmp_path, STORY, data_dir=None)
    capsys.readouterr()
    prepare.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["tales", "fairy_tales", "shakespeare", "mine"]
    states = ["in the repository", "to be fetched", "in the cache", "prepared"]
    assert all(state in line for state, line in zip(states, lines, strict=True))
    assert f"{len(STORY):,} characters" in lines[3]


def test_importing_loads_no_torch():
    """It takes two seconds, and preparing a text needs none of it."""
    command = "import sys, prepare; sys.exit('torch' in sys.modules)"
    folder = Path(prepare.__file__).parent
    assert subprocess.run([sys.executable, "-c", command], cwd=folder).returncode == 0


# ------------------------------------------------------------------------------- for train.py


def test_known_dataset_is_prepared_when_missing(root):
    folder, message = ensure_dataset("tales", None, offline=False)
    assert (folder, message) == (root / "data" / "tales", None)
    before = ages(folder)
    assert ensure_dataset("tales", None, offline=False) == (folder, None)
    assert ages(folder) == before


def test_dataset_is_found_by_name_and_by_path(tmp_path):
    folder = make(tmp_path, STORY)
    assert ensure_dataset("mine", str(tmp_path / "data"), offline=True) == (folder, None)
    assert ensure_dataset(str(folder), None, offline=True) == (folder, None)


def test_unknown_dataset_is_told_with_the_nearest(tmp_path):
    make(tmp_path, STORY)
    with pytest.raises(
        UserError, match=r"dataset = 'mime'.*did you mean mine\?.*prepare.py --text"
    ):
        ensure_dataset("mime", str(tmp_path / "data"), offline=False)


def test_offline_fairy_tales_fall_back_on_the_tales(root):
    folder, message = ensure_dataset("fairy_tales", None, offline=True)
    assert folder == root / "data" / "tales"
    assert "\n" not in message
    for part in ("fairy_tales", "offline is set", "python prepare.py fairy_tales --from"):
        assert part in message
    with pytest.raises(UserError, match=r"tiny Shakespeare.*offline is set"):
        ensure_dataset("shakespeare", None, offline=True)


def use_addresses(monkeypatch, *addresses: str) -> None:
    """Points fairy_tales at one made-up book with these addresses."""
    book = Book("fox.txt", "The Fox", len(STORY), "a tale about a fox", addresses)
    monkeypatch.setitem(prepare.SOURCES, "fairy_tales", Source("a fox", (book,)))


def test_book_in_the_cache_needs_no_network(root, monkeypatch):
    use_addresses(monkeypatch)
    (root / "data" / "cache").mkdir()
    (root / "data" / "cache" / "fox.txt").write_text(STORY, "utf-8")
    folder, message = ensure_dataset("fairy_tales", None, offline=True)
    assert (folder, message) == (root / "data" / "fairy_tales", None)
    assert stored(folder)[1]["sources"][0]["name"] == "fox.txt"


def test_book_from_a_file_is_not_fetched_but_checked(tmp_path, monkeypatch):
    use_addresses(monkeypatch)
    (tmp_path / "a.txt").write_text(STORY, "utf-8")
    (tmp_path / "b.txt").write_text(STORY.replace("fox", "cat"), "utf-8")
    right, wrong = (
        PrepareSettings(source="fairy_tales", from_=(str(tmp_path / name),), split="position")
        for name in ("a.txt", "b.txt")
    )
    assert text_of(prepare.prepare(right)) == STORY
    with pytest.raises(UserError, match=r"b\.txt: not The Fox"):
        prepare.prepare(wrong)


def test_without_a_network_it_gives_up_at_once(monkeypatch, root):
    """train.py must start within seconds: no second try, no pause where no one can be reached."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    use_addresses(monkeypatch, f"http://127.0.0.1:{port}/a", "http://no-such-host.invalid/b")
    tries = []
    monkeypatch.setattr(time, "sleep", tries.append)
    folder, message = ensure_dataset("fairy_tales", None, offline=False)
    assert folder == root / "data" / "tales"
    assert not (root / "data" / "fairy_tales").exists()
    assert tries == [0, 0]
    assert f"http://127.0.0.1:{port}/a: Connection refused" in message
    assert "http://no-such-host.invalid/b: " in message
