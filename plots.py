"""Pictures of trained runs, and of what is inside them.

usage: python plots.py loss out/a out/b ...                     losses and learning rates
       python plots.py attention out/a --text "Once upon a time"    which characters look at which
       python plots.py embeddings out/a                         characters and positions as points
       python plots.py next out/a --text "Once upon a time"     how likely each character was
       python plots.py report out/a                             a page of all this

Without a run's folder the newest under out/ is taken; the picture goes to the run's folder, or to
--out FILE, whose ending is its format: .png or .svg, and .html for the last two.
"""

import itertools
import math
import os
import unicodedata
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

import settings
from checkpoint import load_checkpoint, load_model, newest_run, replacing
from model import Transformer
from settings import UserError, resolve, run, setting
from tokenizer import CharTokenizer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Of the colours by Okabe and Ito for eyes of every kind; these differ in lightness too.
VALIDATION, TRAINING = "#0072B2", "#E69F00"
KINDS = {
    "vowel": "#D55E00", "consonant": "#0072B2", "capital": "#009E73", "other letter": "#000000",
    "digit": "#E69F00", "punctuation or space": "#CC79A7",
}  # fmt: skip
LONGEST = 64  # characters of an attention map: more would fill a wall
VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥"}


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where to"""

    endings = (".png", ".svg")

    out: str | None = setting(None, "the file to write; none: one in the run's folder")

    def conflicts(self) -> Iterator[tuple[set[str], str]]:
        """A format that is not offered."""
        if self.out and Path(self.out).suffix not in self.endings:
            endings = " or ".join(self.endings)
            yield {"out"}, f"out = {self.out!r}: expected a name that ends in {endings}"


@dataclass(frozen=True, kw_only=True)
class OneRun:
    """Whose"""

    run: str | None = setting(None, "a run's folder; none: the newest under out/")

    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.run) if self.run else newest_run(settings.runs_folder())


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What it reads"""

    text: str | None = setting(None, "a text; none: the beginning of what the run wrote last")


@dataclass(frozen=True, kw_only=True)
class LossSettings(Destination):
    """Whose and how"""

    run: tuple[str, ...] = setting((), "runs' folders; none: the newest under out/")
    over: str = setting("step", "what the curves run over", ("step", "minutes"))
    log: bool = setting(False, "a logarithmic axis, which shows more of the beginning")


@dataclass(frozen=True, kw_only=True)
class AttentionSettings(OneRun, Reading, Destination):
    """Attention maps"""


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings(OneRun, Destination):
    """Embeddings"""


def main(argv: list[str]) -> None:
    """Draws the picture that the first argument names."""
    import report  # it draws with what is here

    commands = {
        "loss": (LossSettings, draw_loss),
        "attention": (AttentionSettings, draw_attention),
        "embeddings": (EmbeddingSettings, draw_embeddings),
        "next": (report.PageSettings, report.write_next),
        "report": (report.PageSettings, report.write_report),
    }
    name, *rest = argv or [""]
    if name in ("-h", "--help"):
        print(__doc__.strip())
        return
    if name not in commands:
        raise UserError(f"{name!r}: expected one of {', '.join(commands)}, and then a run's folder")
    kind, draw = commands[name]
    try:
        print(f"wrote {draw(resolve(kind, rest, __doc__, 'run'))}")
    except ModuleNotFoundError as error:
        raise UserError("matplotlib is not installed: pip install matplotlib") from error


def draw_loss(chosen: LossSettings) -> Path:
    """The losses of one run, or of several in one picture."""
    folders = [Path(run) for run in chosen.run] or [newest_run(settings.runs_folder())]
    histories = [load_checkpoint(folder / "last.pt")["history"] for folder in folders]
    if len(folders) == 1:
        path = Path(chosen.out or folders[0] / "loss.png")
        title = f"Losses of {folders[0].resolve().name}"
        loss_curves(histories[0], path, title, chosen.over, chosen.log)
        return path
    path = Path(chosen.out or folders[0].parent / "losses.png")
    common = os.path.commonpath([folder.resolve().parent for folder in folders])
    names = [str(folder.resolve().relative_to(common)) for folder in folders]
    compare_losses(dict(zip(names, histories, strict=True)), path, chosen.over, chosen.log)
    return path


def draw_attention(chosen: AttentionSettings) -> Path:
    """The attention maps of a run's best model, on a text."""
    folder = chosen.folder()
    model, tokenizer, checkpoint = load_model(folder / "best.pt")
    longest = min(LONGEST, model.config.block_size)
    text = chosen.text or default_text(checkpoint, min(longest, 40))
    path = Path(chosen.out or folder / "attention.png")
    weights = attention_weights(model, read_text(text, tokenizer, longest))
    attention_maps(weights, text, path, f"Attention in {folder.resolve().name}")
    return path


def draw_embeddings(chosen: EmbeddingSettings) -> Path:
    """The embeddings of a run's best model."""
    folder = chosen.folder()
    model, tokenizer, _ = load_model(folder / "best.pt")
    path = Path(chosen.out or folder / "embeddings.png")
    embedding_map(model, tokenizer, path, f"Embeddings of {folder.resolve().name}")
    return path


def default_text(checkpoint: dict, length: int) -> str:
    """The beginning of what the run wrote last."""
    sample = checkpoint["history"][-1]["sample"]
    return sample.lstrip("\n")[:length] or sample[:length]


def read_text(text: str, tokenizer: CharTokenizer, longest: int) -> Tensor:
    """The ids of a text, (T,). Raises UserError for unknown characters, or too many."""
    if len(text) > longest:
        raise UserError(f"text has {len(text)} characters; at most {longest} can be shown")
    try:
        return torch.tensor(tokenizer.encode(text))
    except ValueError as error:
        raise UserError(f"text = {text!r}: {error}") from error


def visible(character: str) -> str:
    """A character as a label."""
    return VISIBLE.get(character, character if character.isprintable() else "�")


# ---------------------------------------------------------------------------------------- losses


def loss_curves(
    history: list[dict], path: Path, title: str, over: str = "step", log: bool = False
) -> None:
    """Draws training and validation loss, the best step marked, and the learning rate below.

    history: a dict for each evaluation, in order: step, seconds, train_loss, val_loss and
        learning_rate.
    path: its ending is the format, .png or .svg.
    over: step, or minutes spent on updates. log: that on a logarithmic axis.
    Raises ImportError without matplotlib, as does everything here that draws.
    """
    figure, above, below = loss_frame([history], title, over, log)
    for label, key, style, colour in (
        ("training", "train_loss", "s--", TRAINING),
        ("validation", "val_loss", "o-", VALIDATION),
    ):
        label = f"{label}, {history[0][key]:.2f} to {history[-1][key]:.2f}"
        draw_curve(above, history, key, style, over, color=colour, label=label)
    best = min(history, key=lambda row: row["val_loss"])
    label = f"best: {best['val_loss']:.3f} at step {best['step']:,}"
    draw_curve(above, [best], "val_loss", "*", over, color="black", markersize=12, label=label)
    draw_curve(below, history, "learning_rate", "-", over, color="0.3")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)


def compare_losses(
    histories: dict[str, list[dict]], path: Path, over: str = "step", log: bool = False
) -> None:
    """Draws the losses of several runs, by name, in one picture; a star marks each one's best."""
    title = "Losses of several runs"
    figure, above, below = loss_frame(list(histories.values()), title, over, log)
    for (name, history), look in zip(histories.items(), looks(len(histories)), strict=True):
        best = min(history, key=lambda row: row["val_loss"])
        label = f"{name}, best {best['val_loss']:.3f} at step {best['step']:,}"
        draw_curve(above, history, "val_loss", "-", over, label=label, **look)
        draw_curve(above, [best], "val_loss", "*", over, color=look["color"], markersize=12)
        draw_curve(above, history, "train_loss", ":", over, color=look["color"], alpha=0.7)
        draw_curve(below, history, "learning_rate", "-", over, color=look["color"])
    above.plot([], [], ":", color="0.3", label="dotted: training")
    figure.legend(loc="outside lower left", frameon=False)
    save(figure, path)


def loss_frame(
    histories: list[list[dict]], title: str, over: str, log: bool
) -> tuple["Figure", "Axes", "Axes"]:
    """A figure, its axes for losses, and below them those for learning rates."""
    figure = new_figure(8, 6 + 0.2 * len(histories))  # a line of the legend for each
    above, below = figure.subplots(2, sharex=True, height_ratios=(4, 1))
    above.set_title(title, loc="left")
    above.set_ylabel("loss, nats per character")
    above.set_ylim(*loss_range(histories))
    below.set_ylabel("learning rate")
    if log:  # linear up to the first evaluation, so that step 0 is on it
        first = min(places(history[:2], over)[-1] for history in histories)
        below.set_xscale("symlog", linthresh=first or 1)
    if over == "step":
        label_steps(below)
    else:
        below.set_xlabel("minutes")
    above.grid(alpha=0.3)
    below.grid(alpha=0.3)
    return figure, above, below


def label_steps(axes: "Axes") -> None:
    """Makes the x axis one of steps: whole ones, and legible in the thousands."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.set_xlabel("step")
    if axes.get_xscale() == "linear":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def draw_curve(
    axes: "Axes", history: list[dict], key: str, style: str, over: str = "step", **look: Any
) -> None:
    """Draws what the evaluations say of `key` over their steps or minutes."""
    values = [row[key] for row in history]
    marked = max(1, len(history) // 25)  # a mark on every one of a thousand points would be a smear
    look = {"markersize": 4, "markevery": marked} | look
    axes.plot(places(history, over), values, style, **look)


def places(history: list[dict], over: str) -> list[float]:
    """Where the evaluations lie on the x axis."""
    return [row["step"] if over == "step" else row["seconds"] / 60 for row in history]


def loss_range(histories: list[list[dict]]) -> tuple[float, float]:
    """Bottom and top of the axis, from all but the first tenth of each run's evaluations.

    The untrained model's loss is so far up that it would press the rest of the curve flat.
    """
    late = [row for history in histories for row in history[round(len(history) / 10) :]]
    losses = [row[key] for row in late for key in ("train_loss", "val_loss")]
    margin = max(0.05, 0.05 * (max(losses) - min(losses)))
    return min(losses) - margin, max(losses) + margin


# ------------------------------------------------------------------------------------- attention


@torch.inference_mode()
def attention_weights(model: Transformer, tokens: Tensor) -> Tensor:
    """What each `Head` attends to as the model reads tokens (T,): (n_layer, n_head, T, T).

    A row is a position that looks, a column one that is looked at; a row's weights add up to 1.
    """
    maps: list[Tensor] = []

    def note(attention: torch.nn.Module, arguments: tuple, _output: Tensor) -> None:
        x, rotation, *_ = arguments
        maps.append(torch.cat([head.weights(x, rotation) for head in attention.heads()]))

    hooks = [block.attention.register_forward_hook(note) for block in model.blocks]
    try:
        model(tokens[None])
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(maps)


def attention_maps(weights: Tensor, text: str, path: Path, title: str) -> None:
    """Draws a map for each layer (down) and head (across), with the characters on both axes.

    weights: (n_layer, n_head, T, T), as `attention_weights` gives them; T characters of text.
    """
    layers, heads, T, _ = weights.shape
    side = 0.6 + max(1.5, 0.12 * T)  # inches: room for a letter of 8 points in each row
    figure = new_figure(side * heads + 1.2, side * layers + 0.8, "compressed")
    figure.suptitle(f"{title}: each row is a character, and shows which ones it looks at")
    grid = figure.subplots(layers, heads, squeeze=False)
    for layer, head in itertools.product(range(layers), range(heads)):
        image = draw_map(grid[layer, head], weights[layer, head], text)
        grid[layer, head].set_title(f"layer {layer + 1}, head {head + 1}", fontsize=9)
    label = "attention weight; grey: the future, which is hidden"
    bar = figure.colorbar(
        image, ax=grid, label=label, shrink=min(1, 6 / (side * layers)), aspect=40, pad=0.01
    )
    bar.set_ticks([0, 0.05, 0.2, 0.5, 1])
    save(figure, path)


def draw_map(axes: "Axes", weights: Tensor, text: str) -> "AxesImage":
    """Draws one head's weights (T, T); gives the image, for the colour bar."""
    from matplotlib.colors import PowerNorm

    future = torch.ones_like(weights, dtype=torch.bool).triu(1)
    axes.set_facecolor("0.85")
    image = axes.imshow(
        weights.masked_fill(future, math.nan).numpy(), cmap="viridis", norm=PowerNorm(0.5, 0, 1)
    )  # the root, so that a weight of 0.05 is seen
    labels = [visible(character) for character in text]
    axes.set_xticks(range(len(text)), labels, fontsize=8, family="monospace")
    axes.set_yticks(range(len(text)), labels, fontsize=8, family="monospace")
    axes.tick_params(length=0, pad=1)
    return image


# ------------------------------------------------------------------------------------ embeddings


@torch.inference_mode()
def embedding_map(model: Transformer, tokenizer: CharTokenizer, path: Path, title: str) -> None:
    """Draws the characters' embeddings in a plane, and how alike those of the positions are."""
    has_positions = model.position_embedding is not None  # rope has none
    figure = new_figure(15 if has_positions else 8, 7.5)
    figure.suptitle(title)
    axes = figure.subplots(1, 1 + has_positions, squeeze=False)[0]
    draw_characters(axes[0], model.token_embedding.weight, tokenizer)
    if has_positions:
        rows = model.position_embedding(torch.arange(model.config.block_size))  # (S, C)
        rows = F.normalize(rows, dim=1)
        image = axes[1].imshow((rows @ rows.T).numpy(), cmap="RdBu_r", vmin=-1, vmax=1)
        axes[1].set(title="How alike the positions are", xlabel="position", ylabel="position")
        figure.colorbar(image, ax=axes[1], label="cosine similarity")
    save(figure, path)


def draw_characters(axes: "Axes", rows: Tensor, tokenizer: CharTokenizer) -> None:
    """Draws the characters where their embeddings (V, C) lie, in the colours of their kinds."""
    points, shares = principal_components(rows)
    kinds = [kind_of(tokenizer.decode([i])) for i in range(len(rows))]
    for kind in filter(kinds.__contains__, KINDS):
        chosen = points[[i for i, other in enumerate(kinds) if other == kind]]
        # The disc shows where a comma is.
        axes.scatter(*chosen.T, s=250, color=KINDS[kind], alpha=0.25, linewidths=0, label=kind)
    size = 12 if len(rows) <= 120 else 6
    for i, place in enumerate(points.tolist()):
        axes.annotate(
            visible(tokenizer.decode([i])), place, color=KINDS[kinds[i]], fontsize=size,
            fontweight="bold", ha="center", va="center",
        )  # fmt: skip
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=6, frameon=False)
    first, second = (f"principal component ({share:.0%} of the variance)" for share in shares)
    axes.set(
        title="Characters, in the plane that separates them most",
        xlabel=f"first {first}",
        ylabel=f"second {second}",
    )


def principal_components(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (N, C) in the plane of most variance, (N, 2), and each axis's share of the variance."""
    centred = F.pad(rows - rows.mean(0), (0, 2))  # even a single column gives two axes
    points = centred @ torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -2:].flip(1)
    return points, points.square().sum(0) / centred.square().sum().clamp(min=1e-12)


def kind_of(character: str) -> str:
    """Which of the KINDS a character is."""
    base = unicodedata.normalize("NFD", character)[0]  # é is a vowel too
    if not character.isalnum():
        return "punctuation or space"
    if not character.isalpha():
        return "digit"
    if character.isupper():
        return "capital"
    if base in "aeiou":
        return "vowel"
    return "consonant" if base.isascii() else "other letter"


# ------------------------------------------------------------------------------------ any figure


def looks(count: int) -> Iterator[dict[str, Any]]:
    """So many ways to draw a curve, told apart by lightness and by the mark as well as by hue."""
    import matplotlib

    colours = matplotlib.colormaps["viridis"]
    for i, mark in zip(range(count), itertools.cycle("osD^vPX*")):
        yield {"color": colours(0.9 * i / max(1, count - 1)), "marker": mark}


def new_figure(width: float, height: float, layout: str = "constrained") -> "Figure":
    """An empty figure of so many inches; no window and no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout=layout)


def save(figure: "Figure", path: Path) -> None:
    """Writes the figure, whole or not at all, in the format of the file's ending."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a run's name may have dollars in it
    with replacing(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a title in Chinese, say
        figure.savefig(file, format=path.suffix[1:])


if __name__ == "__main__":
    run(main)
