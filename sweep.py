"""Trains a model for each combination of settings, and compares what came of them.

usage: python sweep.py config/sweep_heads.py
       python sweep.py config/fairy_tales_cpu.py --n_head 1,2,4,8 --seed 1,2 --jobs 2
       python sweep.py --compare out/a out/b ...

Every setting of train.py may have several values: with commas between them here, as a list in a
config file. Each combination is a run, in a folder of its own below the sweep's (--out_dir, or else
out/sweep_<name of the config file>); results.csv and results.png there compare them. The same
command again goes on where the sweep was stopped, and tries anew what failed.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import device as machine
import settings
from checkpoint import load_checkpoint, locked
from distributed import World
from results import PLACES, compare, in_words
from settings import Field, TrainSettings, UserError, arguments, resolve, setting, show
from train import Interrupt, Training, is_done, open_data

STARTING = 4.0  # seconds before a run's first update, on a laptop
POLL = 0.5  # seconds between looks at the runs


@dataclass(frozen=True, kw_only=True)
class SweepSettings(
    settings.DataSettings, settings.ModelSettings, settings.OptimizerSettings, settings.RunSettings
):
    """The sweep"""

    config: str | None = setting(None, "Python file of settings, such as config/sweep_heads.py")
    jobs: int = setting(1, "runs at once; they share out the processor's cores", "[1, inf)")
    compare: tuple[str, ...] = setting((), "folders of runs to compare; nothing is trained")

    def choices(self) -> dict[str, tuple]:
        """The values that each setting of a run may have, each of them once."""
        values = {name: getattr(self, name) for name in TrainSettings().record()}
        return {
            name: tuple(dict.fromkeys(value)) if isinstance(value, tuple) else (value,)
            for name, value in values.items()
        }

    def varied(self) -> list[str]:
        """The settings that have more than one."""
        names = [name for name, values in self.choices().items() if len(values) > 1]
        return sorted(names, key="seed".__eq__)  # the seed last

    def conflicts(self) -> Iterator[tuple[set[str], str]]:
        """A sweep over nothing."""
        if not self.compare and not self.varied():
            message = "no setting has several values; give one some, such as --n_head 1,2,4"
            yield set(self.choices()), message


class Choices(Field):
    """A setting that may have several values."""

    def __init__(self, field: dataclasses.Field, hint: object) -> None:
        super().__init__(field, hint)
        self.one = Field(field, hint)
        self.type = tuple

    def parse(self, texts: list[str]) -> object:
        """The values that a text with commas means; a flag may stand alone."""
        parts = texts[0].split(",") if texts else ["true"] * (self.one.type is bool)
        return tuple(self.one.parse([part]) for part in parts)

    def accepts(self, value: object) -> bool:
        """Whether each of the values is of the type and in the range."""
        values = value if isinstance(value, tuple) else (value,)
        return bool(values) and all(map(self.one.accepts, values))

    def expected(self) -> str:
        """What would be accepted, in words."""
        return f"{self.one.expected()}; or several, with commas between"


def make_field(field: dataclasses.Field, hint: object) -> Field:
    """The settings of a run may have several values; places and the sweep's own have one."""
    several = field.name in TrainSettings().record() and field.name not in PLACES
    return Choices(field, hint) if several else Field(field, hint)


@dataclass
class Run:
    """One combination of the settings, and how far it has come."""

    name: str
    settings: TrainSettings
    folder: Path
    step: int
    done: bool
    process: subprocess.Popen | None = None


def main(argv: list[str]) -> int:
    """Sweeps; the exit code is 0, or 1 if a run failed, or 128 + the signal that stopped it."""
    chosen = resolve(SweepSettings, argv, __doc__, "config", field=make_field)
    folder = sweep_folder(chosen)
    if chosen.compare:
        compare([path for path in map(Path, chosen.compare) if not path.is_file()], folder)
        return 0
    threads = max(1, torch.get_num_threads() // chosen.jobs)
    with locked(folder):
        runs = plan(grid(chosen, folder), chosen.jobs, threads)
        with Interrupt() as interrupt:
            train_all([run for run in runs if not run.done], chosen.jobs, threads, interrupt)
        again = f"python sweep.py {shlex.join(argv)}"
        if interrupt.signal:
            print(f"stopped; to go on from there:\n  {again}")
            return 128 + interrupt.signal
        return conclude(runs, folder, again)


# ------------------------------------------------------------------------------ before it begins


def sweep_folder(chosen: SweepSettings) -> Path:
    """Where the sweep goes: out_dir, or else a folder under out/ named after the config file."""
    if chosen.out_dir:
        return Path(chosen.out_dir)
    name = "compare" if chosen.compare else Path(chosen.config or "default").stem
    return settings.runs_folder() / f"sweep_{name.removeprefix('sweep_')}"


def grid(chosen: SweepSettings, folder: Path) -> list[Run]:
    """A run for each combination, named after what it has and others have not.

    Raises UserError where a run's folder holds one that was made otherwise.
    """
    runs, choices = [], chosen.choices()
    for values in itertools.product(*choices.values()):
        combination = dict(zip(choices, values, strict=True))
        name = ",".join(f"{name}={show(combination[name])}" for name in chosen.varied())
        place = folder / re.sub(r"[^\w.,=+-]", "-", name)
        wanted = TrainSettings(**combination | {"out_dir": str(place)})
        runs.append(Run(name, wanted, place, *progress(wanted, place)))
    return runs


def progress(wanted: TrainSettings, folder: Path) -> tuple[int, bool]:
    """The step that the run in the folder has come to, and whether it is done."""
    if not (folder / "last.pt").exists():
        return 0, False
    saved, new = load_checkpoint(folder / "last.pt"), wanted.record()
    old = {name: value for name, value in saved["settings"].items() if name not in PLACES}
    if differing := [f"{name} = {show(old[name])}" for name in old if old[name] != new.get(name)]:
        raise UserError(
            f"{folder} holds a run with {', '.join(differing)}; choose another --out_dir"
        )
    return saved["step"], is_done(saved["step"], saved["history"], wanted)


def plan(runs: list[Run], jobs: int, threads: int) -> list[Run]:
    """Says what is left to do and how long it will take; gives the runs that are possible."""
    print(f"{len(runs)} runs, {jobs} at a time with {threads} threads each:")
    torch.set_num_threads(threads)
    measured, possible, seconds = functools.cache(measure), [], 0.0
    for run in runs:
        try:
            left = 0.0 if run.done else time_left(run, measured)
        except UserError as error:
            print(f"  {run.name}: skipped: {error}")
            continue
        state = f"to be resumed at step {run.step}" if run.step else "new"
        print(f"  {run.name}: {'finished before' if run.done else f'{state}, {in_time(left)}'}")
        possible.append(run)
        seconds += left
    if not possible:
        raise UserError("none of these runs is possible")
    print(f"{in_time(seconds / jobs)} in all, going by a few updates of each")
    return possible


def time_left(run: Run, measured: Callable[[TrainSettings], tuple[float, float]]) -> float:
    """Seconds that the rest of the run will take. Raises UserError for one that cannot be."""
    if problems := [message for _, message in run.settings.conflicts()]:
        raise UserError("; ".join(problems))
    # What makes no difference to the speed is made equal, so that it is measured once.
    rates = {"learning_rate": 1e-9, "muon_lr": 1e-9, "min_lr": 0.0, "warmup_iters": 0}
    alike = dataclasses.replace(run.settings, seed=0, out_dir=None, **rates)
    update, evaluation = measured(alike)
    left = run.settings.max_iters - run.step
    return STARTING + left * update + (1 + left // run.settings.eval_interval) * evaluation


def measure(chosen: TrainSettings) -> tuple[float, float]:
    """Seconds of an update, and of an evaluation with all that it saves and draws.

    Raises UserError for settings with which no run is possible here, such as too short a text.
    """
    device = machine.choose_device(chosen.device)
    data, text = open_data(chosen, None, World())
    silence, bar = contextlib.redirect_stdout(io.StringIO()), tqdm(disable=True)
    with tempfile.TemporaryDirectory() as folder, silence, machine.memory_advice("a smaller model"):
        training = Training(
            dataclasses.replace(chosen, compile=False), Path(folder), device, data, text
        )
        for _ in range(2):  # everything is slower the first time
            before = training.seconds
            for _ in range(3):
                training.update()
            training.look(bar)
            update, began = (training.seconds - before) / 3, time.perf_counter()
            training.evaluate(bar)
        return update, time.perf_counter() - began


def in_time(seconds: float) -> str:
    """A time in words."""
    return f"about {seconds:.0f} seconds" if seconds < 100 else f"about {seconds / 60:.0f} minutes"


# -------------------------------------------------------------------------------------- the runs


def train_all(runs: list[Run], jobs: int, threads: int, interrupt: Interrupt) -> None:
    """Trains the runs, so many at a time, to the end or to a signal; marks those that are done."""
    waiting, running = runs[::-1], []
    total = sum(run.settings.max_iters for run in runs)
    bar = tqdm(total=total, initial=sum(run.step for run in runs), unit="step", disable=None)
    try:
        while (waiting or running) and not interrupt.signal:
            while waiting and len(running) < jobs:
                waiting[-1].process = start(waiting[-1], threads)
                running.append(waiting.pop())
            time.sleep(POLL)
            for run in running:
                follow(run, bar)
            running = [run for run in running if run.process.returncode is None]
    finally:
        for run in running:
            run.process.terminate()  # upon which train.py saves
        for run in running:
            run.process.wait()
        bar.close()


def start(run: Run, threads: int) -> subprocess.Popen:
    """train.py at work on the run, in a process of its own; what it says goes to output.txt."""
    command = [sys.executable, str(settings.ROOT / "train.py"), *arguments(run.settings)]
    command += ["--resume"] * (run.folder / "last.pt").exists()
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / "output.txt").open("ab") as output:
        # In a session of its own, or Ctrl-C would reach it from the terminal as well as from here.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True,
        )  # fmt: skip


def follow(run: Run, bar: tqdm) -> None:
    """Moves the bar to where the run is; when it has ended, says what came of it."""
    run.done = run.process.poll() == 0
    step = run.settings.max_iters if run.done else max(run.step, last_step(run.folder))
    bar.update(step - run.step)
    bar.set_postfix_str(f"{run.name} at step {step}")
    run.step = step
    if run.done:
        bar.write(f"{run.name}: {in_words(run.folder)}")
    elif run.process.returncode is not None:
        bar.write(f"{run.name}: failed: {last_words(run.folder)}")


def last_step(folder: Path) -> int:
    """The step of the run's newest evaluation, 0 before the first."""
    path = folder / "log.csv"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return int(lines[-1].split(",")[0]) if len(lines) > 1 else 0


def last_words(folder: Path) -> str:
    """The last line that train.py wrote to output.txt, and where that is."""
    path = folder / "output.txt"
    lines = path.read_text("utf-8", "replace").splitlines() if path.exists() else []
    return f"{next(filter(None, reversed(lines)), 'without a word')} (see {path})"


def conclude(runs: list[Run], folder: Path, again: str) -> int:
    """Compares the runs that are done, and names the others; gives the exit code."""
    failed = [run.name for run in runs if not run.done]
    if len(failed) < len(runs):
        compare([run.folder for run in runs if run.done], folder)
    if failed:
        print(f"failed: {'; '.join(failed)}; to try again:\n  {again}")
    return 1 if failed else 0


if __name__ == "__main__":
    settings.run(main)
