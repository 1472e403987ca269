"""Where the arithmetic happens: the device, its precision, and what to say when it is too small."""

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import nn

from settings import UserError


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" is CUDA, else Apple's mps, else the CPU.

    Raises UserError for a name that is no device, or none of this machine's.
    """
    if name == "auto":
        mps = torch.backends.mps.is_available()
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device = {name!r}: expected auto, cpu, cuda, cuda:N or mps") from None
    there = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    count = there.get(device.type, 0)
    if (device.index or 0) >= count:
        raise UserError(
            f"device = {name!r}: this machine has {count} of that kind; try auto or cpu"
        )
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision of forward passes; "auto" is bfloat16 where CUDA has it, else float32."""
    if name == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if fast else torch.float32
    return getattr(torch, name)


def check_dtype(name: str, device: torch.device) -> None:
    """Raises UserError for a precision whose gradients would be lost on that device."""
    if name == "float16" and device.type != "cuda":
        raise UserError(
            f"dtype = float16 on {device}: its small gradients would be 0 without the scaling "
            "that is done on cuda; take bfloat16 or float32"
        )


def allow_tf32(device: torch.device) -> None:
    """Lets a GPU multiply float32 matrices in TF32: the range of float32, 10 bits after the point.

    On a CPU, where the same switch would mean something else, nothing changes.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """A context in which matrix products run in dtype while the weights stay float32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device; a GPU fetches it while the host goes on."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def describe(device: torch.device) -> str:
    """The device as one would name it to a person."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)" if device.type == "cpu" else str(device)


def compiled(model: nn.Module, example: torch.Tensor) -> nn.Module:
    """The model compiled and tried on tokens (B, T); where that fails, itself, and a warning."""
    try:
        fast = torch.compile(model)
        with torch.random.fork_rng():  # the trial's dropout must not move the run's random stream
            fast(example, example)[1].backward()
    except Exception as error:  # whatever a compiler may raise, the uncompiled model still works
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"compile: going on without, since it failed: {reason}", stacklevel=2)
        return model
    finally:
        model.zero_grad(set_to_none=True)
    return fast


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of the random streams that dropout draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Puts the streams back; that of a device which drew nothing before begins at its seed."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])


@contextlib.contextmanager
def memory_advice(advice: str) -> Iterator[None]:
    """Turns running out of memory into a UserError that ends with the advice."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise UserError(f"out of memory: {advice}") from error
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # the CPU allocator's words
            raise
        raise UserError(f"out of memory: {advice}") from error
