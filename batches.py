"""A prepared text in batches: shuffled anew each epoch for training, fixed for evaluation.

A window is `block_size + 1` tokens in a row: all but the last are inputs, all but the first are
targets. Shapes: B windows, T tokens predicted in each.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prepare import ARRAYS, FORMAT
from settings import UserError
from tokenizer import CharTokenizer, load_tokenizer

PREPARE = "prepare it: python prepare.py, or python prepare.py --text FILE --name NAME for your own"

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, int64, both (B, T)


@dataclass(frozen=True)
class Dataset:
    """A prepared text; its arrays stay on the disk until they are used."""

    train: np.ndarray  # token ids, laid end to end
    train_paragraphs: np.ndarray  # where each paragraph starts, and where the last one ends
    val: np.ndarray
    val_paragraphs: np.ndarray
    tokenizer: CharTokenizer
    meta: dict


def load_dataset(folder: Path) -> Dataset:
    """What prepare.py wrote. Raises UserError if it is missing, damaged or of another format."""
    meta = read(folder / "meta.json", lambda path: json.loads(path.read_text("utf-8")))
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        found = f"not of the format {FORMAT} that this version reads"
        raise UserError(f"{folder}: {found}; {PREPARE}")
    arrays = {name: read(folder / f"{name}.npy", open_array) for name in ARRAYS}
    for split in ("train", "val"):
        starts, tokens = arrays[f"{split}_paragraphs"], arrays[split]
        if starts.ndim != 1 or tokens.ndim != 1 or starts[-1:].tolist() != [len(tokens)]:
            raise UserError(f"{folder}: {split}_paragraphs.npy does not fit {split}.npy; {PREPARE}")
    try:
        tokenizer, _ = load_tokenizer(meta["tokenizer"]), meta["fingerprint"]
    except (AttributeError, LookupError, TypeError, ValueError):
        raise UserError(f"{folder}: its meta.json is damaged; {PREPARE}") from None
    return Dataset(**arrays, tokenizer=tokenizer, meta=meta)


def read(path: Path, reader: Callable[[Path], Any]) -> Any:
    """reader(path). Raises UserError if there is no such file, or it is not what it should be."""
    try:
        return reader(path)
    except OSError as error:
        problem = error.strerror
    except (EOFError, ValueError):
        problem = "damaged"
    raise UserError(f"{path}: {problem}; {PREPARE}")


def open_array(path: Path) -> np.ndarray:
    """The array in an npy file, left on the disk until it is used."""
    return np.load(path, mmap_mode="r")


def check_lengths(dataset: Dataset, block_size: int) -> None:
    """Raises UserError for each split that is too short for a single window."""
    problems = []
    for split, tokens in (("training", dataset.train), ("validation", dataset.val)):
        if len(tokens) <= block_size:
            smaller = f"lower block_size to at most {len(tokens) - 1} or " * (len(tokens) > 1)
            problems.append(
                f"the {split} split has {len(tokens)} tokens, and block_size = {block_size} needs "
                f"at least {block_size + 1}: {smaller}prepare a longer text"
            )
    if problems:
        raise UserError("\n".join(problems))


class TrainingBatches:
    """An endless iterator of full batches in which each window comes once an epoch.

    In each epoch the paragraphs are laid end to end in a new order, and windows start every
    half block_size in the text they make; these windows are served in a random order too. That
    text is never built: a batch looks up where its tokens lie in the file.

    The text must pass `check_lengths`. The state is one number: `served`, the windows served so
    far; with that one given, the first batch is the one that would have come next.

    Of `world_size` processes, which must divide batch_size, each gets its share of every batch,
    in the order of their ranks. `served` counts the windows of all, so that it means the same
    to any number of processes.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        paragraphs: np.ndarray,
        block_size: int,
        batch_size: int,
        seed: int,
        served: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.tokens, self.paragraphs = np.asarray(tokens), np.asarray(paragraphs)
        self.block_size, self.batch_size = block_size, batch_size
        self.seed, self.served = seed, served
        self.rank, self.share = rank, batch_size // world_size
        self.starts = range(0, len(tokens) - block_size, max(1, block_size // 2))
        self.shuffled = -1  # the epoch that is laid out; none yet

    @property
    def windows_per_epoch(self) -> int:
        """Windows in one pass over the text."""
        return len(self.starts)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        windows: list[np.ndarray] = []
        number = self.served + self.rank * self.share
        end = number + self.share
        while number < end:
            epoch, first = divmod(number, self.windows_per_epoch)
            windows.append(self._windows(epoch, first, end - number))
            number += len(windows[-1])
        self.served += self.batch_size
        return inputs_and_targets(np.concatenate(windows))

    def _windows(self, epoch: int, first: int, count: int) -> np.ndarray:  # (B, T + 1)
        if epoch != self.shuffled:
            self._shuffle(epoch)
        numbers = np.arange(first, min(first + count, self.windows_per_epoch))
        starts = self.order[numbers] * self.starts.step
        places = starts[:, None] + np.arange(self.block_size + 1)  # in the shuffled text
        paragraph = np.searchsorted(self.ends, places, side="right")
        return self.tokens[places + self.shifts[paragraph]]

    def _shuffle(self, epoch: int) -> None:
        """Lays out an epoch. In place where it can be: there may be millions of paragraphs."""
        random = np.random.default_rng([self.seed, epoch])
        paragraphs = random.permutation(len(self.paragraphs) - 1)
        self.shifts = self.paragraphs[paragraphs]  # where each starts in the file
        paragraphs += 1
        self.ends = self.paragraphs[paragraphs]
        self.ends -= self.shifts  # lengths
        np.cumsum(self.ends, out=self.ends)  # of each paragraph in the shuffled text
        self.shifts[1:] -= self.ends[:-1]  # from there to the file
        self.order = Permutation(self.windows_per_epoch, random)
        self.shuffled = epoch


class Permutation:
    """A random order of range(count) that is never built: indexed with places, it computes them.

    A Feistel network whose rounds look up random tables (Luby & Rackoff 1988), on pairs of numbers
    below the root of count, rounded up; what comes out at or above count goes in again (cycle
    walking, Black & Rogaway 2002). With 4 rounds, neighbours stayed together too often; 6 will do.
    """

    def __init__(self, count: int, random: np.random.Generator) -> None:
        self.count, self.side = count, math.isqrt(count - 1) + 1
        self.tables = random.integers(self.side, size=(6, self.side))

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        left, right = np.divmod(places, self.side)
        for table in self.tables:
            left, right = right, (left + table[right]) % self.side
        numbers = left * self.side + right
        beyond = numbers >= self.count
        if beyond.any():
            numbers[beyond] = self[numbers[beyond]]
        return numbers


def evaluation_batches(
    tokens: np.ndarray,
    block_size: int,
    batch_size: int,
    windows: int | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Batch]:
    """The same windows every time, evenly spaced; no token is predicted twice.

    windows: how many. None, or as many as there are: the whole split, in which each token but the
        first is predicted once; what is left at the end is a batch of one shorter window.
    world_size: processes, which take the batches in turn; of few batches, some get none.
    """
    whole, left = divmod(len(tokens) - 1, block_size)
    count = whole if windows is None else min(windows, whole)
    for first in range(rank * batch_size, count, world_size * batch_size):
        numbers = np.arange(first, min(first + batch_size, count))
        starts = numbers * whole // count * block_size
        yield inputs_and_targets(tokens[starts[:, None] + np.arange(block_size + 1)])
    batches = -(-count // batch_size)  # whole ones and the last, so far
    if count == whole and left and batches % world_size == rank:
        yield inputs_and_targets(tokens[None, -left - 1 :])


def inputs_and_targets(windows: np.ndarray) -> Batch:
    """Windows (B, T + 1) of any integer type as inputs and targets, which lie one token apart."""
    ids = torch.from_numpy(windows.astype(np.int64))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
