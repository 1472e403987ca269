"""What users of repositories of this kind run into, from the outside: whole commands.

README.md beside this file lists all 34 cases with their tests; most are tests of one module, and
here are those that take several.
"""

import hashlib
import io
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, TINY

import prepare
import sample
import train
from checkpoint import load_checkpoint
from settings import UserError, run


def contents(folder):
    """What lies below a folder, each file as a hash."""
    return {
        str(path.relative_to(folder)): path.is_file()
        and hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
    }


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a script's main as the shell would, in this process; gives code, output and errors."""
    monkeypatch.setattr(train, "loss_curves", lambda *_: None)  # takes longer than all the rest

    def command(main, *argv):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", [f"{main.__module__}.py", *map(str, argv)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        with pytest.raises(SystemExit) as ended:
            run(main)
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return command


# ------------------------------------------------------------------------- mistakes

MISTAKES = [  # what is wrong, and what the line says
    ("--n_embd 32 --n_head 3", "n_head = 3 does not divide n_embd = 32; these would: 1, 2, 4"),
    ("--n_embd 6 --position rope", "position = 'rope' turns pairs, and n_embd = 6 by n_head = 2"),
    ("--eval_interval 0", "eval_interval = '0': expected a whole number"),
    ("--warmup_iters 13", "warmup_iters = 13 is over max_iters = 12"),
    ("--dropout 1.5", "dropout = '1.5': expected a number"),
    ("--batch_size 0", "batch_size = '0': expected a whole number"),
    ("--n_haed 4", "n_haed: there is no such setting; did you mean n_head?"),
    ("--device cuda:77", "device = 'cuda:77': this machine has "),
    ("--device gpu", "device = 'gpu': expected auto, cpu, cuda, cuda:N or mps"),
    ("--dataset paeg", "dataset = 'paeg': no text of that name is prepared (did you mean page?)"),
    ("--block_size 300", "the validation split has 280 tokens, and block_size = 300"),
    ("--resume", "last.pt: no such file; expected a checkpoint"),
    ("{tmp}/none.py", "none.py: No such file"),
    ("{tmp}/wrong.py", "lerning_rate ({tmp}/wrong.py): there is no such setting; did you mean lea"),
    ("{tmp}/wrong.py", "n_layer = 'two' ({tmp}/wrong.py): expected a whole number"),
    ("{tmp}/wrong.py", "beta1 = 1 ({tmp}/wrong.py): expected a number"),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES)
def test_a_mistake_is_a_line_and_2(command, data_dir, tmp_path, argv, message):
    """No traceback; no folder is made; the last line is about it."""
    text = "lerning_rate = 0.1\nn_layer = 'two'\nbeta1 = 1\n"
    (tmp_path / "wrong.py").write_text(text, "utf-8")
    before = contents(tmp_path)
    places = ["--data_dir", data_dir, "--out_dir", tmp_path / "run"]
    code, out, err = command(train.main, *TINY, *places, *argv.format(tmp=tmp_path).split())
    assert (code, out) == (2, "")
    assert all(line.startswith("train.py: ") for line in err.splitlines())
    assert any(message.format(tmp=tmp_path) in line for line in err.splitlines())
    assert contents(tmp_path) == before


def test_mistakes_are_told_before_data_is_read(command, tmp_path):
    """All of them, each in a line, though there is no text at all."""
    argv = "--n_embd 32 --n_head 3 --eval_interval 0 --dropout 1.5 --batch_size 0"
    places = ["--dataset", "none", "--data_dir", tmp_path, "--out_dir", tmp_path / "run"]
    code, _, err = command(train.main, *argv.split(), *places)
    assert code == 2 and len(err.splitlines()) == 4 and "none" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("main", "argv"),
    [
        (train.main, ["--dataset", "page", "--out_dir", "{text}"]),
        (train.main, ["--dataset", "{text}", "--out_dir", "{tmp}/run"]),
        (train.main, ["{text}"]),
        (sample.main, ["--checkpoint", "{text}"]),
        (sample.main, ["--start_file", "{text}"]),
        (prepare.main, ["--text", "{text}", "--name", "page", "--data_dir", "{tmp}"]),
        (prepare.main, ["--text", "{tmp}/a.txt", "--name", "x{text}", "--data_dir", "{tmp}"]),
    ],
)
def test_a_text_in_the_place_of_a_path(command, data_dir, tmp_path, main, argv):
    """Longer than any name of a file may be; to ask whether it exists is an error of its own."""
    (tmp_path / "a.txt").write_text("a text", "utf-8")
    before = contents(tmp_path)
    argv = [text.format(text="Once" * 100, tmp=tmp_path) for text in argv]
    places = ["--data_dir", data_dir] if main is train.main else []
    code, _, err = command(main, *places, *argv)
    assert code == 2 and "Traceback" not in err and contents(tmp_path) == before


@pytest.mark.parametrize(
    "meta", ["", "[]", "null", "{}", '{"format": 1}', '{"format": 1, "tokenizer": []}']
)
def test_a_damaged_text_is_a_line_that_says_to_prepare_it(
    command, prepare_text, tale, tmp_path, meta
):
    """Written by hand, by another program or cut off: no traceback from inside, nothing made."""
    (prepare_text(tale[:1500], "page", tmp_path) / "page" / "meta.json").write_text(meta, "utf-8")
    before = contents(tmp_path)
    argv = [*TINY, "--data_dir", tmp_path, "--out_dir", tmp_path / "run"]
    code, _, err = command(train.main, *argv)
    assert code == 2 and len(err.splitlines()) == 1 and "prepare it: python prepare.py" in err
    assert contents(tmp_path) == before


def test_an_error_of_the_system_that_names_no_file_keeps_its_traceback(monkeypatch):
    """It is none of the user's making, as far as one can tell."""

    def main(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(OSError, match="Input/output error"):
        run(main)


OPTIMIZED = """
import contextlib, io, sys
import train
from settings import UserError
assert False, "asserts hold: this is not python -O"
for argv in sys.stdin.read().splitlines():
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train.main([*sys.argv[1:], *argv.split()])
        print("accepted", argv)
    except UserError as error:
        print("refused")
"""


def test_checks_hold_without_asserts(data_dir, tmp_path):
    """python -O takes every assert out of the program."""
    argv = [*TINY, "--data_dir", data_dir, "--out_dir", tmp_path / "run"]
    mistakes = [argv for argv, _ in MISTAKES if "{" not in argv]
    ended = subprocess.run(
        [sys.executable, "-O", "-c", OPTIMIZED, *map(str, argv)],
        input="\n".join(mistakes), text=True, capture_output=True, cwd=REPOSITORY, timeout=60,
    )  # fmt: skip
    assert ended.stderr == "" and ended.stdout.split("\n") == ["refused"] * len(mistakes) + [""]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("length", [65, 66, 320])
def test_the_shortest_text_that_can_be_trained_on(command, prepare_text, tmp_path, tale, length):
    """block_size + 1 characters in each split are enough, one fewer in either is told."""
    text, where = tale.replace("\n", " ")[:length], tmp_path / "text.txt"
    where.write_text(text, "utf-8")
    prepared = ["--text", where, "--name", "page", "--data_dir", tmp_path, "--val_fraction", "0.5"]
    assert command(prepare.main, *prepared)[0] == 0
    argv = [*TINY, "--max_iters", "1", "--data_dir", tmp_path, "--out_dir", tmp_path / "run"]
    code, _, err = command(train.main, *argv)
    if length == 65:
        assert code == 2 and not (tmp_path / "run").exists()
        assert err.startswith("train.py: the training split has 32 tokens, and block_size = 32")
        assert "at least 33: lower block_size to at most 31" in err
    else:
        assert (code, err) == (0, "")


def test_a_validation_part_that_alone_is_too_short(command, tmp_path, tale):
    """The rest of the text may be as long as it likes."""
    (tmp_path / "text.txt").write_text(tale.replace("\n", " ")[:319], "utf-8")
    prepared = ["--text", tmp_path / "text.txt", "--name", "page", "--data_dir", tmp_path]
    assert command(prepare.main, *prepared)[0] == 0
    argv = [*TINY, "--data_dir", tmp_path, "--out_dir", tmp_path / "run"]
    code, _, err = command(train.main, *argv)
    assert code == 2 and len(err.splitlines()) == 1
    assert "the validation split has 32 tokens" in err and "at least 33" in err


# ------------------------------------------------------------------------- the life of a run


def written(command, *argv):
    """What sample.py writes, with its notes left out."""
    code, out, err = command(sample.main, *argv, "--max_new_tokens", "20", "--start", "the ")
    assert code == 0, err
    return out


def test_a_run_outlives_its_text(command, tiny, prepare_text, tale, tmp_path):
    """Another text in its place, or none; the checkpoint elsewhere: it samples as before.

    Going on with it is refused as long as the text is another, and works when it is back.
    """
    data, folder = prepare_text(tale[:1500], "page"), tmp_path / "run"
    tiny(folder, "--data_dir", str(data), "--max_iters", "2")
    text = written(command, "--out_dir", folder)
    moved = (data / "page").rename(tmp_path / "away")
    assert written(command, "--out_dir", folder) == text
    prepare_text("ΑΒΓΔ ΕΖΗΘ\n" * 150, "page", data)
    assert written(command, "--out_dir", folder) == text
    before = contents(folder)
    more = ["--data_dir", data, "--out_dir", folder, "--resume", "--max_iters", "3"]
    code, _, err = command(train.main, *more)
    assert (code, contents(folder)) == (2, before) and "Traceback" not in err
    assert "not the text that the run was trained on so far" in err.splitlines()[-1]
    elsewhere = (folder / "best.pt").rename(tmp_path / "mine.pt")
    assert written(command, "--checkpoint", elsewhere) == text
    (data / "page").rename(tmp_path / "other")
    moved.rename(data / "page")
    assert command(train.main, *more)[0] == 0


def test_a_run_stopped_before_its_first_update(command, tiny, tmp_path):
    """Ctrl-C in the first second: there is a run to sample from and to go on with."""
    build = train.Training.build

    def interrupted(training, saved):
        build(training, saved)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Training, "build", interrupted)
        assert tiny(tmp_path) == 130
    written(command, "--out_dir", tmp_path)
    written(command, "--checkpoint", tmp_path / "last.pt")
    assert tiny(tmp_path, "--resume", "--max_iters", "1") == 0


def test_a_damaged_checkpoint_names_the_other(command, tiny, tmp_path):
    """To sample from and to go on with: one line, and 2."""
    tiny(tmp_path, "--max_iters", "1")
    for name, other, main, argv in (
        ("best.pt", "last.pt", sample.main, []),
        ("last.pt", "best.pt", train.main, ["--resume"]),
    ):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        (tmp_path / other).write_bytes(b"whole or not, it is there")
        code, _, err = command(main, "--out_dir", tmp_path, *argv)
        assert code == 2 and len(err.splitlines()) == 1
        assert f"{path}: damaged" in err and f"{tmp_path / other} may still be good" in err


def test_the_device_is_told(command, data_dir, tmp_path, monkeypatch):
    """auto on a machine without an accelerator is the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    argv = [*TINY, "--data_dir", data_dir, "--out_dir", tmp_path, "--max_iters", "0"]
    code, out, _ = command(train.main, *argv)
    assert code == 0 and re.search(r"^.*, on cpu \(\d+ threads?\), float32$", out, re.MULTILINE)


class Compiled(torch.nn.Module):
    """A stand-in for what torch.compile gives: a module that holds the model under this name."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model

    def forward(self, *tensors):
        return self._orig_mod(*tensors)


def broken(_):
    raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nmore of it")


@pytest.mark.parametrize("compiler", [Compiled, broken])
def test_compiling_leaves_no_mark_on_the_checkpoint(tiny, tmp_path, monkeypatch, compiler):
    """Or fails with one warning and goes on; either way the very weights of an uncompiled run."""
    tiny(tmp_path / "plain")
    monkeypatch.setattr(torch, "compile", compiler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tiny(tmp_path / "compiled", "--compile")
    told = [str(warning.message) for warning in caught]
    failed = "compile: going on without, since it failed: InvalidCxxCompiler: No working C++"
    assert [text[: len(failed)] for text in told] == [failed] * (compiler is broken)
    plain, compiled = (
        load_checkpoint(tmp_path / name / "last.pt")["model"] for name in ("plain", "compiled")
    )
    assert plain.keys() == compiled.keys()
    assert all(torch.equal(compiled[name], weight) for name, weight in plain.items())


# ------------------------------------------------------------------------- a bare environment

BARE = """
import socket
import sys

def offline(*_):
    raise OSError("no network here")

socket.socket.connect = socket.getaddrinfo = offline
sys.modules["matplotlib"] = None
"""
POEM = "从前有一座山，山里有一座庙。\n庙里有个老和尚，在给小和尚讲故事：\n"
CONFIG = """# 很小的模型
n_layer = 1  # 一层
n_head = 2
n_embd = 16
block_size = 16
batch_size = 4
max_iters = 2
dataset = "诗"
"""


def test_chinese_in_a_bare_environment(tmp_path):
    """The C locale, another folder, pipes, no matplotlib, no network, and warnings are errors.

    Text, file names, a comment in the config file and the start are Chinese.
    """
    (tmp_path / "sitecustomize.py").write_text(BARE, "utf-8")
    (tmp_path / "诗.txt").write_text(POEM * 40, "utf-8")
    (tmp_path / "小.py").write_text(CONFIG, "utf-8")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": "."}

    def command(script, *argv):
        ended = subprocess.run(
            [sys.executable, "-W", "error", REPOSITORY / script, *argv],
            env=os.environ | plain, cwd=tmp_path, capture_output=True, timeout=120,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr.decode()
        return ended.stdout.decode("utf-8"), ended.stderr.decode("utf-8")

    out, err = command("prepare.py", "--text", "诗.txt", "--name", "诗", "--data_dir", "数据")
    assert err == "" and "诗: 1 file, 1,320 characters, 22 of them different" in out
    out, err = command("train.py", "小.py", "--data_dir", "数据", "--out_dir", "出")
    assert err == "" and out.count("matplotlib is not installed") == 1
    assert "诗: " in out and not Path(tmp_path, "出", "loss.png").exists()
    out, err = command("sample.py", "--out_dir", "出", "--start", "从前", "--max_new_tokens", "30")
    assert out.startswith("从前") and len(out) == 33
    assert set(out) <= set(POEM) and err.startswith("出/best.pt: step 2, ")


# ------------------------------------------------------------------------- the list of cases


def table():
    """The rows of README.md's table: number, input, what happens, tests."""
    lines = (REPOSITORY / "tests" / "README.md").read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in rows if row[0].isdigit()]


def test_every_case_is_listed():
    """1 to 34, each with at least one test."""
    rows = table()
    assert [int(row[0]) for row in rows] == list(range(1, 35))
    assert all(len(row) == 4 and re.search(r"\w+::test_\w+", row[3]) for row in rows)


def test_the_tests_in_the_list_exist():
    """Rename one, and the list has to be told."""
    missing = []
    for module, name in re.findall(r"(\w+)::(test_\w+)", " ".join(row[3] for row in table())):
        source = (REPOSITORY / "tests" / f"{module}.py").read_text("utf-8")
        if not re.search(rf"^def {name}\(", source, re.MULTILINE):
            missing.append(f"{module}::{name}")
    assert missing == []


def test_a_user_error_of_the_library_is_not_swallowed():
    """Who imports the functions gets an exception, not the end of their program."""
    with pytest.raises(UserError):
        train.main(["--n_haed", "4"])
