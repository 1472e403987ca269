"""What came of several runs, side by side: a table, results.csv and results.png."""

import itertools
import math
import statistics
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from checkpoint import best_row, build_model, load_checkpoint, log_table, write_text
from plots import VALIDATION, draw_curve, label_steps, looks, loss_range, new_figure, save
from settings import UserError, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLACES = ("data_dir", "offline", "out_dir")  # settings that change no result

Groups = dict[tuple, list[dict[str, Any]]]  # by what differs but the seed: the runs, of all seeds


def compare(folders: list[Path], out: Path) -> None:
    """Prints a table of the runs, and writes results.csv and results.png to the folder `out`.

    Raises UserError where there is no run.
    """
    if not folders:
        raise UserError("no run to compare; give the folders of some")
    runs = sorted(map(read_run, folders), key=lambda run: run["val_loss"])
    settings = [name for name in runs[0]["settings"] if name not in (*PLACES, "seed")]
    names = [n for n in settings if len({repr(run["settings"].get(n)) for run in runs}) > 1]
    groups = group(runs, names)
    print(table(groups, names))
    write_text(out / "results.csv", log_table([record(run, names) for run in runs]))
    try:
        chart(groups, names, out / "results.png")
    except ModuleNotFoundError:
        print("matplotlib is not installed, so there is no picture: pip install matplotlib")
    print(f"each run by itself: {out / 'results.csv'}; in a picture: results.png beside it")


def read_run(folder: Path) -> dict[str, Any]:
    """A run in figures, from its last checkpoint."""
    path = folder / "last.pt"
    saved = load_checkpoint(path)
    settings, best = saved["settings"], best_row(saved["history"])
    one = settings["batch_size"] * settings["block_size"] * settings["gradient_accumulation_steps"]
    return {
        "run": folder.name,
        "settings": settings,
        "parameters": build_model(saved, path)[0].parameter_count(),
        "val_loss": best["val_loss"],
        "bits_per_character": best["bits_per_character"],
        "tokens_per_second": one * saved["step"] / max(saved["seconds"], 1e-9),
        "seconds": saved["seconds"],
        "best_step": best["step"],
        "steps": saved["step"],
        "history": saved["history"],
    }


def in_words(folder: Path) -> str:
    """A run in a line."""
    run = read_run(folder)
    return (
        f"{run['val_loss']:.4f} nats at step {run['best_step']}, {run['seconds']:.0f} seconds of "
        f"training, {run['tokens_per_second']:,.0f} tokens/s"
    )


def group(runs: list[dict[str, Any]], names: list[str]) -> Groups:
    """The runs by their values of these settings, in the order of the values."""
    groups: Groups = {}
    for run in runs:
        groups.setdefault(tuple(run["settings"].get(name) for name in names), []).append(run)

    def order(values: tuple) -> list[tuple[float, str]]:
        return [(v, "") if isinstance(v, int | float) else (0, show(v)) for v in values]

    return {values: groups[values] for values in sorted(groups, key=order)}


def record(run: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """A run as a line of results.csv."""
    varied = {name: run["settings"].get(name) for name in (*names, "seed")}
    rest = {name: value for name, value in run.items() if name not in ("settings", "history")}
    return {"run": run["run"]} | varied | rest


def table(groups: Groups, names: list[str]) -> str:
    """A line for each group, the lowest mean loss first and starred; spread is over the seeds."""
    lines = [["", *names, "parameters", "loss", "spread", "bits/char", "tokens/s", "seconds",
              "best step"]]  # fmt: skip
    for values, runs in sorted(groups.items(), key=lambda item: mean(item[1], "val_loss")):
        losses = [run["val_loss"] for run in runs]
        spread = f"±{statistics.stdev(losses):.4f}" if len(runs) > 1 else ""
        lines.append([
            "*" if len(lines) == 1 else "", *map(show, values),
            f"{runs[0]['parameters']:,}", f"{mean(runs, 'val_loss'):.4f}", spread,
            f"{mean(runs, 'bits_per_character'):.3f}", f"{mean(runs, 'tokens_per_second'):,.0f}",
            f"{mean(runs, 'seconds'):.1f}", f"{mean(runs, 'best_step'):,.0f}",
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([f"{c:>{w}}" for c, w in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def mean(runs: list[dict[str, Any]], key: str) -> float:
    """The mean of a figure over runs."""
    return statistics.mean(run[key] for run in runs)


# ----------------------------------------------------------------------------------- the picture


def chart(groups: Groups, names: list[str], path: Path) -> None:
    """Draws the loss and the speed over what was varied, and the curves of all the runs."""
    figure = new_figure(12, 9)
    axes = figure.subplot_mosaic([["loss", "speed"], ["curves", "curves"]])
    draw = draw_heat if len(names) == 2 else draw_points
    draw(axes["loss"], groups, names, "val_loss", ".3f")
    axes["loss"].set_title("best validation loss, nats per character (lower is better)")
    draw(axes["speed"], groups, names, "tokens_per_second", ",.0f")
    axes["speed"].set_title("speed of training, tokens per second (higher is better)")
    draw_runs(axes["curves"], groups, names)
    axes["curves"].set_title("validation loss of every run")
    save(figure, path)


def draw_points(axes: "Axes", groups: Groups, names: list[str], key: str, form: str) -> None:
    """Draws a dot for each run and a line through the means, over the settings varied."""
    from matplotlib.ticker import StrMethodFormatter

    axes.plot(range(len(groups)), [mean(runs, key) for runs in groups.values()], "-", color="0.7")
    for place, runs in enumerate(groups.values()):
        axes.plot([place] * len(runs), [run[key] for run in runs], "o", color=VALIDATION)
        axes.plot(place, mean(runs, key), "_", color="black", markersize=24)
        axes.annotate(
            f"{mean(runs, key):{form}}", (place, mean(runs, key)), (16, 0), va="center",
            textcoords="offset points", bbox={"fc": "white", "ec": "none", "pad": 1},
        )  # fmt: skip
    labels = ["\n".join(map(show, values)) for values in groups]
    axes.set_xticks(range(len(groups)), labels)
    axes.set_xlabel(textwrap.fill(", ".join(names), 50))
    axes.yaxis.set_major_formatter(StrMethodFormatter(f"{{x:{form}}}"))
    axes.margins(x=0.2, y=0.15)
    axes.grid(alpha=0.3)


def draw_heat(axes: "Axes", groups: Groups, names: list[str], key: str, form: str) -> None:
    """Draws the means over two settings as colours, with the figures written in."""
    across, down = (list(dict.fromkeys(values[i] for values in groups)) for i in (0, 1))
    cells = torch.full((len(down), len(across)), math.nan)
    for (x, y), runs in groups.items():
        cells[down.index(y), across.index(x)] = mean(runs, key)
    palette = "cividis_r" if key == "val_loss" else "cividis"  # what is better is brighter
    image = axes.imshow(cells.numpy(), cmap=palette, aspect="auto")
    for (y, row), x in itertools.product(enumerate(cells.tolist()), range(len(across))):
        text = "none" if math.isnan(row[x]) else f"{row[x]:{form}}"
        colour = "white" if sum(image.to_rgba(row[x])[:3]) < 1.4 else "black"
        axes.text(x, y, text, ha="center", va="center", color=colour)
    axes.set_xticks(range(len(across)), map(show, across))
    axes.set_yticks(range(len(down)), map(show, down))
    axes.set(xlabel=names[0], ylabel=names[1])


def draw_runs(axes: "Axes", groups: Groups, names: list[str]) -> None:
    """Draws the validation loss of every run over the steps, those of a group alike."""
    for (values, runs), look in zip(groups.items(), looks(len(groups)), strict=True):
        pairs = zip(names, map(show, values), strict=True)
        label = ", ".join(map(" ".join, pairs)) or "every run"
        for run in runs:
            draw_curve(axes, run["history"], "val_loss", "-", label=label, **look)
            label = None  # in the legend once
    axes.set_ylim(*loss_range([run["history"] for runs in groups.values() for run in runs]))
    axes.set_ylabel("nats per character")
    label_steps(axes)
    axes.grid(alpha=0.3)
    axes.legend(ncols=1 + len(groups) // 9)
