"""Pictures. matplotlib is imported where one is drawn: nothing else needs it."""

import warnings
from pathlib import Path

from checkpoint import replacing

# Of the colours by Okabe and Ito for eyes of every kind; these differ in lightness too.
VALIDATION, TRAINING = "#0072B2", "#E69F00"


def loss_curves(history: list[dict], path: Path, title: str) -> None:
    """Draws training and validation loss over the steps, and marks the best step.

    history: a dict for each evaluation, in order, with step, train_loss and val_loss.
    path: its ending is the format, such as .png or .svg. Raises ImportError without matplotlib.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss, nats per character")
    axes.set_title(title, loc="left", parse_math=False)
    steps = [row["step"] for row in history]
    marked = max(1, len(history) // 25)  # a mark on every one of a thousand points would be a smear
    for label, key, style, colour in (
        ("training", "train_loss", "s--", TRAINING),
        ("validation", "val_loss", "o-", VALIDATION),
    ):
        losses = [row[key] for row in history]
        label = f"{label}, {losses[0]:.2f} to {losses[-1]:.2f}"
        axes.plot(steps, losses, style, color=colour, label=label, markevery=marked, markersize=4)
    best = min(history, key=lambda row: row["val_loss"])
    label = f"best: {best['val_loss']:.3f} at step {best['step']:,}"
    axes.plot(best["step"], best["val_loss"], "*", color="black", markersize=12, label=label)
    axes.set_ylim(*loss_range(history))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    with replacing(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a title in Chinese, say
        figure.savefig(file, format=path.suffix[1:])


def loss_range(history: list[dict]) -> tuple[float, float]:
    """Bottom and top of the axis, from all but the first tenth of the evaluations.

    The untrained model's loss is so far up that it would press the rest of the curve flat.
    """
    late = history[round(len(history) / 10) :]
    losses = [row[key] for row in late for key in ("train_loss", "val_loss")]
    margin = max(0.05, 0.05 * (max(losses) - min(losses)))
    return min(losses) - margin, max(losses) + margin
