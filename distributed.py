"""Several processes as one: torchrun starts them, and each takes its share of every batch.

Without torchrun there is one process, the world is of size 1, and nothing here does anything.
"""

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from settings import UserError

# The longest wait for the others, while the first saves or prepares a text. A process that ends is
# missed at once, by its closed connections; this is for one that hangs, or a machine cut off.
TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class World:
    """The processes of a run: which of them this is, and what they do together.

    Whatever talks to the others must be called by all of them, in the same order.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among those on this machine
    local_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints, draws and writes."""
        return self.rank == 0

    def device(self, device: torch.device) -> torch.device:
        """This process's own device of that kind. UserError where there is not one for each."""
        if self.size == 1 or device.type == "cpu":
            return device
        if device.type != "cuda" or device.index is not None:
            found = f"device = '{device}' for {self.size} processes"
            raise UserError(f"{found}: expected cpu, or cuda, of which each takes one")
        if self.local_size > torch.cuda.device_count():
            found = f"{self.local_size} processes and {torch.cuda.device_count()} GPUs here"
            raise UserError(f"{found}; start as many as there are GPUs, or add --device cpu")
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def gather(self, item: Any) -> list[Any]:
        """The item that each process gave, by rank."""
        if self.size == 1:
            return [item]
        items = [None] * self.size
        dist.all_gather_object(items, item)
        return items

    def sum(self, values: list[float]) -> list[float]:
        """Each value, summed over the processes."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        """The largest value that a process gave."""
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def _reduce(self, values: list[float], operation: Any) -> list[float]:
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)  # on the host: no GPU has to wait
        dist.all_reduce(tensor, operation)
        return tensor.tolist()

    def parallel(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model, with gradients averaged over the processes as backward makes them."""
        if self.size == 1:
            return model
        places = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, places, gradient_as_bucket_view=True)

    def error(self, message: str) -> BaseException:
        """The error that all processes raise alike: the first one tells it, the rest are silent."""
        return UserError(message) if self.is_first else SystemExit(2)

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """A block that goes well in all processes, or ends all of them: one message for each way.

        What is in the block must not talk to the others.
        """
        problem = ""
        try:
            yield
        except UserError as error:
            if self.size == 1:
                raise
            problem = str(error)
        problems = dict.fromkeys(filter(None, self.gather(problem)))  # the same ones once
        if problems:
            raise self.error("\n".join(problems))

    def check_alike(self, **items: object) -> None:
        """Raises the error of all where the processes were not given the same."""
        for name, item in items.items():
            if any(other != item for other in self.gather(item)):
                raise self.error(f"the processes differ in their {name}; give all the same")


@contextlib.contextmanager
def joined() -> Iterator[World]:
    """The world that torchrun started this process in; of the others, only errors are heard."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield World()
        return
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    world = World(*(int(os.environ[name]) for name in names))
    gpus = torch.cuda.is_available() and dist.is_nccl_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=TIMEOUT)
    try:
        with open(os.devnull, "w") as nowhere:
            silent = contextlib.redirect_stdout(nowhere)
            with contextlib.nullcontext() if world.is_first else silent:
                yield world
    except RuntimeError as error:
        if not is_loss(error):
            raise
        raise world.error(
            "another process of this run ended; what was saved last is whole, to go on from with "
            "the same command and --resume"
        ) from error
    dist.destroy_process_group()  # not after an error: it might wait for those who are gone


def is_loss(error: RuntimeError) -> bool:
    """Whether this is how torch tells that a process at the other end is gone."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)
