"""The rules of plots.py; what a picture says is read from the comments in its SVG."""

import importlib
import math
import re
import sys

import pytest

import plots
from plots import loss_curves, loss_range


def history_of(count):
    """Evaluations every 50 steps: an untrained 4.4, and a validation loss that rises again."""
    return [
        {
            "step": 50 * i,
            "train_loss": 1 + 3.4 * math.exp(-2 * i),
            "val_loss": 1.1 + 3.3 * math.exp(-2 * i) + 0.5 * i / count,
            "learning_rate": 1e-3,
        }
        for i in range(count)
    ]


def drawn(history, path, title="a run"):
    loss_curves(history, path, title)
    return path.read_text("utf-8")


@pytest.mark.parametrize("count", [1, 2, 25, 1000])
def test_a_picture_of_any_number_of_evaluations(tmp_path, count):
    """One row at the first evaluation, a thousand at the end of a long run: PNG, and no warning."""
    loss_curves(history_of(count), tmp_path / "loss.png", "a run")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_a_picture_names_what_it_shows(tmp_path):
    """Axes with units, both curves in their colours, and the step of the lowest validation loss."""
    svg = drawn(history_of(25), tmp_path / "loss.svg")
    texts = re.findall(r"<!-- (.*?) -->", svg)
    best = min(history_of(25), key=lambda row: row["val_loss"])
    assert {
        "a run",
        "step",
        "loss, nats per character",
        "training, 4.40 to 1.00",
        "validation, 4.40 to 1.58",
        f"best: {best['val_loss']:.3f} at step 150",
        "1,200",
    } <= set(texts)
    assert "4.0" not in texts  # the axis ends below the untrained loss
    assert plots.TRAINING.lower() in svg and plots.VALIDATION.lower() in svg
    assert "stroke-dasharray" in svg


def test_a_single_evaluation_is_at_a_single_step(tmp_path):
    """matplotlib alone would mark fractions of a step, all of them written as 0."""
    texts = re.findall(r"<!-- (.*?) -->", drawn(history_of(1), tmp_path / "loss.svg"))
    assert texts[: texts.index("step")] == ["0"]


@pytest.mark.parametrize("title", ["童话", "cost_$5_of_$7", "a\\b_{c"])
def test_any_name_may_be_the_title(tmp_path, title):
    """A run's name may lack glyphs in the font, or look like mathematics that does not parse."""
    assert f"<!-- {title} -->" in drawn(history_of(2), tmp_path / "loss.svg", title)


@pytest.mark.parametrize(("count", "top"), [(1, 4.45), (5, 4.57), (6, 1.68), (100, 1.65)])
def test_the_untrained_loss_does_not_press_the_curve_flat(count, top):
    """The axis fits what comes after the first tenth; with few evaluations it shows them all."""
    history = history_of(count)
    low, high = loss_range(history)
    assert high == pytest.approx(top, abs=0.01)
    losses = [row[key] for row in history for key in ("train_loss", "val_loss")]
    assert min(losses) - 0.2 < low < min(losses)


def test_a_failure_leaves_the_picture_before_as_it_was(tmp_path, monkeypatch):
    """The file is replaced when the new one is whole, never written into."""
    path = tmp_path / "loss.png"
    loss_curves(history_of(2), path, "a run")
    before = path.read_bytes()

    def fail(self, file, **_):
        file.write(b"half a picture")
        raise RuntimeError

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    with pytest.raises(RuntimeError):
        loss_curves(history_of(3), path, "a run")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_no_screen_and_no_global_state(tmp_path, monkeypatch):
    """pyplot picks a window system, and keeps every figure until it is told to close it."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    loss_curves(history_of(2), tmp_path / "loss.png", "a run")


def test_without_matplotlib_only_drawing_fails(tmp_path, monkeypatch):
    """Training must run without it; the caller turns the ImportError into a note."""
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    importlib.reload(plots)
    with pytest.raises(ImportError):
        plots.loss_curves(history_of(2), tmp_path / "loss.png", "a run")
    assert not list(tmp_path.iterdir())
