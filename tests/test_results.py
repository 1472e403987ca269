"""The rules of results.py, on figures made up here and on runs of tiny models."""

import csv
import re
import statistics
import sys

import pytest

import results
from checkpoint import load_checkpoint
from results import chart, compare, group, read_run, table


def run_of(loss, speed=1000.0, **settings):
    """A run in figures, as read_run gives it."""
    steps = (0, 10, 20)
    return {
        "run": ",".join(f"{name}={value}" for name, value in settings.items()),
        "settings": settings,
        "parameters": 28969,
        "val_loss": loss,
        "bits_per_character": loss / 0.693147,
        "tokens_per_second": speed,
        "seconds": 12.5,
        "best_step": 20,
        "steps": 20,
        "history": [
            {"step": step, "train_loss": loss + 2 - step / 10, "val_loss": loss + 2 - step / 10}
            for step in steps
        ],
    }


HEADS = [run_of(2.5 - h / 10 + s / 100, 900 * h, n_head=h, seed=s) for h in (1, 2) for s in (1, 3)]


def cells(text):
    """The cells of a table on the screen."""
    return [re.split(r"  +", line.strip()) for line in text.splitlines()]


def texts(path):
    """What a picture says, from the comments in its SVG."""
    return re.findall(r"<!-- (.*?) -->", path.read_text("utf-8"))


# ------------------------------------------------------------------------------------ the table


def test_the_table_means_over_seeds():
    """The lowest loss first and starred, its spread the standard deviation; figures with units."""
    first, *lines = cells(table(group(HEADS, ["n_head"]), ["n_head"]))
    assert first == ["n_head", "parameters", "loss", "spread", "bits/char", "tokens/s", "seconds",
                     "best step"]  # fmt: skip
    spread = statistics.stdev([2.31, 2.33])
    assert lines[0] == ["*", "2", "28,969", "2.3200", f"±{spread:.4f}", "3.347", "1,800", "12.5",
                        "20"]  # fmt: skip
    assert [line[:2] for line in lines[1:]] == [["1", "28,969"]]


def test_the_table_is_aligned():
    """Figures end where those above them end, however long they are."""
    runs = [run_of(2.0, 5.0, n_head=1, seed=1), run_of(3.0, 123456.0, n_head=16, seed=1)]
    lines = table(group(runs, ["n_head"]), ["n_head"]).splitlines()
    ends = [{match.end() for match in re.finditer(r"\S+(?: \S+)*", line)} for line in lines]
    assert ends[2] <= ends[0] and ends[1] - ends[0] == {1}  # the star


def test_one_seed_has_no_spread():
    assert "±" not in table(group(HEADS[:1], ["n_head"]), ["n_head"])


def test_groups_are_in_the_order_of_their_values():
    """Not in that of the folders' names, where 16 comes before 2; none and words have a place."""
    runs = [run_of(2.0, n_head=h, norm=norm) for norm in ("b", "a") for h in (16, 2)]
    assert list(group(runs, ["norm", "n_head"])) == [("a", 2), ("a", 16), ("b", 2), ("b", 16)]
    runs = [run_of(2.0, grad_clip=clip) for clip in (1.0, None, 0.5)]
    assert list(group(runs, ["grad_clip"])) == [(None,), (0.5,), (1.0,)]


# ----------------------------------------------------------------------------------- the picture


def test_one_setting_is_two_charts_and_all_the_curves(tmp_path):
    """Loss and speed with their means and units, and a curve's name once for all its seeds."""
    chart(group(HEADS, ["n_head"]), ["n_head"], tmp_path / "results.svg")
    told = texts(tmp_path / "results.svg")
    assert {
        "best validation loss, nats per character (lower is better)",
        "speed of training, tokens per second (higher is better)",
        "2.420", "2.320", "900", "1,800", "n_head", "step", "nats per character",
    } <= set(told)  # fmt: skip
    assert told.count("n_head 1") == told.count("n_head 2") == 1


def test_two_settings_are_heat_maps(tmp_path):
    """Each cell tells its figure; a combination that is missing is told to be."""
    runs = [run_of(2.0 + h / 10 + n, n_head=h, n_layer=n) for h in (1, 2) for n in (3, 4)][:3]
    names = ["n_head", "n_layer"]
    chart(group(runs, names), names, tmp_path / "results.svg")
    told = texts(tmp_path / "results.svg")
    assert {"5.100", "6.100", "5.200", "none", "n_head", "n_layer"} <= set(told)
    assert told.count("none") == 2


@pytest.mark.parametrize("names", [[], ["a"], ["a", "b"], ["a", "b", "c"]])
def test_a_picture_of_whatever_varies(tmp_path, names):
    """Seeds alone, many settings, and values that look like mathematics."""
    runs = [run_of(2.0 + i, seed=i, **dict.fromkeys(names, f"童$x_$5{i}")) for i in (1, 2)]
    chart(group(runs, names), names, tmp_path / "results.png")
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------- from runs


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Two runs that differ in their seeds and one with more heads; not to be written to."""
    folder = tmp_path_factory.mktemp("runs")
    tiny(folder / "a", "--seed", "1")
    tiny(folder / "b", "--seed", "2")
    tiny(folder / "c", "--n_head", "4")
    return [folder / name for name in "abc"]


def test_figures_are_those_of_the_checkpoint(runs):
    """The best evaluation, not the last; speed by the time that updates took."""
    figures, saved = read_run(runs[0]), load_checkpoint(runs[0] / "last.pt")
    assert figures["val_loss"] == min(row["val_loss"] for row in saved["history"])
    assert figures["tokens_per_second"] == pytest.approx(4 * 32 * 12 / saved["seconds"])
    assert figures["parameters"] == sum(weight.numel() for weight in saved["model"].values())


def test_what_compare_leaves(runs, tmp_path, monkeypatch, capsys):
    """A line for each run with what varies, the best first; a group for each table line."""
    monkeypatch.setattr(results, "chart", lambda groups, names, path: path.touch())
    compare(runs, tmp_path)
    with (tmp_path / "results.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [*lines[0]] == ["run", "n_head", "seed", "parameters", "val_loss", "bits_per_character",
                           "tokens_per_second", "seconds", "best_step", "steps"]  # fmt: skip
    assert sorted((line["run"], line["n_head"], line["seed"]) for line in lines) == [
        ("a", "2", "1"), ("b", "2", "2"), ("c", "4", "1337"),
    ]  # fmt: skip
    assert (tmp_path / "results.png").exists()
    table = capsys.readouterr().out.splitlines()[:3]
    assert sorted(line.count("±") for line in table) == [0, 0, 1]


def test_without_matplotlib_there_is_the_rest(runs, tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    compare(runs[:2], tmp_path)
    assert "no picture: pip install matplotlib" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]
