"""Several processes as one: torchrun starts them, and each takes its share of every batch.

Without torchrun there is one process in the world, and all that is here changes nothing.
"""

import contextlib
import datetime
import os
import sys
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
PATIENCE = datetime.timedelta(seconds=5)  # with a store that may be gone with its torchrun
LOST = (
    "another process of this run ended or does not answer; what was saved last is whole, and the "
    "same command with --resume goes on from there"
)


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
        parallel = DistributedDataParallel(model, places, gradient_as_bucket_view=True)
        parallel.broadcast_buffers = False  # they hold the same in all processes: tables
        return parallel

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """A block that goes well in all processes, or raises what went wrong in any in all.

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
            raise UserError("\n".join(problems))

    def check_alike(self, **items: object) -> None:
        """Raises UserError, in all processes, for each item that is not the same in all."""
        given = self.gather(items)
        values = {name: dict.fromkeys(str(each[name]) for each in given) for name in items}
        problems = [
            f"{name} = {' and '.join(different)} in different processes; give all the same"
            for name, different in values.items()
            if len(different) > 1
        ]
        if problems:
            raise UserError("\n".join(problems))


@contextlib.contextmanager
def joined() -> Iterator[World]:
    """The world that torchrun started this process in; the first process alone prints.

    A UserError is told by the process that comes first with one; the others end with code 2.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield World()
        return
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    world = World(*(int(os.environ[name]) for name in names))
    gpus = torch.cuda.is_available() and dist.is_nccl_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=TIMEOUT)
    try:
        with (
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            contextlib.redirect_stdout(sys.stdout if world.is_first else nowhere),
        ):
            yield world
    except (RuntimeError, UserError) as error:
        if isinstance(error, RuntimeError) and not is_loss(error):
            raise
        if not is_first_to_tell():
            raise SystemExit(2) from error
        raise error if isinstance(error, UserError) else UserError(LOST) from error
    dist.destroy_process_group()  # not after an error: it might wait for those who are gone


def is_loss(error: RuntimeError) -> bool:
    """Whether this is how torch tells that a process at the other end is gone."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def is_first_to_tell() -> bool:
    """Whether no other process has told why the run ends; so, too, if that cannot be asked.

    torchrun keeps the store that is asked, so it is there even if the first process is not.
    """
    try:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*place, is_master=False, timeout=PATIENCE)
        return store.add(f"told {os.environ['TORCHELASTIC_RESTART_COUNT']}", 1) == 1
    except RuntimeError:
        return True
