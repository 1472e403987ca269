"""Pages of HTML, each one file that needs no other: a run's report, a text by its characters.

`python plots.py report out/run` and `python plots.py next out/run` write them.
"""

import base64
import dataclasses
import shlex
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import plots
from checkpoint import best_row, load_checkpoint, load_model, write_text
from model import Transformer
from settings import TrainSettings, arguments, show
from tokenizer import CharTokenizer

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 72rem }}
body {{ margin: 2rem auto; padding: 0 1rem }}
h1, h2 {{ line-height: 1.2 }}
h2 {{ margin-top: 2.5rem }}
img {{ max-width: 100% }}
pre {{ background: #f4f4f4; padding: 0.8rem; white-space: pre-wrap; overflow-wrap: anywhere }}
table {{ border-collapse: collapse }}
td {{ border-bottom: 1px solid #ddd; padding: 0.15rem 1rem 0.15rem 0; vertical-align: top }}
.strip, .strip ol {{ list-style: none; margin: 0; padding: 0 }}
.strip {{ display: flex; flex-wrap: wrap; gap: 0.5rem 0.2rem; font-family: monospace }}
.strip > li {{ width: 4.2rem; border: 1px solid #ccc; text-align: center }}
.strip b {{ display: block; font-size: 1.5rem }}
.strip ol {{ font-size: 0.8rem; text-align: right; padding: 0.2rem }}
.strip ol li {{ white-space: pre }}
.strip mark {{ background: #f0e442; font-weight: bold }}
</style>
<h1>{title}</h1>
{body}
</html>
"""


@dataclass(frozen=True, kw_only=True)
class PageSettings(plots.OneRun, plots.Reading, plots.Destination):
    """A page"""

    endings = (".html",)


def write_next(chosen: PageSettings) -> Path:
    """A page with the strip of a text."""
    folder = chosen.folder()
    model, tokenizer, checkpoint = load_model(folder / "best.pt")
    text = chosen.text or plots.default_text(checkpoint, min(80, model.config.block_size))
    tokens = plots.read_text(text, tokenizer, model.config.block_size)
    path = Path(chosen.out or folder / "next.html")
    title = f"What {folder.resolve().name} expects next"
    write_text(path, page(title, strip(model, tokenizer, tokens)))
    return path


def write_report(chosen: PageSettings) -> Path:
    """A page with everything about a run."""
    folder = chosen.folder()
    path = Path(chosen.out or folder / "report.html")
    write_text(path, page(f"Run {folder.resolve().name}", "\n".join(sections(chosen, folder))))
    return path


def page(title: str, body: str) -> str:
    """A whole page: the title is text, the body HTML."""
    return PAGE.format(title=escape(title), body=body)


def sections(chosen: PageSettings, folder: Path) -> Iterator[str]:
    """The parts of the report, from what came of the run to how to make it again."""
    model, tokenizer, best = load_model(folder / "best.pt")
    last = load_checkpoint(folder / "last.pt")
    longest = min(plots.LONGEST, model.config.block_size)
    text = chosen.text or plots.default_text(best, min(longest, 24))
    tokens = plots.read_text(text, tokenizer, longest)
    yield rows(facts(model, tokenizer, last))
    yield "<h2>Losses</h2>"
    yield image("Losses over the steps", lambda path: plots.loss_curves(last["history"], path, ""))
    yield "<h2>What it wrote while it learned</h2>"
    yield samples(last["history"])
    yield f"<h2>What it expects next</h2>\n{strip(model, tokenizer, tokens)}"
    yield "<h2>Which characters look at which</h2>"
    weights = plots.attention_weights(model, tokens)
    yield image(
        "Attention maps", lambda path: plots.attention_maps(weights, text, path, "Attention")
    )
    yield "<h2>Characters and positions as points</h2>"
    yield image(
        "Embeddings", lambda path: plots.embedding_map(model, tokenizer, path, "Embeddings")
    )
    yield "<h2>Settings</h2>"
    settings = TrainSettings(**last["settings"])
    yield rows(settings_table(settings))
    yield f"<h2>The same again</h2>\n{commands(settings, folder)}"


def rows(table: list[tuple[str, ...]]) -> str:
    """A table of text."""
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table)
    return "<table>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table>"


def image(what: str, draw: Callable[[Path], None]) -> str:
    """The picture that draw makes in a PNG file, inside the page; `what` is read out for it."""
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder) / "picture.png")
        data = base64.b64encode((Path(folder) / "picture.png").read_bytes()).decode()
    return f'<img alt="{escape(what)}" src="data:image/png;base64,{data}">'


def facts(
    model: Transformer, tokenizer: CharTokenizer, last: dict[str, Any]
) -> list[tuple[str, str]]:
    """What a run came to, in a few lines."""
    best, whole = best_row(last["history"]), last["history"][-1]["whole_val_loss"]
    loss = f"{best['val_loss']:.4f} nats, {best['bits_per_character']:.3f} bits per character"
    made = [
        ("text", f"{last['text']['name']}, {tokenizer.vocab_size} different characters"),
        ("model", f"{model.parameter_count():,} parameters"),
        ("best validation loss", f"{loss}, at step {best['step']:,} of {last['step']:,}"),
        ("training", f"{last['seconds']:,.0f} seconds"),
    ]
    if whole is not None:
        made.append(("over the whole validation split", f"{whole:.4f} nats"))
    return made


def samples(history: list[dict[str, Any]]) -> str:
    """The first, the middle and the last text that the run wrote."""
    places = sorted({0, len(history) // 2, len(history) - 1})
    return "\n".join(
        f"<p>Step {history[i]['step']:,}, validation loss {history[i]['val_loss']:.3f}:</p>\n"
        f"<pre>{escape(history[i]['sample'].strip())}</pre>"
        for i in places
    )


def settings_table(settings: TrainSettings) -> list[tuple[str, str, str]]:
    """Each setting, its value in the run, and what it means."""
    meanings = {field.name: field.metadata["meaning"] for field in dataclasses.fields(settings)}
    return [(name, show(value), meanings[name]) for name, value in settings.record().items()]


def commands(settings: TrainSettings, folder: Path) -> str:
    """The commands that train the model anew, let it write, and draw this page."""
    place = shlex.quote(str(folder))
    lines = [
        f"python train.py {shlex.join(arguments(settings))}",
        f"python sample.py --out_dir {place}",
        f"python plots.py report {place}",
    ]
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


# ------------------------------------------------------------------------------------- the strip


@torch.inference_mode()
def strip(model: Transformer, tokenizer: CharTokenizer, tokens: Tensor) -> str:
    """Each character of tokens (T,): how likely it was after those before, and what else was."""
    logits, _ = model(tokens[None])
    probabilities = logits[0].softmax(-1)  # (T, V)
    text = tokenizer.decode(tokens.tolist())
    items = [f"<li><b>{escape(plots.visible(text[0]))}</b>given</li>"]
    for after, character in zip(probabilities, [*text[1:], None], strict=True):
        top = after.topk(min(5, len(after)))
        pairs = zip(tokenizer.decode(top.indices.tolist()), top.values.tolist(), strict=True)
        share = None if character is None else after[tokenizer.encode(character)[0]].item()
        items.append(item(character, share, list(pairs)))
    legend = (
        "<p>Under each character of the text: how likely the model found it, having read what "
        "stands before, and the five it found likeliest. The darker, the likelier; "
        "␣ is a space, ↵ a new line.</p>"
    )
    return legend + '\n<ol class="strip">\n' + "\n".join(items) + "\n</ol>"


def item(character: str | None, share: float | None, likeliest: list[tuple[str, float]]) -> str:
    """One place in the strip; None is the place after the end, where anything may come."""
    alternatives = "".join(
        f"<li>{'<mark>' if other == character else ''}{escape(plots.visible(other))}"
        f"{'</mark>' if other == character else ''} {value:6.1%}</li>"
        for other, value in likeliest
    )
    if character is None:
        return f"<li><b>?</b>next<ol>{alternatives}</ol></li>"
    style = f"background: rgba(0, 114, 178, {0.8 * share:.3f})"
    name = escape(plots.visible(character))
    return f'<li><div style="{style}"><b>{name}</b>{share:.1%}</div><ol>{alternatives}</ol></li>'
