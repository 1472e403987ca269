"""What a run would take: counted in a rehearsal without contents, then timed on real updates."""

import dataclasses
import math
import os
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import device as machine
from model import ModelConfig, Transformer
from optimizer import make_optimizers
from settings import TrainSettings, show

UPDATES = 3  # timed, after one that warms up; as many in every process, which wait on each other
ROOM = 0.75  # of the memory; the rest is for the system, PyTorch itself and what allocators waste
MOST = "most at one time"  # the memory that has to be there

Action = Callable[[], object]


def report(
    settings: TrainSettings,
    config: ModelConfig,
    device: torch.device,
    processes: int,
    there: float,
    begin: Callable[[], tuple[Action, Action]],
) -> Iterator[str]:
    """The lines to print, as they become known.

    processes: among which each batch is shared out.
    there: bytes of memory that each process could have.
    begin: sets the run up, if there is room for it; gives what makes an update and what evaluates.
    """
    yield from sizes(settings, config)
    need = rehearse(settings, config, device, processes)
    dtype = str(machine.choose_dtype(settings.dtype, device)).removeprefix("torch.")
    windows = f"{settings.batch_size // processes} windows of {settings.block_size} tokens"
    each = " of each process" if processes > 1 else ""
    known = f"of {in_bytes(there)}" if there < math.inf else ""
    yield f"\nMemory{each} (computed: {windows} at a time, in {dtype})"
    for name, count in need.items():
        yield row(name, in_bytes(count), known if name == MOST else "")
    for change in lighter(settings, device, processes, need[MOST] / (ROOM * there)):
        changed = rehearse(dataclasses.replace(settings, **change), config, device, processes)
        options = " ".join(f"--{name}={show(value)}" for name, value in change.items())
        if changed[MOST] < need[MOST]:
            yield row("or instead", in_bytes(changed[MOST]), f"with {options}")
    if need[MOST] > ROOM * there:
        yield f"\nTime: not measured, since the most is over {ROOM:.0%} of the memory"
    else:
        yield from times(settings, device, *begin())


def sizes(settings: TrainSettings, config: ModelConfig) -> Iterator[str]:
    """Parameters and arithmetic."""
    with torch.device("meta"):
        model = Transformer(config)
    tokens, per_token = tokens_per_update(settings), model.flops_per_token()
    total = f"{per_token * tokens * settings.max_iters:.2e}"
    yield "Size (computed)"
    yield row("parameters", f"{model.parameter_count():,}")
    yield row("FLOPs per token", f"{per_token:,}", "6 N + 12 L C T; N: weights of linear layers")
    yield row("FLOPs of the run", total, f"{settings.max_iters:,} updates of {tokens:,} tokens")


def tokens_per_update(settings: TrainSettings) -> int:
    """Tokens that one update learns from, in all processes together."""
    return settings.batch_size * settings.gradient_accumulation_steps * settings.block_size


# ----------------------------------------------------------------------------------------- memory


def rehearse(
    settings: TrainSettings, config: ModelConfig, device: torch.device, processes: int
) -> dict[str, int]:
    """The bytes of one process, found by two updates of tensors with sizes and no contents."""
    again = settings.activation_checkpointing  # the one setting of a model that `lighter` changes
    config = dataclasses.replace(config, activation_checkpointing=again)
    dtype, live = machine.choose_dtype(settings.dtype, device), LiveBytes()
    with FakeTensorMode(), live, torch.device(device):
        model = Transformer(config)
        weights = live.peak = live.now
        optimizers = make_optimizers(model, settings)
        tokens = torch.zeros(settings.batch_size // processes, config.block_size, dtype=torch.int64)
        for _ in range(2):  # the first makes the optimizers' state, so the second is the fuller
            for _ in range(min(2, settings.gradient_accumulation_steps)):
                before = live.now
                with machine.autocast(device, dtype):
                    loss = model(tokens, tokens)[1]
                kept = live.now - before
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=processes == 1)  # else they stay, to be averaged
        states = tree_leaves([optimizer.state_dict()["state"] for optimizer in optimizers])
    return {
        "weights": weights,
        "gradients": 4 * model.parameter_count(),
        "optimizer state": sum(tensor.nbytes for tensor in states),
        "activations kept": kept,  # by the forward pass for the backward pass
        MOST: live.peak,
    }


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors made under it: those alive now, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(
        self, operation: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Runs an operation, and counts what it makes; torch calls this for each."""
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.enter(tensor.untyped_storage())
        return result

    def enter(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage until it is freed; a tensor and its views share one."""
        if id(storage) not in self.known:
            self.known.add(id(storage))
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.leave, id(storage), storage.nbytes())

    def leave(self, name: int, size: int) -> None:
        """Counts it no longer."""
        self.known.remove(name)
        self.now -= size


def memory_there(device: torch.device, processes: int) -> float:
    """Bytes for each of so many processes on this machine; infinity if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    if not hasattr(os, "sysconf"):  # as on Windows
        return math.inf
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / processes


def lighter(
    settings: TrainSettings, device: torch.device, processes: int, excess: float
) -> Iterator[dict[str, Any]]:
    """Settings that train the same model in less memory; excess: the need by the room."""
    if not settings.activation_checkpointing:
        yield {"activation_checkpointing": True}
    windows = settings.batch_size // processes
    if windows > 1:
        enough = (n for n in range(2, windows) if windows % n == 0 and n >= excess)
        parts = next(enough, windows)
        passes = settings.gradient_accumulation_steps * parts
        change = {"batch_size": settings.batch_size // parts, "gradient_accumulation_steps": passes}
        yield change | {"eval_iters": settings.eval_iters * parts}  # it counts batches
    if machine.choose_dtype(settings.dtype, device) == torch.float32:
        yield {"dtype": "bfloat16"}


# ------------------------------------------------------------------------------------------- time


def times(
    settings: TrainSettings, device: torch.device, update: Action, evaluate: Action
) -> Iterator[str]:
    """The time that an update and an evaluation take here, and so the run."""
    yield f"\nTime (measured: {UPDATES} updates, one evaluation, on {machine.describe(device)})"
    seconds(update, device)
    one = statistics.median(seconds(update, device) for _ in range(UPDATES))
    yield row(
        "an update", in_time(one), f"{tokens_per_update(settings) / one:,.0f} tokens a second"
    )
    evaluation = seconds(evaluate, device)
    count = -(-settings.max_iters // settings.eval_interval) + 1  # the first before any update
    yield row("an evaluation", in_time(evaluation), f"{count:,} of them; saving comes on top,")
    yield row("", "", "and the whole validation split at the end")
    yield row("the run", in_time(settings.max_iters * one + count * evaluation))


def seconds(action: Action, device: torch.device) -> float:
    """How long an action takes, until the device is done with it."""
    began = time.perf_counter()
    action()
    torch.zeros((), device=device).item()  # queued behind the rest, and waited for
    return time.perf_counter() - began


# ---------------------------------------------------------------------------------------- wording


def row(name: str, value: str, note: str = "") -> str:
    """A line of the table."""
    return f"  {name:18}{value:>14}  {note}".rstrip()


def in_bytes(count: float) -> str:
    """A number of bytes, in the units of PyTorch's own messages."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def in_time(length: float) -> str:
    """A time in seconds, told in the unit that suits it."""
    for unit, size in (("days", 86400), ("hours", 3600), ("min", 60), ("s", 1)):
        if length >= 2 * size:
            return f"{length / size:,.1f} {unit}"
    return f"{1000 * length:,.0f} ms"
