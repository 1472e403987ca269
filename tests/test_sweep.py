"""The rules of sweep.py; its runs are trained here, in this process, where that is all the same."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY, TINY

import sweep
import train
from checkpoint import load_checkpoint
from settings import TrainSettings, UserError, arguments, resolve
from sweep import Run, SweepSettings, make_field


class Process:
    """What `start` gives, for a run that has ended already or never will."""

    def __init__(self, returncode):
        self.returncode = returncode
        self.told = []

    def poll(self):
        return self.returncode

    def terminate(self):
        self.told.append("terminate")

    def wait(self):
        self.told.append("wait")


def train_here(run, _threads):
    """In the place of sweep.start."""
    resume = ["--resume"] * (run.folder / "last.pt").exists()
    try:
        return Process(train.main([*arguments(run.settings), *resume]))
    except UserError as error:
        (run.folder / "output.txt").write_text(f"before\n{error}\n", "utf-8")
        return Process(2)


@pytest.fixture
def go(data_dir, monkeypatch):
    """Sweeps with tiny models and few pictures; gives the exit code."""
    monkeypatch.setattr(train, "SAMPLE_LENGTH", 8)
    monkeypatch.setattr(train, "loss_curves", lambda *_: None)
    monkeypatch.setattr("results.chart", lambda *_: None)
    monkeypatch.setattr(sweep, "POLL", 0)
    monkeypatch.setattr(sweep, "start", train_here)

    def go(folder, *argv, size=TINY):
        return sweep.main([*size, "--data_dir", str(data_dir), "--out_dir", str(folder), *argv])

    return go


def names(folder):
    """The runs in a sweep's folder."""
    return sorted(path.parent.name for path in folder.glob("*/last.pt"))


def results(folder):
    """The lines of results.csv."""
    with (folder / "results.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def log(folder):
    """What log.csv tells, without the times."""
    with (folder / "log.csv").open(encoding="utf-8", newline="") as file:
        return [row | {"seconds": None} for row in csv.DictReader(file)]


# ------------------------------------------------------------------------------------- the grid


def test_a_sweep_from_the_command_line(go, tmp_path, capsys):
    """Every combination is an ordinary run in a folder that tells it, and a line of results.csv."""
    assert go(tmp_path, "--n_head", "1,2", "--seed", "1,2") == 0
    assert names(tmp_path) == [f"n_head={h},seed={s}" for h in (1, 2) for s in (1, 2)]
    for folder in map(tmp_path.joinpath, names(tmp_path)):
        settings = load_checkpoint(folder / "best.pt")["settings"]
        assert folder.name == "n_head={n_head},seed={seed}".format(**settings)
    lines = results(tmp_path)
    losses = [float(line["val_loss"]) for line in lines]
    assert sorted(line["run"] for line in lines) == names(tmp_path) and losses == sorted(losses)
    assert re.search(r"^\* +[12] ", capsys.readouterr().out, re.MULTILINE)


def test_a_sweep_from_a_file(go, tmp_path):
    """A list in a config file is a setting with several values; the command line has precedence."""
    config = tmp_path / "sweep_it.py"
    rest = "dataset, n_layer, n_embd, block_size, batch_size, max_iters = 'page', 1, 32, 32, 4, 2\n"
    config.write_text(rest + "n_head = [1, 2]\ndropout = [0, 0.1]\nposition = 'rope'\n", "utf-8")
    assert go(tmp_path / "out", str(config), "--n_head", "2", size=()) == 0
    assert names(tmp_path / "out") == ["dropout=0", "dropout=0.1"]
    settings = load_checkpoint(tmp_path / "out" / "dropout=0" / "last.pt")["settings"]
    assert (settings["n_head"], settings["position"]) == (2, "rope")


def test_of_a_setting_given_twice_the_last_counts(tmp_path):
    """As in train.py; the values do not add up."""
    argv = ["--n_head", "1,3", "--n_head", "2,4"]
    chosen = resolve(SweepSettings, argv, "", "config", field=make_field)
    assert [run.name for run in sweep.grid(chosen, tmp_path)] == ["n_head=2", "n_head=4"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--n_head", "1,2,1"], ["n_head=1", "n_head=2"]),
        (["--tied_embeddings", "no,yes"], ["tied_embeddings=false", "tied_embeddings=true"]),
        (["--grad_clip", "none,1"], ["grad_clip=none", "grad_clip=1.0"]),
        (["--seed", "1,2", "--norm=rmsnorm"], ["seed=1", "seed=2"]),
        (["--dataset", "page,a/b"], ["dataset=page", "dataset=a-b"]),
        (["--seed", "1,2", "--n_layer", "3,1"],
         ["n_layer=3,seed=1", "n_layer=3,seed=2", "n_layer=1,seed=1", "n_layer=1,seed=2"]),
    ],
)  # fmt: skip
def test_any_setting_may_vary(tmp_path, argv, expected):
    """Numbers, words, flags and none; each value once, in the order given, the seed last."""
    chosen = resolve(SweepSettings, argv, "", "config", field=make_field)
    runs = sweep.grid(chosen, tmp_path)
    assert sorted(run.folder.name for run in runs) == sorted(expected)
    assert {run.settings.out_dir for run in runs} == {str(tmp_path / name) for name in expected}


def test_all_mistakes_are_told_at_once():
    """As in train.py, and also for one value of several."""
    command = "--n_head 1,x --dropout 0,1 --norm layernorm,none --jobs 0 --n_heads 2"
    with pytest.raises(UserError) as caught:
        sweep.main(command.split())
    told = [line.split(":")[0] for line in str(caught.value).splitlines()]
    assert told == ["n_head = '1,x'", "dropout = '0,1'", "norm = 'layernorm,none'", "jobs = '0'",
                    "n_heads"]  # fmt: skip


def test_a_sweep_over_nothing_is_refused():
    with pytest.raises(UserError, match="no setting has several values"):
        sweep.main(["--n_head", "2"])


def test_help_tells_every_setting(capsys):
    with pytest.raises(SystemExit):
        sweep.main(["--help"])
    told = capsys.readouterr().out
    assert all(f"--{name} " in told for name in (*TrainSettings().record(), "jobs", "compare"))


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["config/sweep_heads.py"], "sweep_heads"),
        (["config/fairy_tales.py", "--n_head", "1,3"], "sweep_fairy_tales"),
        (["--n_head", "1,3"], "sweep_default"),
        (["--compare", "out/a"], "sweep_compare"),
    ],
)
def test_the_folder_is_named_after_the_config_file(argv, name, monkeypatch, tmp_path):
    """And never that of a run which train.py would name after the same file."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr("settings.ROOT", tmp_path)
    chosen = resolve(SweepSettings, argv, "", "config", field=make_field)
    assert sweep.sweep_folder(chosen) == tmp_path / "out" / name


def test_the_exercise_is_valid(monkeypatch):
    """config/sweep_heads.py: all numbers of heads with one seed, then with the next."""
    monkeypatch.chdir(REPOSITORY)
    argv = ["config/sweep_heads.py", "--out_dir", "out/none"]
    runs = sweep.grid(resolve(SweepSettings, argv, "", "config", field=make_field), Path("none"))
    assert [run.settings.n_head for run in runs] == [1, 2, 4, 8] * 3
    assert not any(list(run.settings.conflicts()) for run in runs)


# ------------------------------------------------------------------------------ before it begins


def test_what_cannot_be_is_skipped_and_named(go, tmp_path, capsys):
    """Heads that do not divide the width, and a context longer than the text."""
    assert go(tmp_path, "--n_head", "2,3", "--block_size", "32,9999") == 0
    told = capsys.readouterr().out
    assert names(tmp_path) == ["n_head=2,block_size=32"]
    assert "n_head=3,block_size=32: skipped: n_head = 3 does not divide n_embd = 32" in told
    assert "n_head=2,block_size=9999: skipped: the training split has" in told


def test_nothing_possible_is_an_error(go, tmp_path):
    with pytest.raises(UserError, match="none of these runs is possible"):
        go(tmp_path, "--n_head", "3,5")


def test_time_left(tmp_path):
    """Updates and evaluations that are still to come, by what one of each takes."""
    measured = []

    def measure(settings):
        measured.append(settings)
        return 0.5, 10.0

    settings = TrainSettings(max_iters=1000, eval_interval=100, seed=7, learning_rate=0.5)
    fresh = sweep.time_left(Run("", settings, tmp_path, 0, False), measure)
    begun = sweep.time_left(Run("", settings, tmp_path, 400, False), measure)
    assert fresh == sweep.STARTING + 1000 * 0.5 + 11 * 10
    assert begun == sweep.STARTING + 600 * 0.5 + 7 * 10
    assert measured[0].seed == 0  # all seeds share one measurement


def test_measuring_is_short_and_leaves_nothing(go, tmp_path, data_dir, capsys):
    """A few updates, whose time is what an update takes; no file, no word, whatever the rate."""
    settings = TrainSettings(
        dataset="page", data_dir=str(data_dir), n_layer=1, n_embd=32, n_head=2, block_size=32,
        batch_size=4, eval_iters=2, learning_rate=1e-9, min_lr=0.0, compile=True,
    )  # fmt: skip
    before = sorted(data_dir.rglob("*"))
    began = time.perf_counter()
    update, evaluation = sweep.measure(settings)
    passed = time.perf_counter() - began
    assert 0 < 3 * update + evaluation < passed
    assert sorted(data_dir.rglob("*")) == before and capsys.readouterr().out == ""


# -------------------------------------------------------------------------------- on and off


def test_a_run_that_fails_does_not_end_the_sweep(go, tmp_path, capsys):
    """Its reason is told, the others are compared, and the exit code is 1."""
    assert go(tmp_path, "--learning_rate", "1e30,1e-3") == 1
    told = capsys.readouterr().out
    assert re.search(r"^learning_rate=1e\+30: failed: loss .*is untouched", told, re.M)
    assert "failed: learning_rate=1e+30; to try again:\n  python sweep.py --" in told
    assert [line["run"] for line in results(tmp_path)] == ["learning_rate=0.001"]


def test_a_sweep_of_failures_compares_nothing(go, tmp_path):
    assert go(tmp_path, "--learning_rate", "1e30", "--seed", "1,2") == 1
    assert not (tmp_path / "results.csv").exists()


def test_again_skips_the_finished_and_resumes_the_broken(go, tmp_path, capsys, monkeypatch):
    """The first run is done, the second was stopped in update 6, the third had not begun."""
    assert go(tmp_path / "straight", "--seed", "1,2,3") == 0
    folder, update = tmp_path / "broken", train.Training.update

    def stop(training):
        if training.settings.seed == 2 and training.step == 5:
            os.kill(os.getpid(), signal.SIGINT)
        update(training)

    with monkeypatch.context() as patch:
        patch.setattr(train.Training, "update", stop)
        assert go(folder, "--seed", "1,2") == 1
    done = (folder / "seed=1" / "last.pt").read_bytes()
    capsys.readouterr()
    assert go(folder, "--seed", "1,2,3") == 0
    told = capsys.readouterr().out
    assert "seed=1: finished before\n" in told
    assert "seed=2: to be resumed at step 6," in told
    assert "seed=3: new," in told
    assert (folder / "seed=1" / "last.pt").read_bytes() == done
    for name in ("seed=1", "seed=2", "seed=3"):
        assert log(folder / name) == log(tmp_path / "straight" / name)


def test_a_finished_sweep_only_compares(go, tmp_path, capsys, monkeypatch):
    assert go(tmp_path, "--seed", "1,2") == 0
    told = capsys.readouterr().out
    monkeypatch.setattr(sweep, "start", pytest.fail)
    monkeypatch.setattr(sweep, "measure", pytest.fail)
    assert go(tmp_path, "--seed", "1,2") == 0
    again = capsys.readouterr().out
    assert again.splitlines()[-3:] == told.splitlines()[-3:]


def test_runs_made_otherwise_are_not_mixed_in(go, tmp_path):
    """The folder's names tell what varies, not what was the same for all."""
    assert go(tmp_path, "--seed", "1,2") == 0
    with pytest.raises(UserError, match=r"seed=1 holds a run with dropout = 0\.1; choose another"):
        go(tmp_path, "--seed", "1,2", "--dropout", "0.2")


def test_a_signal_ends_the_runs_and_tells_how_to_go_on(go, tmp_path, capsys, monkeypatch):
    """Each is told once, for a second signal would cost it its last steps; no other is begun."""
    begun = []

    class Endless(Process):
        def poll(self):
            if self is begun[-1] and len(begun) == 2:
                signal.raise_signal(signal.SIGTERM)

    def start(run, threads):
        begun.append(Endless(None))
        return begun[-1]

    monkeypatch.setattr(sweep, "start", start)
    before = signal.getsignal(signal.SIGTERM)
    assert go(tmp_path, "--seed", "1,2,3", "--jobs", "2") == 128 + signal.SIGTERM
    assert [process.told for process in begun] == [["terminate", "wait"]] * 2
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last[0] == "stopped; to go on from there:"
    assert last[1].startswith(f"  python sweep.py {TINY[0]}")
    assert last[1].endswith("--seed 1,2,3 --jobs 2")
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_error_leaves_no_run_behind(go, tmp_path, monkeypatch):
    """The second run cannot even be started; the first must not go on unseen."""
    begun = []

    def start(run, threads):
        if begun:
            raise OSError("no more processes")
        begun.append(Process(None))
        return begun[0]

    monkeypatch.setattr(sweep, "start", start)
    with pytest.raises(OSError, match="no more"):
        go(tmp_path, "--seed", "1,2", "--jobs", "2")
    assert begun[0].told == ["terminate", "wait"]


@pytest.mark.parametrize(("jobs", "threads"), [(1, 8), (3, 2), (8, 1), (20, 1)])
def test_so_many_at_a_time_with_the_cores_shared_out(tmp_path, monkeypatch, jobs, threads):
    """Never more at once than --jobs, and as many as that while there are enough."""
    running, most, given = set(), [], set()

    class Slow(Process):
        looks = 0

        def poll(self):
            self.looks += 1
            if self.looks > 2:
                self.returncode = 0
                running.discard(self)
            return self.returncode

    def start(run, threads):
        process = Slow(None)
        running.add(process)
        most.append(len(running))
        given.add(threads)
        return process

    monkeypatch.setattr(sweep.torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(sweep.torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(sweep, "start", start)
    monkeypatch.setattr(sweep, "POLL", 0)
    monkeypatch.setattr(sweep, "in_words", lambda folder: "done")
    monkeypatch.setattr(sweep, "measure", lambda settings: (0.0, 0.0))
    monkeypatch.setattr(sweep, "compare", lambda folders, out: None)
    seeds = ",".join(map(str, range(12)))
    assert sweep.main(["--seed", seeds, "--jobs", str(jobs), "--out_dir", str(tmp_path)]) == 0
    assert len(most) == 12 and max(most) == min(jobs, 12) and given == {threads}


def test_what_is_started_is_the_run_and_nothing_else(tmp_path, monkeypatch):
    """train.py gets exactly the run's settings; with a checkpoint there, it resumes."""
    calls = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: calls.append((args, kwargs)))
    wanted = TrainSettings(
        n_head=1, dropout=0.0, grad_clip=1.0, tied_embeddings=True, learning_rate=3e-5,
        norm="rmsnorm", out_dir=str(tmp_path / "a b"),
    )  # fmt: skip
    run = Run("a", wanted, tmp_path / "a b", 0, False)
    sweep.start(run, 3)
    (run.folder / "last.pt").touch()
    sweep.start(run, 3)
    [([first], kwargs), ([second], _)] = calls
    assert first[:2] == [sys.executable, str(REPOSITORY / "train.py")]
    assert resolve(TrainSettings, first[2:], "", "config") == wanted
    assert second == [*first, "--resume"]
    assert kwargs["env"]["OMP_NUM_THREADS"] == "3"


def test_progress_is_read_from_the_log(tmp_path):
    """Before the first evaluation there is no log, or its first line alone."""
    assert sweep.last_step(tmp_path) == 0
    (tmp_path / "log.csv").write_text("step,train_loss\n", "utf-8")
    assert sweep.last_step(tmp_path) == 0
    (tmp_path / "log.csv").write_text("step,train_loss\n0,4.1\n200,2.5\n", "utf-8")
    assert sweep.last_step(tmp_path) == 200


def test_runs_from_anywhere_are_compared(go, tmp_path, capsys):
    """--compare takes folders; the files that out/sweep/* also names are passed over."""
    assert go(tmp_path / "a", "--n_head", "1,2") == 0
    assert go(tmp_path / "b", "--n_layer", "1,2") == 0
    places = [str(path) for name in "ab" for path in sorted((tmp_path / name).iterdir())]
    capsys.readouterr()
    assert sweep.main(["--out_dir", str(tmp_path / "c"), "--compare", *places]) == 0
    assert [*results(tmp_path / "c")[0]][:4] == ["run", "n_layer", "n_head", "seed"]
    assert len(results(tmp_path / "c")) == 4 and "bits/char" in capsys.readouterr().out


def test_what_is_no_run_cannot_be_compared(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.last\.pt: no such file"):
        sweep.main(["--out_dir", str(tmp_path), "--compare", str(tmp_path / "nowhere")])
    with pytest.raises(UserError, match="no run to compare"):
        (tmp_path / "results.csv").touch()
        sweep.main(["--out_dir", str(tmp_path), "--compare", str(tmp_path / "results.csv")])


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="sends the signal that Ctrl-C in a terminal sends")
def test_ctrl_c_and_the_same_command_again(tmp_path, data_dir):
    """With real processes: the run under way saves, and is resumed where it was."""
    command = [
        sys.executable, str(REPOSITORY / "sweep.py"), *TINY, "--data_dir", str(data_dir),
        "--out_dir", str(tmp_path), "--max_iters", "1500", "--eval_interval", "300",
        "--seed", "1,2",
    ]  # fmt: skip
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
    while sweep.last_step(tmp_path / "seed=1") < 300:
        assert first.poll() is None
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGINT)
    told, _ = first.communicate(timeout=60)
    assert first.returncode == 130 and "stopped; to go on from there:" in told
    step = load_checkpoint(tmp_path / "seed=1" / "last.pt")["step"]
    assert 300 <= step < 1500 and not (tmp_path / "seed=2").exists()
    second = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert second.returncode == 0
    assert f"seed=1: to be resumed at step {step}," in second.stdout
    assert [line["steps"] for line in results(tmp_path)] == ["1500", "1500"]
