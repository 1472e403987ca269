"""The rules of several processes: they are one run, they end together, and they say so once."""

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, TINY

import distributed
from batches import load_dataset
from checkpoint import load_checkpoint
from distributed import World
from settings import TrainSettings, UserError
from train import Training

LIMIT = 120  # seconds that any of these may take; a hung process would take TIMEOUT
SETTINGS = [*TINY, "--device=cpu", "--dropout=0", "--max_iters=20", "--eval_interval=10"]


@pytest.fixture
def torchrun(data_dir: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts train.py in so many processes; both streams of all of them are the pipe `stdout`."""
    started: list[subprocess.Popen] = []

    def torchrun(count: int, folder: Path, *argv: str) -> subprocess.Popen:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
        if count == 1:
            start = []
        places = [f"--data_dir={data_dir}", f"--out_dir={folder}"]
        command = [sys.executable, *start, str(REPOSITORY / "train.py"), *places, *argv]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        started.append(process)
        return process

    yield torchrun
    for process in started:
        if process.poll() is None:  # a test failed, and left it running
            for pid in (*children(process.pid), process.pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def ended(process: subprocess.Popen) -> str:
    """All that the process says until its end."""
    return process.communicate(timeout=LIMIT)[0]


def wait_for(process: subprocess.Popen, words: str) -> None:
    """Reads what the process says up to a line with these words."""
    for line in process.stdout:
        if words in line:
            return
    raise AssertionError(f"it never said {words!r}")


def largest_difference(one: Path, other: Path) -> float:
    """Between the weights of two runs."""
    states = [load_checkpoint(folder / "last.pt")["model"] for folder in (one, other)]
    return max((states[0][name] - states[1][name]).abs().max().item() for name in states[0])


# ------------------------------------------------------------------------- a world of one


def test_alone_nothing_is_shared():
    """Without torchrun nothing is initialised, and every item comes back as it is."""
    with distributed.joined() as world:
        model = torch.nn.Linear(2, 2)
        assert world == World() and world.is_first
        assert world.gather("it") == ["it"] and world.sum([0.1, 2]) == [0.1, 2]
        assert world.max(3) == 3
        assert world.parallel(model, torch.device("cpu")) is model
        world.check_alike(settings={"a": 1})
        with pytest.raises(UserError, match="as it was"), world.agreeing():
            raise UserError("as it was")
    assert not torch.distributed.is_initialized()


def test_another_error_is_not_taken_for_a_lost_process():
    """Only what torch says of connections is; a fault of ours keeps its traceback."""
    assert distributed.is_loss(RuntimeError("[gloo/transport/tcp/pair.cc:534] closed by peer"))
    assert distributed.is_loss(torch.distributed.DistNetworkError("timed out"))
    assert not distributed.is_loss(RuntimeError("shapes cannot be multiplied"))


@pytest.mark.parametrize(
    ("device", "world", "words"),
    [
        ("cuda:1", World(0, 2, 0, 2), "each takes one"),
        ("mps", World(0, 2, 0, 2), "expected cpu, or cuda"),
        ("cuda", World(0, 2, 0, 2), "2 processes and 1 GPUs"),
    ],
)
def test_each_process_needs_a_device_of_its_own(device, world, words, monkeypatch):
    """Two on one GPU would be slower than one, and the message names both numbers."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=words):
        world.device(torch.device(device))
    assert World().device(torch.device(device)) == torch.device(device)


def test_each_process_takes_the_gpu_of_its_number(monkeypatch):
    """By its rank on this machine, not among all."""
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert World(3, 4, 1, 2).device(torch.device("cuda")) == torch.device("cuda:1")
    assert taken == [1]


class Pair(World):
    """A world of two as seen by the first, the other being at one with it: no one is asked."""

    def gather(self, item):
        return [item, item]

    def sum(self, values):
        return [2 * value for value in values]

    def max(self, value):
        return value


def a_pair(data_dir: Path, **changes: object) -> Training:
    """A run of such a pair."""
    settings = TrainSettings(
        n_layer=1, n_head=1, n_embd=8, block_size=8, batch_size=4, device="cpu", **changes
    )
    data = load_dataset(data_dir / "page")
    return Training(settings, Path("none"), torch.device("cpu"), data, "page", None, Pair(0, 2))


def test_gradients_are_averaged_once_an_update(data_dir):
    """In the last of its backward passes; the ones before are held back."""
    training = a_pair(data_dir, gradient_accumulation_steps=3)
    held: list[str] = []

    class Parallel(torch.nn.Module):
        def forward(self, *batch):
            held.append("forward")
            return training.forward(*batch)

        @contextlib.contextmanager
        def no_sync(self):
            held.append("held")
            yield

    training.parallel = Parallel()
    training.update()
    assert held == ["held", "forward", "held", "forward", "forward"]


def test_what_the_processes_were_given_must_be_the_same(monkeypatch):
    """Each setting that differs is named, with its values."""
    other = {"n_layer": 2, "text": "a", "seed": 1}
    monkeypatch.setattr(World, "gather", lambda self, item: [item, other])
    with pytest.raises(UserError, match="n_layer = 1 and 2 in different processes") as error:
        World(0, 2).check_alike(n_layer=1, text="a", seed=1)
    assert "text" not in str(error.value) and "seed" not in str(error.value)


def test_what_went_wrong_in_one_process_is_raised_in_all(monkeypatch):
    """And what went wrong in several ways, each way once."""
    monkeypatch.setattr(World, "gather", lambda self, item: [item, "it broke", "it broke"])
    with pytest.raises(UserError, match=r"^it broke$"), World(0, 3).agreeing():
        pass
    with pytest.raises(UserError, match=r"^here\nit broke$"), World(0, 3).agreeing():
        raise UserError("here")


def test_a_signal_that_comes_while_the_processes_agree_counts(tiny, tmp_path, monkeypatch):
    """It must not be overwritten with what they agreed on before."""
    calls = itertools.count()

    def agree(self, value):
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return value

    monkeypatch.setattr(World, "max", agree)
    assert tiny(tmp_path) == 130
    assert load_checkpoint(tmp_path / "last.pt")["step"] == 4


# ------------------------------------------------------------------------- several processes


def test_two_processes_train_what_one_does(torchrun, tmp_path):
    """After 20 updates of two batches each, clipped, the weights are equal to 1e-5; one speaks."""
    argv = [*SETTINGS, "--gradient_accumulation_steps=2", "--grad_clip=0.5", "--eval_iters=3"]
    both = [torchrun(count, tmp_path / str(count), *argv) for count in (1, 2)]
    words = [ended(process) for process in both]
    assert [process.returncode for process in both] == [0, 0], words
    assert largest_difference(tmp_path / "1", tmp_path / "2") < 1e-5
    logs = [load_checkpoint(tmp_path / name / "last.pt")["history"] for name in ("1", "2")]
    for one, two in zip(*logs, strict=True):
        for name in ("train_loss", "val_loss"):
            assert one[name] == pytest.approx(two[name], abs=1e-5)
    assert logs[1][1]["batch_loss"] == pytest.approx(logs[0][1]["batch_loss"], abs=1e-5)
    for text in words:
        assert len(re.findall(r"^step 20:", text, re.MULTILINE)) == 1


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_or_more_processes(torchrun, tmp_path):
    """Ten updates on two, and ten more on one or four, are the straight run's twenty."""
    argv = [*SETTINGS, "--optimizer=muon", "--min_lr=0.001"]  # a rate that does not fall
    straight = torchrun(1, tmp_path / "straight", *argv)
    ended(torchrun(2, tmp_path / "two", *argv, "--max_iters=10"))
    for count in (1, 4):
        folder = tmp_path / str(count)
        shutil.copytree(tmp_path / "two", folder)
        said = ended(torchrun(count, folder, "--resume", "--max_iters=20"))
        assert "going on from step 10" in said and "best at step 20" in said
    assert "best at step 20" in ended(straight)
    for count in (1, 4):
        assert largest_difference(tmp_path / "straight", tmp_path / str(count)) < 1e-5


@pytest.mark.slow
def test_each_process_keeps_its_own_dropout(torchrun, tmp_path):
    """Ctrl-C and resumed on two processes, it is the straight run, bit for bit."""
    argv = [*SETTINGS, "--dropout=0.4", "--max_iters=300", "--eval_interval=50"]
    straight = torchrun(2, tmp_path / "straight", *argv)
    stopped = torchrun(2, tmp_path / "stopped", *argv)
    wait_for(stopped, "step 50:")
    stopped.send_signal(signal.SIGINT)
    assert "to go on from there" in ended(stopped)
    ended(straight)
    assert "best at step" in ended(torchrun(2, tmp_path / "stopped", "--resume"))
    assert largest_difference(tmp_path / "straight", tmp_path / "stopped") == 0
    streams = load_checkpoint(tmp_path / "straight" / "last.pt")["random"]
    assert len(streams) == 2 and not torch.equal(streams[0]["cpu"], streams[1]["cpu"])


@pytest.mark.slow
def test_an_estimate_of_several_processes(torchrun, tmp_path):
    """It times updates of all of them, and is printed once."""
    process = torchrun(2, tmp_path / "run", *SETTINGS, "--estimate")
    said = ended(process)
    assert process.returncode == 0 and said.count("\n  the run ") == 1
    assert "Memory of each process (computed: 2 windows of 32 tokens" in said


@pytest.mark.slow
def test_one_process_alone_may_be_told_to_stop(torchrun, tmp_path):
    """All stop with it, and the first has saved before any of them leaves."""
    process = torchrun(2, tmp_path / "run", *SETTINGS, "--max_iters=100000")
    wait_for(process, "step 20:")
    os.kill(children(process.pid)[1], signal.SIGTERM)
    said = ended(process)
    saved = load_checkpoint(tmp_path / "run" / "last.pt")["step"]
    assert f"stopped at step {saved} and saved" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch_size=3"], "batch_size = 3 cannot be shared out among 2 processes"),
        (["--n_haed=2"], "n_haed: there is no such setting; did you mean n_head?"),
        (["--learning_rate=1e30", "--max_iters=300"], "lower it or set grad_clip"),
    ],
)
def test_an_error_of_all_is_told_once(torchrun, tmp_path, argv, message):
    """And all end; torchrun then adds its own report."""
    process = torchrun(2, tmp_path / "run", *SETTINGS, *argv)
    said = ended(process)
    assert process.returncode != 0
    assert said.count(message) == 1 and "UserError" not in said


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_others(torchrun, tmp_path, rank):
    """With one line of what to do; and the run goes on from what it saved last."""
    process = torchrun(3, tmp_path / "run", *SETTINGS, "--batch_size=6", "--max_iters=100000")
    wait_for(process, "step 20:")
    os.kill(children(process.pid)[rank], signal.SIGKILL)
    said = ended(process)
    assert said.count("another process of this run ended") == 1
    saved = load_checkpoint(tmp_path / "run" / "last.pt")["step"]
    assert saved >= 20 and saved % 10 == 0
    argv = ["--resume", f"--max_iters={saved + 10}"]
    assert f"going on from step {saved}" in ended(torchrun(2, tmp_path / "run", *argv))


def children(pid: int) -> list[int]:
    """The processes that this one started, oldest first."""
    listed = subprocess.run(
        ["ps", "-eo", "ppid=,pid="], capture_output=True, text=True, check=True
    ).stdout
    pairs = [map(int, line.split()) for line in listed.splitlines()]
    return sorted(child for parent, child in pairs if parent == pid)


# ------------------------------------------------------------------------- two machines


@pytest.fixture
def two_machines() -> Iterator[list[list[str]]]:
    """Beginnings of commands that run in two network namespaces, which a cable joins."""
    names = [f"tales{os.getpid()}{end}" for end in "ab"]
    cable = [f"v{os.getpid()}{end}" for end in "ab"]
    steps = [
        *(["ip", "netns", "add", name] for name in names),
        ["ip", "link", "add", cable[0], "type", "veth", "peer", "name", cable[1]],
    ]
    for number, (name, end) in enumerate(zip(names, cable, strict=True), 1):
        inside = ["ip", "-n", name]
        steps += [
            ["ip", "link", "set", end, "netns", name],
            [*inside, "addr", "add", f"10.77.0.{number}/24", "dev", end],
            [*inside, "link", "set", end, "up"],
            [*inside, "link", "set", "lo", "up"],
        ]
    try:
        for step in steps:
            try:
                subprocess.run(step, capture_output=True, text=True, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                reason = getattr(error, "stderr", None) or error
                pytest.skip(f"network namespaces cannot be made here: {reason}".strip())
        yield [
            ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={end}", "OMP_NUM_THREADS=1"]
            for name, end in zip(names, cable, strict=True)
        ]
    finally:
        with contextlib.suppress(OSError):
            for name in names:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.slow
def test_two_machines_train_what_one_process_does(two_machines, torchrun, data_dir, tmp_path):
    """Two machines with an address each, a process on each, and the folders in common."""
    start = [
        "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1",
        "--master_addr=10.77.0.1", "--master_port=29400",
    ]  # fmt: skip
    places = [f"--data_dir={data_dir}", f"--out_dir={tmp_path / 'two'}"]
    run = [str(REPOSITORY / "train.py"), *places, *SETTINGS]
    both = [
        subprocess.Popen(
            [*machine, sys.executable, *start, f"--node_rank={rank}", *run],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, machine in enumerate(two_machines)
    ]  # fmt: skip
    said = [ended(process) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("best at step 20" in words for words in said) == 1
    ended(torchrun(1, tmp_path / "one", *SETTINGS))
    assert largest_difference(tmp_path / "one", tmp_path / "two") < 1e-5
