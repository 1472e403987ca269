"""The command sample.py: what goes in, what comes out, and that it needs a checkpoint alone."""

import dataclasses
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY

import sample
import settings
from checkpoint import save_checkpoint
from generate import score, write
from model import ModelConfig, Transformer
from sample import Sample, unescaped
from settings import UserError
from tokenizer import CharTokenizer

CHARACTERS = "\n\t\\ -=10123Tabcdefghijklmnopqrstuvwxyzé春"


def make_checkpoint(path: Path, characters: str = CHARACTERS, block_size: int = 16) -> Path:
    """An untrained model with opinions, as a run would have saved it."""
    tokenizer = CharTokenizer(characters)
    config = ModelConfig(tokenizer.vocab_size, block_size, 2, 2, 16)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Transformer(config)
    model.head.weight.data.mul_(4)
    checkpoint = {"model": model.state_dict(), "model_config": dataclasses.asdict(config)}
    others = {"tokenizer": tokenizer.state(), "settings": {}, "step": 1234, "val_loss": 1.5}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(checkpoint | others, path)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("run") / "best.pt")


@pytest.fixture
def say(checkpoint, capsys):
    """Runs the command on the checkpoint; gives what it printed."""

    def say(*argv: str) -> str:
        sample.main(["--checkpoint", str(checkpoint), *argv])
        return capsys.readouterr().out

    return say


def short(*argv: str, tokens: int = 20) -> list[str]:
    return [*argv, "--max_new_tokens", str(tokens)]


class Terminal(io.StringIO):
    """Looks like a terminal, and remembers each piece."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


# ----------------------------------------------------------------------------------- the prompt


@pytest.mark.parametrize("start", ["a=b", "123", "T", "-1", "once\n", "none", r"a\n", "--", "-a-"])
def test_a_start_is_text(start, say):
    """Shells and option parsers like to make numbers, flags or line breaks of these."""
    for given in (["--start", start], [f"--start={start}"]):
        text = say(*given, *short())
        assert text.startswith(start) and len(text) == len(start) + 20 + 1


def test_the_same_command_gives_the_same_text(say):
    """The seed has a default, as in nanoGPT; another seed, another text."""
    first = say("--start", "once", *short())
    torch.rand(5)
    assert say("--start", "once", *short()) == first == say("--seed=1337", "--start=once", *short())
    assert say("--start", "once", "--seed", "1338", *short()) != first


def test_it_writes_what_the_library_writes(say, checkpoint):
    model, tokenizer, _ = sample.load_model(checkpoint)
    assert say("--start", "once", *short()) == f"once{write(model, tokenizer, 'once', 20, 1337)}\n"


def test_an_empty_start_is_a_new_line(say, tmp_path, capsys):
    """It is not printed, since nobody gave it; without one the first character stands in."""
    assert "\n" + say(*short()) == say("--start", "\n", *short())
    path = make_checkpoint(tmp_path / "best.pt", "abc")
    sample.main(["--checkpoint", str(path), *short()])
    assert len(capsys.readouterr().out) == 21


def test_start_from_a_file_or_standard_input(say, tmp_path, monkeypatch):
    r"""One final newline goes, \n stays as it is; a byte-order mark and CRLF are no text."""
    expected = say("--start", "once\n\\n\n", *short())
    path = tmp_path / "start.txt"
    for data in (b"once\n\\n\n\n", b"\xef\xbb\xbfonce\r\n\\n\r\n\r\n"):
        path.write_bytes(data)
        assert say("--start_file", str(path), *short()) == expected
    for given in (["--start", "-"], ["--start=-"], ["--start_file", "-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("once\n\\n\n\n"))
        assert say(*given, *short()) == expected


def test_escapes_only_on_request(say, tmp_path):
    assert unescaped(r"a\nb\t\\n\u6625\\") == "a\nb\t\\n春\\"
    typed = say("--start", r"a\n\u6625\\n", "--escapes", *short())
    assert typed == say("--start", "a\n春\\n", *short())
    path = tmp_path / "prompts.txt"
    path.write_text("a\\nb\nc\n", "utf-8")
    assert say("--prompts", str(path), "--escapes", *short()).startswith("a\nb")
    for wrong in (r"\x", "\\", r"\u12", "a\\\n"):
        with pytest.raises(UserError, match="is no escape"):
            unescaped(wrong)


def test_unknown_characters(say, capsys, checkpoint):
    """Listed, all of them; or left out, and said so."""
    with pytest.raises(UserError) as error:
        sample.main(["--checkpoint", str(checkpoint), "--start", "Hello World"])
    assert "'H', 'W'" in str(error.value) and "--unknown skip" in str(error.value)
    capsys.readouterr()
    sample.main(["--checkpoint", str(checkpoint), "--unknown=skip", "--start=Hello", *short()])
    output = capsys.readouterr()
    assert output.out.startswith("ello") and "skipped" in output.err and "'H'" in output.err
    assert say("--start", "HWX", "--unknown", "skip", *short()) == say(*short())


def test_a_long_start_works_with_a_note(say, checkpoint, capsys):
    """The model sees the end of it, and the text is printed whole."""
    start = "abcdefghij" * 4
    text = say("--start", start, *short())
    assert text.startswith(start)
    assert text.removeprefix(start) == say("--start", start[-16:], *short()).removeprefix(
        start[-16:]
    )
    sample.main(["--checkpoint", str(checkpoint), "--start", start, *short()])
    assert "40 characters: the model sees the last 16" in capsys.readouterr().err


def test_several_prompts_are_each_what_they_are_alone(say, tmp_path):
    """In one batch, though of unequal lengths, and past the context."""
    prompts = ["once", "a", "", "the longest of these prompts", "once"]
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(prompts) + "\n", "utf-8")
    texts = say("--prompts", str(path), *short(tokens=40)).removesuffix("\n").split("\n---\n")
    assert texts == [say("--start", prompt, *short(tokens=40))[:-1] for prompt in prompts]
    both = say("--prompts", str(path), "--num_samples", "2", *short()).count("\n---\n")
    assert both == 9


def test_samples_are_each_what_they_are_alone(say):
    """Sample 3 is the same among ten as by itself, at its own seed."""
    ten = say("--start=once", "--num_samples=10", *short()).removesuffix("\n").split("\n---\n")
    assert len(set(ten)) == 10
    for n in (0, 3, 9):
        assert say("--start=once", f"--seed={1337 + n}", *short()) == ten[n] + "\n"


# ------------------------------------------------------------------------------------ the output


def test_streamed_is_the_same_text(say, monkeypatch, checkpoint):
    """Character by character on a terminal; the start first, before anything is written."""
    expected = say("--start", "once", *short())
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    sample.main(["--checkpoint", str(checkpoint), "--start", "once", *short()])
    assert terminal.getvalue() == expected
    assert [piece for piece in terminal.pieces if piece] == ["once", *expected[4:]]


@pytest.mark.parametrize("argv", [["--num_samples", "2"], ["--json"]])
def test_several_texts_come_whole(argv, monkeypatch, checkpoint):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    sample.main(["--checkpoint", str(checkpoint), "--start", "once", *argv, *short()])
    assert max(map(len, terminal.pieces)) > 20


def feed(text: str, *stops: str) -> tuple[Sample, list[str]]:
    """A sample that was given a text, character by character, and what it showed of it."""
    given = Sample("", 0, stops)
    shown = []
    for character in text:
        shown.append(given.add(character, -1.0))
        if given.stopped:
            return given, shown
    return given, [*shown, given.show()]


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("aaab", ["aab"], "a"),
        ("ababac", ["abac"], "ab"),
        ("xyz", ["yz", "z"], "x"),
        ("xyz", ["xyzw", "y"], "x"),
        ("xyz", ["xyzw"], None),
        ("xyxyxy", ["xyz"], None),
        ("end", ["end"], ""),
        ("xyz", [], None),
    ],
)
def test_stop_strings(text, stops, expected):
    """Found where they overlap themselves, which matching that starts over misses; not shown.

    None: not found, and everything is shown in the end.
    """
    given, shown = feed(text, *stops)
    assert given.stopped == (expected is not None)
    assert given.text == "".join(shown) == (text if expected is None else expected)


def test_text_is_held_back_no_longer_than_it_must():
    _, shown = feed("abcabcabd", "abcabd")
    assert shown == [*[""] * 5, "abc", "", "", ""]
    _, shown = feed("abxab", "abc")
    assert shown == ["", "", "abx", "", "", "ab"]
    whole = Sample("", 0, ("cd",))
    assert whole.add("abcdef", -1.0) == "ab" and whole.stopped  # a token of several characters


def test_stop_in_the_command(say, monkeypatch, checkpoint):
    """What comes before the stop string, streamed or not; the others in the batch go on."""
    text = say("--start", "once", *short())[4:-1]
    stop = text[8:11]
    before = text[: text.index(stop)]
    assert say("--start=once", "--stop", "@@", stop, *short()) == f"once{before}\n"
    assert say("--start=once", "--stop=@@", f"--stop={stop}", *short()) == f"once{before}\n"
    two = say("--start=once", "--num_samples=2", "--stop", stop, *short()).split("\n---\n")
    assert two[0] == f"once{before}"
    assert two[1] == say("--start=once", "--seed=1338", "--stop", stop, *short())
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    sample.main(["--checkpoint", str(checkpoint), "--start=once", "--stop", stop, *short()])
    assert terminal.getvalue() == f"once{before}\n"


def test_json(say, checkpoint):
    """An object a line, with what is needed to get the same text again."""
    lines = say("--start=春a", "--num_samples=3", "--json", "--top_k=5", *short()).splitlines()
    records = [json.loads(line) for line in lines]
    assert "春" in lines[0]
    plain = say("--start=春a", "--num_samples=3", "--top_k=5", *short())
    assert "\n---\n".join(r["prompt"] + r["text"] for r in records) + "\n" == plain
    assert [record["seed"] for record in records] == [1337, 1338, 1339]
    model, tokenizer, _ = sample.load_model(checkpoint)
    for record in records:
        assert record["tokens"] == 20 and record["seconds"] > 0
        assert record["settings"]["top_k"] == 5 and record["settings"]["max_new_tokens"] == 20
    tokens = tokenizer.encode("春a" + records[0]["text"][:14])  # as far as the context reaches
    logits, _ = model(torch.tensor([tokens[:-1]]))
    chosen = logits[0].log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[1:]
    record = json.loads(say("--start=春a", "--json", "--top_k=5", *short(tokens=14)))
    assert record["mean_log_probability"] == pytest.approx(chosen.mean().item(), abs=1e-4)


def test_stopped_samples_in_json(say):
    text = json.loads(say("--start=once", "--json", *short()))["text"]
    record = json.loads(say("--start=once", "--json", "--stop", text[5:8], *short()))
    assert record["text"] == text[: text.index(text[5:8])] and record["tokens"] <= 8


def test_greedy_whatever_the_seed(say):
    texts = {say("--temperature=0", f"--seed={seed}", *short()) for seed in (1, 2, 3)}
    assert len(texts) == 1 and texts == {say("--top_k=1", *short())}


def test_every_control_matters(say):
    """A control that does nothing is worse than none."""
    plain = say(*short(tokens=40))
    for argv in (
        ["--temperature=2"], ["--top_k=2"], ["--top_p=0.3"], ["--min_p=0.5"],
        ["--repetition_penalty=3"], ["--exact"], ["--seed=1"], ["--max_new_tokens=39"],
    ):  # fmt: skip
        assert say(*short(tokens=40), *argv) != plain, argv


# ------------------------------------------------------------------------------- score, interactive


def test_score(say, tmp_path, checkpoint):
    model, tokenizer, _ = sample.load_model(checkpoint)
    text = "once there was a king\n" * 5
    path = tmp_path / "text.txt"
    path.write_text(text, "utf-8")
    expected = score(model, tokenizer.encode(text))
    record = json.loads(say("--score", str(path), "--json"))
    assert record["nats"] == pytest.approx(expected)
    assert record["bits"] == pytest.approx(expected / math.log(2))
    assert record["characters"] == len(text)
    assert f"{expected:.4f} nats" in say("--score", str(path))
    path.write_text("X" + text, "utf-8")
    assert f"{expected:.4f} nats" in say("--score", str(path), "--unknown", "skip")
    for wrong in ("", "a"):
        path.write_text(wrong, "utf-8")
        with pytest.raises(UserError, match="give a text of two or more"):
            say("--score", str(path))


def test_interactive(say, monkeypatch, capsys):
    """Each line is continued, again otherwise when asked again; an error does not end it."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("once\nHa\nonce\n"))
    first, again = say("--interactive", *short(tokens=200)), say("--start=once", *short(tokens=200))
    assert first.startswith(again)
    assert first.removeprefix(again) == say("--start=once", "--seed=1339", *short(tokens=200))


def test_interactive_ends_quietly(say, monkeypatch):
    def interrupted(mark):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert say("--interactive") == ""


# ------------------------------------------------------------------------------- errors and places


def test_the_newest_run_and_others(tmp_path, monkeypatch, capsys):
    """Which checkpoint it was, its step and its loss are said on standard error."""
    monkeypatch.setattr(settings, "ROOT", tmp_path)
    with pytest.raises(UserError, match="train one"):
        sample.main([])
    for age, name in enumerate(["new", "old"]):
        path = make_checkpoint(tmp_path / "out" / name / "best.pt")
        os.utime(path, (1e9 - age, 1e9 - age))
    for argv, name in (
        ([], "new"), (["--out_dir", str(tmp_path / "out" / "old")], "old"),
        (["--checkpoint", str(tmp_path / "out" / "old" / "best.pt")], "old"),
    ):  # fmt: skip
        sample.main([*argv, *short()])
        said = capsys.readouterr().err
        assert said == f"{tmp_path / 'out' / name / 'best.pt'}: step 1234, validation loss 1.5000\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--temperature", "-1"], "temperature = '-1'"),
        (["--temperature", "nan"], "temperature = 'nan'"),
        (["--temperature", "inf"], "temperature = 'inf'"),
        (["--top_k", "-1"], "top_k = '-1'"),
        (["--top_p", "0"], "top_p = '0'"),
        (["--top_p", "1.5"], "top_p = '1.5'"),
        (["--min_p", "1.1"], "min_p = '1.1'"),
        (["--repetition_penalty", "0"], "repetition_penalty = '0'"),
        (["--max_new_tokens", "0"], "max_new_tokens = '0'"),
        (["--num_samples", "0"], "num_samples = '0'"),
        (["--stop", ""], "stop = ''"),
        (["--start", "a", "--interactive"], "start and interactive exclude each other"),
        (["--prompts", "a", "--score", "b"], "prompts and score exclude each other"),
        (["--out_dir", "a", "--checkpoint", "b"], "out_dir and checkpoint exclude each other"),
        (["--device", "tpu9"], "device = 'tpu9'"),
        (["--start_file", "no/such/file"], "no/such/file: "),
        (["--start_file", "."], r"\.: "),
        (["--checkpoint", "no/such/file"], "no/such/file: "),
    ],
)
def test_clean_errors(argv, said, checkpoint):
    with pytest.raises(UserError, match=said):
        sample.main(argv if "--checkpoint" in argv else [*argv, "--checkpoint", str(checkpoint)])


@pytest.mark.parametrize(
    "argv", [["--temperature=1"], ["--top_k=1000"], ["--top_k=0"], ["--top_p=1"]]
)
def test_the_ends_of_the_ranges_switch_off(argv, say):
    assert say(*argv, *short()) == say(*short())


def test_text_that_is_not_utf8(say, tmp_path):
    path = tmp_path / "start.txt"
    path.write_bytes("one é".encode("cp1252"))
    with pytest.raises(UserError, match="byte 4 is not UTF-8"):
        say("--start_file", str(path))


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit):
        sample.main(["--help"])
    printed = capsys.readouterr().out
    for field in dataclasses.fields(sample.SampleSettings):
        assert f"--{field.name} " in printed
    assert max(map(len, printed.splitlines())) <= 120


# ------------------------------------------------------------------------------- in its own process


def command(*argv: str, **options) -> subprocess.CompletedProcess:
    """Runs the script itself."""
    program = [sys.executable, "-W", "error", str(REPOSITORY / "sample.py"), *argv]
    return subprocess.run(program, capture_output=True, timeout=120, **options)


def test_it_imports_what_generation_needs(checkpoint, tmp_path):
    """The first character comes soon: no plots, no data, no training. And from any folder."""
    program = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]); before = set(sys.modules); "
        "import sample; sample.main(sys.argv[2:]); print(*(set(sys.modules) - before))"
    )
    argv = [sys.executable, "-c", program, str(REPOSITORY), "--checkpoint", str(checkpoint)]
    done = subprocess.run([*argv, *short(tokens=1)], cwd=tmp_path, capture_output=True, check=True)
    modules = {name.partition(".")[0] for name in done.stdout.decode().splitlines()[-1].split()}
    needed = {"checkpoint", "device", "generate", "model", "sample", "settings", "tokenizer"}
    assert modules - sys.stdlib_module_names - {"torch", "filelock"} == needed
    assert "readline" not in modules


def test_in_the_c_locale(checkpoint, tmp_path):
    """A Chinese start, piped, where Python would take ASCII for the encoding."""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    argv = ["--checkpoint", str(checkpoint), "--start", "春é", *short()]
    done = command(*argv, cwd=tmp_path, env=os.environ | plain)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("utf-8").startswith("春é")


def test_a_reader_that_leaves(checkpoint):
    """`sample.py | head -c 1` ends without a word about the pipe."""
    program = [sys.executable, str(REPOSITORY / "sample.py"), "--checkpoint", str(checkpoint)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*program, "--max_new_tokens", "200"], **pipes) as process:
        process.stdout.close()
        assert process.stderr.read().count(b"\n") == 1
        assert process.wait() == 0


def test_an_error_is_one_line(checkpoint):
    """Exit code 2, the thing and what to do, no traceback."""
    done = command("--checkpoint", str(checkpoint), "--start", "Hello")
    *_, last = done.stderr.decode().splitlines()
    assert done.returncode == 2 and b"Traceback" not in done.stderr and done.stdout == b""
    assert last.startswith("sample.py: ") and "'H'" in last
