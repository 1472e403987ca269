"""Trains a Transformer on a prepared text, and writes the run to a folder under out/.

usage: python train.py [config/fairy_tales.py] [--setting value ...]
"""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

import device as machine
from batches import Dataset, TrainingBatches, check_lengths, evaluation_batches, load_dataset
from checkpoint import (
    best_row,
    build_model,
    clear,
    load_checkpoint,
    locked,
    log_table,
    save_checkpoint,
    write_text,
)
from distributed import World, joined
from estimate import memory_there, report, tokens_per_update
from generate import write
from model import ModelConfig, Transformer
from optimizer import make_optimizers, make_schedule
from plots import loss_curves
from prepare import ensure_dataset
from settings import ModelSettings, TrainSettings, UserError, listing, resolve, run, runs_folder

CHECK_INTERVAL = 10  # updates between looks at the loss: each look makes a GPU wait
EVALUATION_TOKENS = 8192  # at a time, or a batch if that is more: without gradients there is room
SAMPLE_LENGTH = 200  # characters the model writes at each evaluation


def main(argv: list[str]) -> int:
    """Trains as the arguments say; the exit code is 0, or 128 + the signal that stopped it."""
    with joined() as world:
        return begin(argv, world)


def begin(argv: list[str], world: World) -> int:
    """Checks everything, then trains; gives the exit code."""
    with world.agreeing():
        wanted = resolve(TrainSettings, argv, __doc__, "config", strict=False)
        folder = run_folder(wanted)
        saved = load_checkpoint(folder / "last.pt") if wanted.resume else None
        settings = resolve(TrainSettings, argv, __doc__, "config", saved and saved["settings"])
        if saved:
            check_architecture(settings, saved)
        if settings.show:
            print(listing(settings))
            return 0
        check_shares(settings, world)
        device = world.device(machine.choose_device(settings.device))
        machine.check_dtype(settings.dtype, device)
        if not settings.estimate:
            check_folder(settings, folder)
    step = saved["step"] if saved else 0
    world.check_alike(**settings.record(), steps=step, estimate=settings.estimate)
    if saved and is_done(saved["step"], saved["history"], settings):
        print(f"already done: {folder} is at step {saved['step']} of {settings.max_iters}")
        return 0
    data, text = open_data_in_turn(settings, saved, world)
    world.check_alike(text=data.meta["fingerprint"])
    start = functools.partial(Training, settings, folder, device, data, text, saved, world)
    with memory_advice(settings, data):
        if settings.estimate:
            return estimate(start, settings, model_config(settings, data), device, world)
        return train(start, folder, settings.overwrite, world)


def estimate(
    start: "Callable[[], Training]",
    settings: TrainSettings,
    config: ModelConfig,
    device: torch.device,
    world: World,
) -> int:
    """Prints what the run would take, and makes no run."""
    memory = -world.max(-memory_there(device, world.local_size))  # where there is least

    def begin_run() -> tuple[Callable[[], object], Callable[[], object]]:
        with world.agreeing():
            training = start()
        training.connect()
        return training.update, lambda: (training.losses(), training.sample())

    for line in report(settings, config, device, world.size, memory, begin_run):
        print(line, flush=True)
    return 0


def train(start: "Callable[[], Training]", folder: Path, overwrite: bool, world: World) -> int:
    """Makes the run, in a folder that no other process writes to; gives the exit code."""
    with contextlib.ExitStack() as held:
        with world.agreeing():
            if world.is_first:
                held.enter_context(locked(folder))
            interrupt = held.enter_context(Interrupt())
            training = start()
        if overwrite and world.is_first:
            clear(folder)
        training.connect()
        return training.go(interrupt)


# ------------------------------------------------------------------------- before a run begins


def run_folder(settings: TrainSettings) -> Path:
    """Where the run goes: out_dir, or out/<name of the config file>."""
    name = Path(settings.config).stem if settings.config else "default"
    return Path(settings.out_dir) if settings.out_dir else runs_folder() / name


def check_architecture(settings: TrainSettings, saved: dict[str, Any]) -> None:
    """Raises UserError for each setting that contradicts the weights or the batches so far."""
    model = {field.name for field in dataclasses.fields(ModelSettings)}
    fixed = model - {"dropout", "activation_checkpointing"} | {"seed", "optimizer", "decayed"}
    new, old = vars(settings), saved["settings"]
    problems = [
        f"{name} = {new[name]}: the run to resume has {old[name]}; leave it so, or start another"
        for name in sorted(fixed)
        if new[name] != old[name]
    ]
    if problems:
        raise UserError("\n".join(problems))


def check_folder(settings: TrainSettings, folder: Path) -> None:
    """Raises UserError if the folder holds a run and it was not said what is to become of it."""
    if (folder / "last.pt").exists() and not settings.resume and not settings.overwrite:
        raise UserError(
            f"{folder} holds a run: go on with --resume, replace it with --overwrite, "
            "or choose another folder with --out_dir"
        )


def check_shares(settings: TrainSettings, world: World) -> None:
    """Raises UserError where a batch cannot be shared out evenly."""
    if settings.batch_size % world.size:
        raise UserError(
            f"batch_size = {settings.batch_size} cannot be shared out among {world.size} "
            f"processes; take a multiple of {world.size}"
        )


def open_data_in_turn(
    settings: TrainSettings, saved: dict[str, Any] | None, world: World
) -> tuple[Dataset, str]:
    """The text; where it has to be prepared, the first process of each machine does, in turn."""
    own = 0 if world.is_first else 1 if world.local_rank == 0 else 2
    for turn in range(3):
        with world.agreeing():
            if turn == own:
                opened = open_data(settings, saved, world)
    return opened


def open_data(
    settings: TrainSettings, saved: dict[str, Any] | None, world: World
) -> tuple[Dataset, str]:
    """The prepared text, and the name it was found by: another's, where that had to stand in."""
    name = settings.dataset
    if saved and saved["settings"]["dataset"] == name:
        name = saved["text"]["name"]
    folder, message = ensure_dataset(name, settings.data_dir, settings.offline)
    data = load_dataset(folder)
    if message:
        name = data.meta["name"]
        if world.is_first:
            print(message, file=sys.stderr)
    check_lengths(data, settings.block_size)
    if saved and saved["text"]["fingerprint"] != data.meta["fingerprint"]:
        raise UserError(
            f"{folder}: not the text that the run was trained on so far; "
            "prepare that one again, or start another run"
        )
    return data, name


def model_config(settings: TrainSettings, data: Dataset) -> ModelConfig:
    """The model that the settings ask for, with the text's vocabulary."""
    names = [field.name for field in dataclasses.fields(ModelSettings)]
    shape = {name: getattr(settings, name) for name in names}
    return ModelConfig(vocab_size=data.tokenizer.vocab_size, **shape)


def memory_advice(
    settings: TrainSettings, data: Dataset
) -> contextlib.AbstractContextManager[None]:
    """A block that, should it run out of memory, ends with what to lower."""
    change = "lower batch_size, block_size or n_embd; --estimate tells what that saves"
    return machine.memory_advice(f"{size(settings, data)}; {change}")


def size(settings: TrainSettings, data: Dataset) -> str:
    """What takes the memory, in words; found without taking it."""
    with torch.device("meta"):
        parameters = Transformer(model_config(settings, data)).parameter_count()
    batch = f"batch_size {settings.batch_size}, block_size {settings.block_size}"
    return f"{parameters:,} parameters, {batch}"


class Interrupt:
    """Notes SIGINT or SIGTERM, so that the update under way ends well; a second one is obeyed."""

    def __enter__(self) -> "Interrupt":
        self.signal = 0
        self.before = {
            number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
        }
        for number in self.before:
            signal.signal(number, self.note)
        return self

    def note(self, number: int, _frame: FrameType | None) -> None:
        """The handler of the first."""
        self.signal = number
        self.__exit__()

    def __exit__(self, *_error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------------- the run


class Training:
    """One run: all that changes while it goes on, and its folder."""

    def __init__(
        self,
        settings: TrainSettings,
        folder: Path,
        device: torch.device,
        data: Dataset,
        text: str,
        saved: dict[str, Any] | None = None,
        world: World | None = None,
    ) -> None:
        self.settings, self.folder, self.device = settings, folder, device
        self.data, self.text, self.world = data, text, world or World()
        self.dtype = machine.choose_dtype(settings.dtype, device)
        machine.allow_tf32(device)
        self.step: int = saved["step"] if saved else 0
        self.seconds: float = saved["seconds"] if saved else 0.0  # spent on updates
        self.history: list[dict[str, Any]] = saved["history"] if saved else []
        self.batch_loss: float = saved["batch_loss"] if saved else math.nan
        self.unseen: list[torch.Tensor] = []  # (loss, gradient norm) of updates not yet looked at
        self.build(saved)

    def build(self, saved: dict[str, Any] | None) -> None:
        """Everything that learns or draws, as new or exactly where `saved` left it."""
        settings, device, world = self.settings, self.device, self.world
        torch.manual_seed(settings.seed)  # for the weights
        config = model_config(settings, self.data)
        self.model = Transformer(config) if saved is None else build_model(
            saved | {"model_config": vars(config)}, self.folder / "last.pt")[0]  # fmt: skip
        self.model.to(device)
        self.optimizers = make_optimizers(self.model, settings, saved and saved["optimizers"])
        self.schedules = [make_schedule(one, settings, self.step) for one in self.optimizers]
        half = self.dtype == torch.float16 and device.type == "cuda"
        self.scaler = torch.amp.GradScaler("cuda", enabled=half)
        self.batches = TrainingBatches(
            self.data.train, self.data.train_paragraphs, settings.block_size,
            settings.batch_size, settings.seed, saved["served"] if saved else 0,
            world.rank, world.size,
        )  # fmt: skip
        torch.manual_seed(settings.seed + 1 + world.rank)  # for dropout
        if saved:
            self.scaler.load_state_dict(saved["scaler"])
            for state in saved["random"][world.rank : world.rank + 1]:  # none, if it is a new one
                machine.set_random_state(state, device)
        self.forward = self.compile() if settings.compile else self.model
        self.parallel = self.forward  # once connected, with gradients averaged over the processes

    def connect(self) -> None:
        """Puts the weights and gradients of all processes together, once all have built theirs."""
        self.parallel = self.world.parallel(self.forward, self.device)

    def compile(self) -> nn.Module:
        """The compiled model, or the model itself and a warning."""
        shape = (self.settings.batch_size // self.world.size, self.settings.block_size)
        return machine.compiled(
            self.model, torch.zeros(shape, dtype=torch.int64, device=self.device)
        )

    def go(self, interrupt: "Interrupt") -> int:
        """Trains to the end or to a signal; gives the exit code."""
        self.announce()
        total, first = self.settings.max_iters, self.step
        quiet = None if self.world.is_first else True  # None: in a pipe
        bar = tqdm(total=total, initial=first, unit="step", disable=quiet)
        with bar:
            while True:
                number = int(self.world.max(interrupt.signal))  # the same in all processes
                if self.is_due() and not (number and self.history):
                    self.evaluate(bar)
                if number or is_done(self.step, self.history, self.settings):
                    break
                self.update()
                bar.update()
                if self.step % CHECK_INTERVAL == 0:
                    self.look(bar)
                if self.step - first == CHECK_INTERVAL:
                    bar.write(self.time_left())
            if number:
                self.look(bar)
                self.save()
        if is_done(self.step, self.history, self.settings):
            return self.finished()
        return self.stopped(number)

    def update(self) -> None:
        """One update of the weights, from gradient_accumulation_steps batches."""
        began, parts = time.perf_counter(), self.settings.gradient_accumulation_steps
        total = torch.zeros((), device=self.device)
        for part in range(parts):
            inputs, targets = (machine.moved(half, self.device) for half in next(self.batches))
            with self.averaging(part == parts - 1):
                with machine.autocast(self.device, self.dtype):
                    loss = self.parallel(inputs, targets)[1] / parts
                self.scaler.scale(loss).backward()
            total += loss.detach()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        weights = list(self.model.parameters())
        norm = nn.utils.get_total_norm([weight.grad for weight in weights])
        if self.settings.grad_clip is not None:
            nn.utils.clip_grads_with_norm_(weights, self.settings.grad_clip, norm)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            self.scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
        self.scaler.update()
        self.step += 1
        self.unseen.append(torch.stack((total, norm)))
        self.seconds += time.perf_counter() - began

    def averaging(self, last: bool) -> contextlib.AbstractContextManager:
        """Lets processes average their gradients once an update, in its last backward pass."""
        if last or self.world.size == 1:
            return contextlib.nullcontext()
        return self.parallel.no_sync()

    def look(self, bar: tqdm) -> None:
        """Reads the losses since the last look. Raises UserError when one is not finite."""
        began = time.perf_counter()
        values = torch.stack(self.unseen).flatten().tolist() if self.unseen else []
        self.seconds += time.perf_counter() - began  # a GPU has been working off its queue
        means = [value / self.world.size for value in self.world.sum(values)]
        pairs = zip(means[::2], means[1::2], strict=True)
        for step, (loss, norm) in enumerate(pairs, self.step - len(self.unseen) + 1):
            # float16 meets infinite gradients as it searches for its scale, and skips those steps.
            if not math.isfinite(loss + (0.0 if self.scaler.is_enabled() else norm)):
                raise self.diverged(f"loss {loss:g}, gradient norm {norm:g} at step {step}")
            self.batch_loss = loss
        self.unseen.clear()
        bar.set_postfix_str(
            f"loss {self.batch_loss:.3f}, lr {self.rate():.1e}, {self.speed():,.0f} tokens/s", False
        )

    def diverged(self, what: str) -> UserError:
        """The error that stops a run whose numbers have left the scale."""
        return UserError(
            f"{what}, learning_rate {self.settings.learning_rate:g}: lower it or set grad_clip; "
            f"what was saved before in {self.folder} is untouched"
        )

    def is_due(self) -> bool:
        """Whether this step is to be evaluated, and has not been."""
        wanted = (
            self.step % self.settings.eval_interval == 0 or self.step >= self.settings.max_iters
        )
        return wanted and not is_evaluated(self.step, self.history)

    def evaluate(self, bar: tqdm) -> None:
        """Measures, writes a sample, and saves it all. No random stream of the training moves."""
        self.look(bar)
        train_loss, val_loss = self.losses()
        if not math.isfinite(train_loss + val_loss):
            raise self.diverged(f"losses {train_loss:g} and {val_loss:g} at step {self.step}")
        row = {
            "step": self.step,
            "train_loss": train_loss,
            "val_loss": val_loss,
            "bits_per_character": val_loss / math.log(2),
            "whole_val_loss": None,
            "batch_loss": self.batch_loss,
            "learning_rate": self.rate(),
            "seconds": round(self.seconds, 2),
            "sample": self.sample(),
        }
        self.history.append(row)
        if is_done(self.step, self.history, self.settings):
            row["whole_val_loss"] = self.loss_of(self.data.val, None)
        self.save()
        bar.write(
            f"step {self.step}: train {train_loss:.4f}, validation {val_loss:.4f} nats "
            f"({row['bits_per_character']:.3f} bits a character)\n{indent(row['sample'])}"
        )

    def losses(self) -> tuple[float, float]:
        """Of windows of both splits, in nats per token."""
        windows = self.settings.eval_iters * self.settings.batch_size
        return self.loss_of(self.data.train, windows), self.loss_of(self.data.val, windows)

    def sample(self) -> str:
        """What the model writes from nothing; the first process alone tells it."""
        if not self.world.is_first:
            return ""
        return write(self.model, self.data.tokenizer, "", SAMPLE_LENGTH, self.settings.seed)

    @torch.no_grad()
    def loss_of(self, tokens: np.ndarray, windows: int | None) -> float:
        """Mean loss in nats per token over that many fixed windows; None: over every token.

        By the model as it is, since a compiled one would be compiled anew for these shapes.
        """
        self.model.eval()
        losses, counts = [], []
        block_size, world = self.settings.block_size, self.world
        rows = max(self.settings.batch_size // world.size, EVALUATION_TOKENS // block_size)
        for inputs, targets in evaluation_batches(
            tokens, block_size, rows, windows, world.rank, world.size
        ):
            inputs, targets = (machine.moved(half, self.device) for half in (inputs, targets))
            with machine.autocast(self.device, self.dtype):
                losses.append(self.model(inputs, targets)[1])
            counts.append(targets.numel())
        self.model.train()
        values = torch.stack(losses).tolist() if losses else []
        total, count = world.sum([float(np.dot(values, counts)), sum(counts)])
        return total / count

    def save(self) -> None:
        """Saves the run, in the first process, unless its weights have left the scale."""
        if not all(weight.isfinite().all() for weight in self.model.parameters()):
            raise self.diverged(f"a weight is not finite at step {self.step}")
        state = self.state()
        with self.world.agreeing():  # no process leaves before it is written
            if self.world.is_first:
                self.write_files(state)

    def write_files(self, state: dict[str, Any]) -> None:
        """Writes the run's files; last.pt last: what a kill leaves out is made again from it."""
        if is_evaluated(self.step, self.history) and best_row(self.history) is self.history[-1]:
            save_checkpoint(state, self.folder / "best.pt")
        described = self.settings.record() | {"text": self.text}
        write_text(self.folder / "settings.json", json.dumps(described, indent=2) + "\n")
        write_text(self.folder / "log.csv", log_table(self.history))
        samples = (f"--- step {row['step']}\n{row['sample']}\n" for row in self.history)
        write_text(self.folder / "samples.txt", "\n".join(samples))
        self.draw()
        save_checkpoint(state, self.folder / "last.pt")

    def draw(self) -> None:
        """Draws loss.png, where there is matplotlib."""
        with contextlib.suppress(ImportError):  # announce() has said so
            loss_curves(self.history, self.folder / "loss.png", f"Losses of {self.folder.name}")

    def state(self) -> dict[str, Any]:
        """All that a checkpoint holds: enough to sample from, and to go on as if never stopped."""
        return {
            "model_config": vars(self.model.config),
            "model": self.model.state_dict(),
            "tokenizer": self.data.tokenizer.state(),
            "settings": self.settings.record(),
            "text": {"name": self.text, "fingerprint": self.data.meta["fingerprint"]},
            "step": self.step,
            "val_loss": self.history[-1]["val_loss"],
            "batch_loss": self.batch_loss,
            "seconds": self.seconds,
            "history": self.history,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": self.scaler.state_dict(),
            "served": self.batches.served,
            "random": self.world.gather(machine.random_state(self.device)),
        }

    def rate(self) -> float:
        """The learning rate of the next update."""
        return self.schedules[0].get_last_lr()[0]

    def speed(self) -> float:
        """Tokens learned from per second, over the whole run."""
        return tokens_per_update(self.settings) * self.step / max(self.seconds, 1e-9)

    def announce(self) -> None:
        """Says what is about to happen."""
        settings, data = self.settings, self.data
        windows = settings.max_iters * settings.batch_size * settings.gradient_accumulation_steps
        print(
            f"{size(settings, data)}, on {machine.describe(self.device)}, {self.dtype}".replace(
                "torch.", ""
            )
        )
        print(
            f"{self.text}: {len(data.train):,} characters to learn from, {len(data.val):,} to "
            f"validate with, {data.tokenizer.vocab_size} different ones"
        )
        print(
            f"{settings.max_iters:,} updates of {tokens_per_update(self.settings):,} characters, "
            f"{windows / self.batches.windows_per_epoch:.1f} passes; run folder {self.folder}"
        )
        if self.step:
            print(f"going on from step {self.step}")
        if importlib.util.find_spec("matplotlib") is None:
            print(
                "matplotlib is not installed, so there will be no loss.png: pip install matplotlib"
            )

    def time_left(self) -> str:
        """How long the rest will take, going by the updates so far."""
        left = (self.settings.max_iters - self.step) * self.seconds / self.step
        return f"about {left / 60:.0f} minutes to go, at {self.speed():,.0f} characters a second"

    def stopped(self, number: int) -> int:
        """Says how to go on after a signal; gives the exit code that shells expect."""
        where = shlex.quote(str(self.folder))
        print(f"stopped at step {self.step} and saved; to go on from there:")
        print(f"  python train.py --resume --out_dir {where}")
        return 128 + number

    def finished(self) -> int:
        """Says what came of it and how to sample from it; gives the exit code 0."""
        row, best = self.history[-1], best_row(self.history)
        if self.step < self.settings.max_iters:
            print(f"stopped early: {self.settings.patience} evaluations without a better loss")
        if row["whole_val_loss"] is not None:
            print(f"loss over the whole validation split: {row['whole_val_loss']:.4f} nats")
        print(f"best at step {best['step']}: {best['val_loss']:.4f}; the run is in {self.folder}")
        start = "" if self.data.tokenizer.unknown("Once") else ' --start "Once"'
        print(
            f"sample from it:\n  python sample.py --out_dir {shlex.quote(str(self.folder))}{start}"
        )
        return 0


# ------------------------------------------------------------------------- the record of a run


def is_evaluated(step: int, history: list[dict[str, Any]]) -> bool:
    """Whether the newest evaluation is that of this step."""
    return bool(history) and history[-1]["step"] == step


def is_done(step: int, history: list[dict[str, Any]], settings: TrainSettings) -> bool:
    """Whether nothing is left to do: all updates made and evaluated, or patience at its end."""
    if step > settings.max_iters or (step == settings.max_iters and is_evaluated(step, history)):
        return True
    if settings.patience is None or not is_evaluated(step, history):
        return False
    return len(history) - 1 - history.index(best_row(history)) >= settings.patience


def indent(text: str) -> str:
    """A sample, set apart from what is said about it."""
    return "\n".join(f"    {line}" for line in text.strip("\n").splitlines())


if __name__ == "__main__":
    run(main)
