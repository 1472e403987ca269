"""Runs on the disk: files written whole or not at all, checkpoints loaded without running code."""

import contextlib
import csv
import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from filelock import FileLock, Timeout

from model import ModelConfig, Transformer
from settings import UserError
from tokenizer import CharTokenizer, load_tokenizer

FORMAT = 2
RUN_FILES = ("last.pt", "best.pt", "settings.json", "log.csv", "samples.txt", "loss.png")
KEYS = {"format", "model_config", "model", "tokenizer", "settings", "step", "val_loss"}


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` once the block ends well; until then nothing changes.

    Raises UserError where the disk is full or may not be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{path}: {reason}; what was saved there before is untouched") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes a rename in the folder last through a power cut, where the system can."""
    with contextlib.suppress(OSError):  # Windows cannot open a folder
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Puts text, in UTF-8, in the place of what the file held."""
    with replacing(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps the folder for this process; the system lets go of it even if the process is killed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", timeout=0).acquire()
    except Timeout:
        raise UserError(
            f"{folder}: another process is writing a run there; choose another"
        ) from None
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; choose another with --out_dir") from error
    with lock:
        yield


def clear(folder: Path) -> None:
    """Removes a run's files from its folder, and nothing else."""
    for name in RUN_FILES:
        (folder / name).unlink(missing_ok=True)


def save_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes a dict of tensors and plain values, with the format's number added."""
    with replacing(path) as file:
        try:
            torch.save({"format": FORMAT, **checkpoint}, file)
        except RuntimeError as error:  # torch's writer hides what the file said
            raise OSError(errno.ENOSPC, "could not be written; is the disk full?") from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """What `save_checkpoint` wrote, with its tensors on the CPU.

    Raises UserError for whatever else the path may be; code in a pickle is not run.
    """
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise UserError(f"{path}: {found}; expected a checkpoint such as out/fairy_tales/best.pt")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises nearly anything for a file that is not its own
        raise UserError(f"{path}: damaged or no checkpoint of this program{other(path)}") from error
    if not isinstance(checkpoint, dict) or not checkpoint.keys() >= KEYS:
        raise UserError(f"{path}: a file of another program, or its weights alone")
    if checkpoint["format"] != FORMAT:
        raise UserError(
            f"{path}: format {checkpoint['format']}; this version reads format {FORMAT}: "
            "train anew, or use the version that wrote it"
        )
    return checkpoint


def other(path: Path) -> str:
    """The hint that names the run's other checkpoint, if there is one."""
    twin = path.with_name({"last.pt": "best.pt", "best.pt": "last.pt"}.get(path.name, path.name))
    return f"; {twin} may still be good" if twin != path and twin.is_file() else ""


def load_model(
    path: Path, device: torch.device | str = "cpu"
) -> tuple[Transformer, CharTokenizer, dict[str, Any]]:
    """A checkpoint's model (in eval mode, on the device), its tokenizer, and all that is in it."""
    checkpoint = load_checkpoint(path)
    model, tokenizer = build_model(checkpoint, path)
    return model.to(device).eval(), tokenizer, checkpoint


def build_model(checkpoint: dict[str, Any], path: Path) -> tuple[Transformer, CharTokenizer]:
    """The model that a checkpoint describes, with its weights; UserError where they do not fit."""
    try:
        model = Transformer(ModelConfig(**checkpoint["model_config"]))
        tokenizer = load_tokenizer(checkpoint["tokenizer"])
        differing = differences(model.state_dict(), checkpoint["model"])
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        raise UserError(f"{path}: its model is none of this version's: {error}") from error
    if tokenizer.vocab_size != model.config.vocab_size:
        differing = [f"its tokenizer knows {tokenizer.vocab_size} characters, not as many"]
    if differing:
        raise UserError(f"{path}: its weights are not those of its config: {'; '.join(differing)}")
    model.load_state_dict(checkpoint["model"])
    return model, tokenizer


def differences(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    """Where two sets of weights differ in names or shapes, in words; the first three."""
    differing = [f"{name} is missing" for name in expected if name not in found]
    differing += [f"{name} is not expected" for name in found if name not in expected]
    differing += [
        f"{name} is {tuple(found[name].shape)}, expected {tuple(weight.shape)}"
        for name, weight in expected.items()
        if name in found and found[name].shape != weight.shape
    ]
    return differing[:3] + ["..."] * (len(differing) > 3)


def best_row(history: list[dict[str, Any]]) -> dict[str, Any]:
    """The evaluation with the lowest validation loss, the first of equals."""
    return min(history, key=lambda row: row["val_loss"])


def log_table(history: list[dict[str, Any]]) -> str:
    """The evaluations, of which there is one at least, as CSV without the samples."""
    columns = [name for name in history[0] if name != "sample"]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(history)
    return text.getvalue()


def newest_run(out: Path) -> Path:
    """The folder below `out` in which a checkpoint was written last; UserError if there is none."""
    checkpoints = [*out.glob("**/last.pt"), *out.glob("**/best.pt")]
    if not checkpoints:
        raise UserError(
            f"{out}: no run in it; train one: python train.py config/fairy_tales_cpu.py"
        )
    return max(checkpoints, key=lambda path: path.stat().st_mtime).parent
