"""What several tests share: a page of text, prepared, and the smallest run on it."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for models this small, threads wait on each other

TINY = [
    "--dataset=page", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32",
    "--batch_size=4", "--dropout=0.1", "--max_iters=12", "--eval_interval=4", "--eval_iters=2",
]  # fmt: skip


@pytest.fixture
def texts() -> Path:
    """The folder of real texts that FAIRY_TALE_TEXTS names; without it the test is skipped."""
    folder = os.environ.get("FAIRY_TALE_TEXTS")
    if not folder:
        pytest.skip("FAIRY_TALE_TEXTS names no folder of real texts")
    return Path(folder)


@pytest.fixture(scope="session")
def tale() -> str:
    """A tale that ships with the repository."""
    return (REPOSITORY / "data" / "tales" / "blue-ore.txt").read_text("utf-8")


@pytest.fixture(scope="session")
def prepare_text(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Prepares a text under a name, in a data folder of its own or in the one given."""
    import prepare

    def prepare_text(text: str, name: str, data_dir: Path | None = None) -> Path:
        data_dir = data_dir or tmp_path_factory.mktemp("data")
        file = data_dir / f"{name}.txt"
        file.write_text(text, "utf-8")
        with contextlib.redirect_stdout(None):
            prepare.main(["--text", str(file), "--name", name, "--data_dir", str(data_dir)])
        return data_dir

    return prepare_text


@pytest.fixture(scope="session")
def data_dir(tale: str, prepare_text: Callable[..., Path]) -> Path:
    """A data folder with `page`, the beginning of a tale, and `other`, some more of it."""
    return prepare_text(tale[1500:3000], "other", prepare_text(tale[:1500], "page"))


@pytest.fixture(scope="session")
def tiny(data_dir: Path) -> Callable[..., int]:
    """Trains a tiny model into a folder, or goes on with that; gives the exit code.

    It draws no picture and does not wait for the disk: each takes longer than all the rest.
    """
    import train

    def tiny(folder: Path, *argv: str) -> int:
        start = [] if "--resume" in argv else TINY
        places = ["--data_dir", str(data_dir), "--out_dir", str(folder)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "SAMPLE_LENGTH", 8)
            patch.setattr(train, "loss_curves", lambda history, path, title: None)
            patch.setattr(os, "fsync", lambda descriptor: None)
            return train.main([*start, *places, *argv])

    return tiny


@pytest.fixture(autouse=True)
def ordinary_interrupts() -> Iterator[None]:
    """Ctrl-C does what it does in a terminal, also where a script in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
