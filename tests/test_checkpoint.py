"""The rules of checkpoint.py: a file is whole or as it was, and none runs code or passes unseen."""

import contextlib
import errno
import io
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, TINY

import checkpoint
from checkpoint import (
    FORMAT,
    clear,
    load_checkpoint,
    load_model,
    locked,
    newest_run,
    replacing,
    save_checkpoint,
    write_text,
)
from model import ModelConfig, Transformer
from settings import UserError

CONFIG = {"vocab_size": 3, "block_size": 4, "n_layer": 1, "n_head": 1, "n_embd": 4}


def small(**changes):
    """The least that a checkpoint holds, with some of it changed."""
    return {
        "model_config": vars(ModelConfig(**CONFIG)),
        "model": Transformer(ModelConfig(**CONFIG)).state_dict(),
        "tokenizer": {"kind": "characters", "characters": "abc"},
        "settings": {},
        "step": 7,
        "val_loss": 1.5,
    } | changes


@pytest.fixture
def saved(tmp_path):
    """A good checkpoint."""
    save_checkpoint(small(), tmp_path / "last.pt")
    return tmp_path / "last.pt"


def refusal(path, load=load_checkpoint):
    """The line that a file is refused with."""
    with pytest.raises(UserError) as refused:
        load(path)
    assert "\n" not in str(refused.value) and str(refused.value).startswith(f"{path}: ")
    return str(refused.value).removeprefix(f"{path}: ")


# ------------------------------------------------------------------------- writing


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    """Not before; folders on the way are made, and nothing else is left."""
    path = tmp_path / "a" / "b" / "童话.txt"
    write_text(path, "old")
    with replacing(path) as file:
        file.write("从前\n".encode())
        assert path.read_text("utf-8") == "old"
    assert path.read_bytes() == "从前\n".encode()
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt()])
def test_a_block_that_fails_changes_nothing(tmp_path, error):
    """The error passes; the old file stays, and no half-written one beside it."""
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(type(error)), replacing(path) as file:
        file.write(b"half of the n")
        raise error
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_refuses_is_one_line(tmp_path, saved, monkeypatch, call, code):
    """It names the file and the system's reason; what stood there still loads."""
    before = saved.read_bytes()

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    message = refusal(saved, lambda path: save_checkpoint(small(step=8), path))
    assert message == f"{os.strerror(code)}; what was saved there before is untouched"
    assert saved.read_bytes() == before and os.listdir(tmp_path) == ["last.pt"]


@pytest.fixture
def full_disk():
    """A file system of 1 MB, mounted for the test."""
    folder = tempfile.mkdtemp()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder]
    try:
        failed = subprocess.run(command, capture_output=True, text=True).stderr
    except OSError as error:
        failed = str(error)
    if failed:
        os.rmdir(folder)
        pytest.skip(f"no file system can be mounted here: {failed.strip()}")
    yield Path(folder)
    subprocess.run(["umount", folder], check=True)
    os.rmdir(folder)


def test_a_disk_that_is_really_full(full_disk):
    """torch.save has words of its own for that, in which the disk does not occur."""
    path = full_disk / "last.pt"
    save_checkpoint(small(), path)
    before = path.read_bytes()
    large = small(random=torch.zeros(300_000))
    message = refusal(path, lambda path: save_checkpoint(large, path))
    assert re.fullmatch(r"(No space left|.*the disk full).*; what was saved .* untouched", message)
    assert path.read_bytes() == before and os.listdir(full_disk) == ["last.pt"]
    assert load_checkpoint(path)["step"] == 7
    save_checkpoint(small(step=8), path)  # what was half-written gave its room back
    assert load_checkpoint(path)["step"] == 8


def test_a_training_run_on_a_disk_that_fills_up(full_disk, tiny):
    """The run stops with that line, and goes on from the last save once there is room."""
    folder = full_disk / "run"
    tight = ["--n_layer", "1", "--n_embd", "16", "--max_iters", "4", "--eval_interval", "2"]
    assert tiny(folder, *tight) == 0
    room = os.statvfs(full_disk).f_bavail * os.statvfs(full_disk).f_frsize
    (full_disk / "others").write_bytes(b"0" * (room - 4096))
    with pytest.raises(UserError, match=r"(No space left|the disk full).*; what was saved "):
        tiny(folder, "--resume", "--max_iters", "8")
    assert load_checkpoint(folder / "last.pt")["step"] == 4
    load_model(folder / "best.pt")
    (full_disk / "others").unlink()
    assert tiny(folder, "--resume", "--max_iters", "8") == 0


@contextlib.contextmanager
def unprivileged(folder):
    """The rights of nobody in particular: to the superuser, nothing is read-only."""
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    try:
        yield
    finally:
        if os.getuid() == 0:
            os.seteuid(0)


@pytest.fixture
def open_folder():
    """A folder that everyone may enter; pytest's own are private."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_a_folder_that_may_not_be_written(open_folder):
    """Nothing is made in it, and what is there stays."""
    path = open_folder / "last.pt"
    write_text(path, "old")
    with unprivileged(open_folder):
        os.chmod(open_folder, 0o555)
        message = refusal(path, lambda path: save_checkpoint(small(), path))
        assert message == "Permission denied; what was saved there before is untouched"
        with (
            pytest.raises(UserError, match=r"^\S+: Permission denied; choose another"),
            locked(open_folder),
        ):
            pass
        with (
            pytest.raises(UserError, match=r"runs/new: Permission denied; choose another"),
            locked(open_folder / "runs" / "new"),
        ):
            pass
        os.chmod(open_folder, 0o755)
    assert path.read_text() == "old" and os.listdir(open_folder) == ["last.pt"]


def test_a_run_whose_folder_is_a_file(tmp_path):
    """Or lies below one."""
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="choose another with --out_dir"), locked(folder):
            pass
        refusal(folder / "last.pt", lambda path: write_text(path, "new"))
    assert (tmp_path / "file").read_text() == "mine"


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import checkpoint

def killed_before(owner, name):
    def kill(*_):
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, kill)

def killed_after(owner, name):
    call = getattr(owner, name)
    def kill(*arguments):
        call(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, kill)

for when in (killed_before, killed_after):
    for owner, name in ((os, "fsync"), (os, "replace"), (checkpoint.torch, "save")):
        path = Path(sys.argv[2], f"{when.__name__} {name}", "last.pt")
        checkpoint.save_checkpoint({"step": 1}, path)
        if os.fork() == 0:
            when(owner, name)
            checkpoint.save_checkpoint({"step": 2}, path)
        print(path.parent.name, os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_process_killed_while_it_saves_leaves_a_whole_file(tmp_path):
    """By kill -9, before and after each step of the writing: the old file, or the new one."""
    command = [sys.executable, "-c", KILLED, str(REPOSITORY), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.stderr == "" and ended.stdout.count(" -9\n") == 6
    steps = {
        path.parent.name.removeprefix("killed_"): torch.load(path, weights_only=True)["step"]
        for path in tmp_path.glob("*/last.pt")
    }
    assert len(steps) == 6
    assert {name for name, step in steps.items() if step == 2} == {"after replace"}
    for path in tmp_path.glob("*/last.pt"):  # and what was left behind is in nobody's way
        save_checkpoint({"step": 3}, path)
        assert os.listdir(path.parent) == ["last.pt"]


def test_the_order_of_the_writing(tmp_path, monkeypatch):
    """On the disk before it takes the name, or a power cut could leave it with nothing in it."""
    calls = []
    for name in ("fsync", "replace"):
        call = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *given, call=call, name=name: (calls.append(name), call(*given))[1]
        )
    write_text(tmp_path / "file", "text")
    assert calls == ["fsync", "replace", "fsync"]  # the last is the folder's


def test_a_system_that_cannot_open_folders_does_without(tmp_path, monkeypatch):
    """As Windows."""

    def fail(*_):
        raise PermissionError

    monkeypatch.setattr(checkpoint.os, "open", fail)
    checkpoint.sync_folder(tmp_path)


# ------------------------------------------------------------------------- the run's folder


def test_a_folder_is_locked_for_one(tmp_path):
    """A second one is refused, and has its turn when the first is done or has failed."""
    for error in (RuntimeError, ValueError):
        with pytest.raises(error), locked(tmp_path / "run"):
            with pytest.raises(UserError, match="run: another process is writing a run there"):
                locked(tmp_path / "run").__enter__()
            raise error


def test_clearing_takes_only_what_a_run_wrote(tmp_path):
    """And does not mind what is missing."""
    for name in ("last.pt", "log.csv", "notes.txt"):
        write_text(tmp_path / name, "")
    clear(tmp_path)
    assert os.listdir(tmp_path) == ["notes.txt"]
    clear(tmp_path)


def test_the_newest_run_is_that_written_last(tmp_path):
    """At any depth; a folder without a checkpoint does not count."""
    with pytest.raises(UserError, match="no run in it; train one: python train"):
        newest_run(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no run in it"):
        newest_run(tmp_path)
    for age, name in ((30, "a/last.pt"), (10, "sweep/b/best.pt"), (20, "c/last.pt")):
        write_text(tmp_path / name, "")
        os.utime(tmp_path / name, (0, time.time() - age))
    assert newest_run(tmp_path) == tmp_path / "sweep" / "b"
    os.utime(tmp_path / "c" / "last.pt")
    assert newest_run(tmp_path) == tmp_path / "c"


# ------------------------------------------------------------------------- reading


def test_a_checkpoint_comes_back(tmp_path):
    """The same tensors and plain values, with the format's number."""
    state = small(extra=[1, 2.5, None, True, "童话", {"deep": torch.arange(3)}])
    save_checkpoint(state, tmp_path / "last.pt")
    again = load_checkpoint(tmp_path / "last.pt")
    assert again.pop("format") == FORMAT and again.keys() == state.keys()
    assert again["extra"][:5] == state["extra"][:5]
    assert torch.equal(again["extra"][5]["deep"], torch.arange(3))
    assert all(torch.equal(again["model"][n], weight) for n, weight in state["model"].items())


def test_a_model_comes_back(tmp_path):
    """Ready to write: in eval mode, with its tokenizer and everything else."""
    state = small()
    save_checkpoint(state, tmp_path / "best.pt")
    model, tokenizer, again = load_model(tmp_path / "best.pt")
    assert not model.training and tokenizer.encode("cab") == [2, 0, 1] and again["step"] == 7
    assert all(torch.equal(model.state_dict()[n], weight) for n, weight in state["model"].items())


@pytest.mark.parametrize("part", [0, 0.01, 0.5, 0.99])
def test_a_truncated_file(saved, part):
    """As a full disk, a broken copy or a cut download leaves it: empty, halved, a byte short."""
    data = saved.read_bytes()
    saved.write_bytes(data[: int(len(data) * part)])
    assert refusal(saved) == "damaged or no checkpoint of this program"


def test_a_truncated_file_whose_twin_is_there(saved):
    """The run's other checkpoint is named, whichever of the two it is."""
    twin = saved.with_name("best.pt")
    shutil.copy(saved, twin)
    for bad, good in ((saved, twin), (twin, saved)):
        whole = bad.read_bytes()
        bad.write_bytes(whole[: len(whole) // 2])
        assert refusal(bad).endswith(f"; {good} may still be good")
        bad.write_bytes(whole)
    moved = saved.rename(saved.with_name("mine.pt"))
    moved.write_bytes(b"")
    assert refusal(moved) == "damaged or no checkpoint of this program"


@pytest.mark.parametrize("place", ["header", "middle", "end"])
def test_a_damaged_file(saved, place):
    """Bytes gone wrong are found out, or are in the padding; no traceback either way."""
    data = bytearray(saved.read_bytes())
    at = {"header": 0, "middle": len(data) // 2, "end": len(data) - 40}[place]
    data[at : at + 16] = bytes(255 - byte for byte in data[at : at + 16])
    saved.write_bytes(data)
    with contextlib.suppress(UserError):
        load_checkpoint(saved)


def test_a_folder_and_a_missing_file(tmp_path):
    """Told apart, with an example of what is meant."""
    assert refusal(tmp_path) == "a folder; expected a checkpoint such as out/fairy_tales/best.pt"
    assert refusal(tmp_path / "last.pt").startswith("no such file; expected a checkpoint")


class Bomb:
    """A pickle of it would make a folder when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("write", ["pickle", "torch", "old torch"])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, write):
    """A checkpoint from somebody else is a file, not a program."""
    path, mark = tmp_path / "model.pt", tmp_path / "it ran"
    content = small(extra=Bomb(mark)) | {"format": FORMAT}
    if write == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=write == "torch")
    assert refusal(path) == "damaged or no checkpoint of this program"
    assert not mark.exists()
    torch.load(path, weights_only=False) if write != "pickle" else pickle.loads(path.read_bytes())
    assert mark.exists()  # the bomb was a live one


def archive():
    """A zip file that torch did not make."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        written.writestr("readme.txt", "hello")
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"hello, I am a text\n", "很久以前".encode(), b"\x89PNG\r\n\x1a\n", bytes(1000), archive(),
     pickle.dumps([1, 2]), b'{"format": "pt"}', b"\x80\x05"],
    ids=["text", "utf8", "png", "zeros", "zip", "list", "json", "pickle"],
)  # fmt: skip
def test_a_file_of_another_kind(tmp_path, content):
    """Whatever it may be, in one line."""
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    assert refusal(path) in (
        "damaged or no checkpoint of this program",
        "a file of another program, or its weights alone",
    )


@pytest.mark.parametrize(
    "content",
    [
        small()["model"],  # a state dict alone
        {"model": {}, "optimizer": {}, "model_args": {}, "iter_num": 5, "config": {}},  # nanoGPT's
        [torch.zeros(3)],
        torch.zeros(3),
        7,
        {},
        {1: 2},
    ],
    ids=["weights", "nanogpt", "list", "tensor", "number", "empty", "numbers"],
)
def test_a_checkpoint_of_another_program(tmp_path, content):
    """torch can read it, but there is no model, tokenizer or format in it."""
    torch.save(content, tmp_path / "model.pt")
    expected = "a file of another program, or its weights alone"
    assert refusal(tmp_path / "model.pt") == expected


@pytest.mark.parametrize("number", [FORMAT + 1, 0, None])
def test_another_format_of_ours(tmp_path, number):
    """Both numbers are told."""
    torch.save(small() | {"format": number}, tmp_path / "last.pt")
    remedy = "train anew, or use the version that wrote it"
    expected = f"format {number}; this version reads format {FORMAT}: {remedy}"
    assert refusal(tmp_path / "last.pt") == expected


def renamed(weights, old, new):
    return {name.replace(old, new): weight for name, weight in weights.items()}


WEIGHTS = small()["model"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {**WEIGHTS, "head.weight": torch.zeros(4, 4)}},
         "its weights are not those of its config: head.weight is (4, 4), expected (3, 4)"),
        ({"model": {n: w for n, w in WEIGHTS.items() if n != "head.bias"}},
         "its weights are not those of its config: head.bias is missing"),
        ({"model": WEIGHTS | {"extra": torch.zeros(1)}},
         "its weights are not those of its config: extra is not expected"),
        ({"model_config": vars(ModelConfig(**CONFIG | {"n_layer": 2}))},
         "its weights are not those of its config: blocks.1.attention_norm.weight is missing; "
         "blocks.1.attention_norm.bias is missing; "
         "blocks.1.attention.query_key_value.weight is missing; ..."),
        ({"model_config": CONFIG | {"n_heads": 3}}, "its model is none of this version's: "),
        ({"model_config": CONFIG | {"n_head": 3}}, "its model is none of this version's: n_head 3"),
        ({"model_config": CONFIG | {"feed_forward": "tanh"}}, "its model is none of this"),
        ({"model_config": CONFIG | {"vocab_size": "3"}}, "its model is none of this version's"),
        ({"model_config": CONFIG | {"n_embd": -4}}, "its model is none of this version's"),
        ({"model_config": None}, "its model is none of this version's"),
        ({"tokenizer": {"kind": "bpe"}}, "its model is none of this version's: tokenizer of kind"),
        ({"tokenizer": {"kind": "characters"}}, "its model is none of this version's: "),
        ({"tokenizer": "abc"}, "its model is none of this version's"),
        ({"tokenizer": {"kind": "characters", "characters": "abcd"}},
         "its weights are not those of its config: its tokenizer knows 4 characters"),
        ({"model": [1, 2]}, "its weights are not those of its config"),
        ({"model": {**WEIGHTS, "head.weight": 3}}, "its model is none of this version's"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit(tmp_path, changes, message):
    """The names and shapes that differ, not torch's page of them; nothing passes in silence."""
    save_checkpoint(small(**changes), tmp_path / "last.pt")
    assert refusal(tmp_path / "last.pt", load_model).startswith(message)


def test_a_checkpoint_of_a_gpu_loads_on_the_cpu(tmp_path, monkeypatch):
    """Its tensors are marked as a GPU's, as far as this can be played on a machine without one."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        save_checkpoint(small(random={"cpu": torch.get_rng_state()}), tmp_path / "last.pt")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="Attempting to deserialize object on a CUDA device"):
            torch.load(tmp_path / "last.pt", weights_only=True)
    model, _, again = load_model(tmp_path / "last.pt")
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}
    assert again["random"]["cpu"].device.type == "cpu"


# ------------------------------------------------------------------------- twenty kills


def start(folder, data_dir, *argv):
    """A small training, in a process of its own; returns once it begins."""
    options = ["--max_iters=240", "--eval_interval=2", "--warmup_iters=50", "--batch_size=12"]
    places = ["--data_dir", str(data_dir), "--out_dir", str(folder)]
    setup = (
        "import sys, train; train.SAMPLE_LENGTH = 8; train.loss_curves = lambda *_: None; "
        "sys.exit(train.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-u", "-c", setup, *places, *argv]
    command += [] if "--resume" in argv else [*TINY, *options]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE)
    while b"run folder" not in process.stdout.readline():
        assert process.poll() is None
    return process


def finish(folder, data_dir, *argv):
    """Trains on to the end; gives the checkpoint, and how long that took."""
    process, began = start(folder, data_dir, *argv), time.perf_counter()
    process.communicate()
    assert process.returncode == 0
    return load_checkpoint(folder / "last.pt"), time.perf_counter() - began


@pytest.mark.slow
def test_twenty_kills(tmp_path, data_dir):
    """kill -9 at random moments: each time both checkpoints load; in the end it is the same run."""
    folder, moments = tmp_path / "killed", random.Random(4)
    straight, seconds = finish(tmp_path / "straight", data_dir)
    for kill in range(1, 21):
        there = (folder / "last.pt").exists()
        process = start(folder, data_dir, *["--resume"] * there)
        time.sleep(moments.uniform(0, seconds / 15))
        process.kill()
        assert process.wait() == -signal.SIGKILL, "the run was over before the kill"
        process.stdout.close()
        half = [path.name for path in folder.glob(".*.tmp")]
        steps = {path.name: load_model(path)[2]["step"] for path in sorted(folder.glob("*.pt"))}
        print(f"kill {kill}: {steps}, half-written: {', '.join(half) or 'nothing'}")
    killed, _ = finish(folder, data_dir, "--resume")
    assert killed["step"] == straight["step"] == 240
    for name, weight in straight["model"].items():
        assert torch.equal(killed["model"][name], weight), name
    losses = [[row["val_loss"] for row in run["history"]] for run in (killed, straight)]
    assert losses[0] == losses[1]
    print(f"after {kill} kills: the weights and {len(losses[0])} evaluations of the straight run")
