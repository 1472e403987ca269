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
from results import compare, duration, read_log
from settings import (
    DataSettings, Field, ModelSettings, OptimizerSettings, RunSettings, TrainSettings, UserError,
    arguments, resolve, run, setting, show,
)  # fmt: skip
from train import Interrupt, Training, is_done, open_data

PLACES = ("data_dir", "offline", "out_dir")  # settings that no result depends on
STARTING = 4.0  # seconds until a run makes its first update, on a laptop
POLL = 0.5  # seconds between looks at the runs


@dataclass(frozen=True, kw_only=True)
class SweepSettings(DataSettings, ModelSettings, OptimizerSettings, RunSettings):
    """The sweep"""

    config: str | None = setting(None, "Python file of settings, such as config/sweep_heads.py")
    jobs: int = setting(1, "runs at once; they share out the processor's cores", "[1, inf)")
    compare: tuple[str, ...] = setting((), "runs to compare as they are; nothing is trained")

    def varied(self) -> dict[str, tuple]:
        """The settings that have several values."""
        return {name: value for name, value in self.choices().items() if len(value) > 1}

    def choices(self) -> dict[str, tuple]:
        """The values that each setting of a run may have, each of them once."""
        values = {name: getattr(self, name) for name in TrainSettings().record()}
        return {
            name: tuple(dict.fromkeys(value)) if isinstance(value, tuple) else (value,)
            for name, value in values.items()
        }

    def conflicts(self) -> Iterator[tuple[set[str], str]]:
        """The rule that there must be something to compare."""
        if not self.compare and not self.varied():
            yield set(), "no setting has several values; give it some, such as --n_head 1,2,4"


class Choices(Field):
    """A setting of a run, which may have several values."""

    def __init__(self, field: dataclasses.Field, hint: object) -> None:
        super().__init__(field, hint)
        self.one = Field(field, hint)
        self.type = tuple

    def parse(self, texts: list[str]) -> object:
        """The values that one text means, with commas between them; none is that of a flag."""
        parts = texts[0].split(",") if texts else ["true"] * (self.one.type is bool)
        return tuple(self.one.parse([part]) for part in parts)

    def accepts(self, value: object) -> bool:
        """Whether each of the values is of the type and in the range."""
        values = value if isinstance(value, tuple) else (value,)
        return bool(values) and all(map(self.one.accepts, values))

    def expected(self) -> str:
        """What would be accepted, in words."""
        return f"{self.one.expected()}; or several, with commas between them"


@dataclass
class Run:
    """One combination of the settings, and how far it has come."""

    name: str
    settings: TrainSettings
    folder: Path
    step: int = 0
    done: bool = False

    def __post_init__(self) -> None:
        path = self.folder / "last.pt"
        if path.exists():
            saved = load_checkpoint(path)
            check_same(self, saved["settings"])
            self.step = saved["step"]
            self.done = is_done(self.step, saved["history"], self.settings)


def main(argv: list[str]) -> int:
    """Sweeps; the exit code is 0, or 1 if a run failed, or 128 + the signal that stopped it."""
    chosen = resolve(SweepSettings, argv, __doc__, "config", field=make_field)
    folder = sweep_folder(chosen)
    if chosen.compare:
        compare([Path(place) for place in chosen.compare], folder)
        return 0
    threads = max(1, torch.get_num_threads() // chosen.jobs)
    with locked(folder):
        print(*(f"{name}: {', '.join(map(show, v))}" for name, v in chosen.varied().items()), sep="\n")
        runs = possible(grid(chosen, folder), threads)
        ...
