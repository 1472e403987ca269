"""Measures speeds side by side: ours, the plain way, and Hugging Face's GPT-2 if it is there.

usage: python bench.py [--only generation training ...] [--quick]

The ways take turns, so that all meet the same machine; the figures are medians. The plain way, at
the end of this file, is what a tutorial writes: a loop over heads, masks as buffers, the text laid
out anew for each batch, every token read again for each character written.
"""

import dataclasses
import importlib.util
import json
import logging
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import device as machine
from batches import TrainingBatches, evaluation_batches
from generate import Sampling, generate
from model import ModelConfig, Transformer
from optimizer import make_optimizers
from settings import TrainSettings, resolve, run, setting

VOCABULARY, BATCH_SIZE = 80, 64
SECTIONS = ("feeding", "training", "evaluation", "generation")


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to measure"""

    only: tuple[str, ...] = setting(SECTIONS, f"parts to measure, of {', '.join(SECTIONS)}")
    repeats: int = setting(5, "turns that each way takes; the median counts", "[1, inf)")
    quick: bool = setting(False, "two turns and less work: under a minute, and rough")
    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps; auto takes the fastest there is")

    def conflicts(self) -> Iterator[tuple[set[str], str]]:
        """Every rule that is broken, with the names it is about."""
        if unknown := set(self.only) - set(SECTIONS):
            yield {"only"}, f"only = {', '.join(unknown)}: there are {', '.join(SECTIONS)}"


@dataclass(frozen=True)
class Figure:
    """One line of the table: how fast one way is, and how many times faster ours is."""

    what: str
    way: str
    value: float
    unit: str
    spread: float  # of the turns, (slowest - fastest) / median
    ours: float  # how many times this way's time ours would fit into

    def __str__(self) -> str:
        speed = f"{self.value:12,.2f} {self.unit:9} +-{self.spread / 2:4.0%}"
        return f"{self.what:22} {self.way:24} {speed}  ours is {self.ours:6.2f} times as fast"


def main(argv: list[str]) -> None:
    """Prints the table, then the same as one line of JSON."""
    options = resolve(BenchSettings, argv, __doc__)
    device = machine.choose_device(options.device)
    print(f"torch {torch.__version__}, {machine.describe(device)}")
    figures: list[Figure] = []
    for section in options.only:
        measure = {"feeding": feeding, "training": training,
                   "evaluation": evaluation, "generation": generation}[section]  # fmt: skip
        for figure in measure(options, device):
            print(figure, flush=True)
            figures.append(figure)
    print(json.dumps([dataclasses.asdict(figure) for figure in figures]))


def take_turns(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each turn of each way, after a turn that does not count."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeats + 1):
        for way, act in ways.items():
            began = time.perf_counter()
            act()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                seconds[way].append(time.perf_counter() - began)
    return seconds


def compare(
    what: str,
    ways: dict[str, Callable[[], object]],
    options: BenchSettings,
    value: Callable[[float], float],
    unit: str,
) -> Iterator[Figure]:
    """The figures of ways that do the same; the first is ours. value: from seconds to the unit."""
    seconds = take_turns(ways, 2 if options.quick else options.repeats)
    medians = {way: statistics.median(each) for way, each in seconds.items()}
    ours = medians[next(iter(ways))]
    for way, each in seconds.items():
        spread = (max(each) - min(each)) / medians[way]
        yield Figure(what, way, value(medians[way]), unit, spread, medians[way] / ours)


# ------------------------------------------------------------------------------- the sections


def feeding(options: BenchSettings, _device: torch.device) -> Iterator[Figure]:
    """Milliseconds to make a training batch from 2.5 million characters."""
    tokens, paragraphs = made_up_text(2_500_000)
    config = ModelConfig(VOCABULARY)
    batches = TrainingBatches(tokens, paragraphs, config.block_size, BATCH_SIZE, seed=1)
    lists = [list(part) for part in np.split(tokens, paragraphs[1:-1])]
    ways = {
        "ours, 100 batches": lambda: [next(batches) for _ in range(100)],
        "plain": lambda: plain_batch(lists, config.block_size, BATCH_SIZE),
    }
    for figure in compare("feeding", ways, options, lambda seconds: seconds * 1000, "ms"):
        if figure.way == "plain":
            yield dataclasses.replace(figure, ours=figure.ours * 100)
        else:
            yield dataclasses.replace(figure, way="ours", value=figure.value / 100)


def training(options: BenchSettings, device: torch.device) -> Iterator[Figure]:
    """Tokens a second of updates at the tutorial's size, with its dropout and without."""
    inputs, targets = (tensor.to(device) for tensor in window_batch(BATCH_SIZE, 128))
    for dropout in (0.4, 0.0):
        config = ModelConfig(VOCABULARY, dropout=dropout)
        models: dict[str, nn.Module] = {"ours": Transformer(config), "plain": PlainGPT(config)}
        if importlib.util.find_spec("transformers"):
            models["Hugging Face"] = HuggingFace(config, config.block_size)
        ways = {
            way: updates(model.to(device).train(), inputs, targets, 1 if options.quick else 3)
            for way, model in models.items()
        }
        count = inputs.numel() * (1 if options.quick else 3)
        what = f"training, dropout {dropout}"
        yield from compare(what, ways, options, lambda seconds, n=count: n / seconds, "tokens/s")


def updates(model: nn.Module, inputs: Tensor, targets: Tensor, count: int) -> Callable[[], object]:
    """Some updates of the model's weights, to be timed."""
    [optimizer] = make_optimizers(model, TrainSettings())

    def act() -> None:
        for _ in range(count):
            model(inputs, targets)[1].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return act


def evaluation(options: BenchSettings, device: torch.device) -> Iterator[Figure]:
    """Tokens a second of losses over a validation split."""
    tokens, _ = made_up_text(40_000 if options.quick else 120_000)
    config = ModelConfig(VOCABULARY)
    models = {"ours": Transformer(config), "plain": PlainGPT(config)}

    def whole_split(model: nn.Module) -> Callable[[], object]:
        model = model.to(device).eval()

        @torch.no_grad()
        def act() -> None:
            for inputs, targets in evaluation_batches(tokens, config.block_size, BATCH_SIZE):
                model(inputs.to(device), targets.to(device))

        return act

    ways = {way: whole_split(model) for way, model in models.items()}
    yield from compare("evaluation", ways, options, lambda s: len(tokens) / s, "tokens/s")


def generation(options: BenchSettings, device: torch.device) -> Iterator[Figure]:
    """Tokens a second of writing, for one text and for ten, and of the limit set by the memory."""
    config, length = ModelConfig(VOCABULARY), 100 if options.quick else 500
    model = Transformer(config).to(device).eval()
    plain = PlainGPT(config).to(device).eval()
    for rows in (1, 10):
        ways = {
            "ours": lambda rows=rows: our_writing(model, rows, length, exact=False),
            "ours, exact": lambda rows=rows: our_writing(model, rows, length, exact=True),
            "plain": lambda rows=rows: plain_writing(plain, rows, length),
        }
        if importlib.util.find_spec("transformers"):
            other = HuggingFace(config, length + 1).to(device).eval()
            ways["Hugging Face"] = lambda rows=rows, other=other: other.write(rows, length)
        rate = lambda seconds, rows=rows: rows * length / seconds  # noqa: E731
        figures = list(compare(f"generation, {rows} of {length}", ways, options, rate, "tokens/s"))
        yield from figures
        if rows == 1:
            yield limit(model, figures[0].value)


def our_writing(model: Transformer, rows: int, length: int, exact: bool) -> None:
    """What sample.py does."""
    for _ in generate(model, [[0]] * rows, list(range(rows)), length, Sampling(), exact=exact):
        pass


def limit(model: Transformer, rate: float) -> Figure:
    """How fast one text could be written if reading the weights were all the work."""
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    seconds = min(take_turns({"read": weights.sum}, 30)["read"])
    return Figure("generation, 1 text", "limit: read the weights", 1 / seconds, "tokens/s",
                  0.0, rate * seconds)  # fmt: skip


# ------------------------------------------------------------------------------- made-up work


def made_up_text(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and paragraph starts; speeds do not depend on what is written."""
    generator = np.random.default_rng(1)
    tokens = generator.integers(0, VOCABULARY, length, dtype=np.uint8)
    return tokens, np.append(np.arange(0, length - 300, 300), length)


def window_batch(batch_size: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (B, T)."""
    tokens, _ = made_up_text(batch_size * block_size + 1)
    return next(evaluation_batches(tokens, block_size, batch_size))


# ------------------------------------------------------------------------------- the other ways


def plain_batch(
    paragraphs: list[list[int]], block_size: int, batch_size: int
) -> tuple[Tensor, Tensor]:
    """A batch from the whole text, shuffled and laid out for the occasion."""
    shuffled = random.sample(paragraphs, len(paragraphs))
    flat = torch.tensor([token for paragraph in shuffled for token in paragraph])
    windows = [
        flat[i : i + block_size + 1] for i in range(0, len(flat) - block_size, block_size // 2)
    ]
    chosen = torch.stack(random.sample(windows, batch_size))
    return chosen[:, :-1], chosen[:, 1:]


@torch.no_grad()
def plain_writing(model: "PlainGPT", rows: int, length: int) -> None:
    """Every token of the context is read again for each that is written."""
    text = torch.zeros(rows, 1, dtype=torch.long, device=model.token_embedding.weight.device)
    for _ in range(length):
        logits, _ = model(text[:, -model.position_embedding.num_embeddings :])
        probabilities = F.softmax(logits[:, -1], dim=-1)
        text = torch.cat((text, torch.multinomial(probabilities, 1)), dim=1)


class HuggingFace(nn.Module):
    """GPT-2 of the same shape from the transformers library, called as ours is.

    positions: it cannot slide its cache, so it has room for all that it is to write.
    """

    def __init__(self, config: ModelConfig, positions: int) -> None:
        super().__init__()
        import transformers

        logging.getLogger("transformers").setLevel(logging.ERROR)
        self.gpt2 = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=config.vocab_size, n_positions=positions, n_embd=config.n_embd,
                n_layer=config.n_layer, n_head=config.n_head, activation_function="relu",
                attn_pdrop=config.dropout, resid_pdrop=config.dropout, embd_pdrop=0.0,
                bos_token_id=0, eos_token_id=None, pad_token_id=0,
            )
        )  # fmt: skip

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and mean loss."""
        logits = self.gpt2(tokens, use_cache=False).logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def write(self, rows: int, length: int) -> None:
        """Its own generate, with its cache."""
        start = torch.zeros(rows, 1, dtype=torch.long, device=self.gpt2.device)
        self.gpt2.generate(start, attention_mask=torch.ones_like(start), do_sample=True,
                           top_k=0, max_new_tokens=length, use_cache=True)  # fmt: skip


class PlainGPT(nn.Module):
    """The plain model: the same sizes, a loop over heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.position_embedding = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.Sequential(*(PlainBlock(config) for _ in range(config.n_layer)))
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits, and the mean loss if there are targets."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        logits = self.head(self.norm(self.blocks(x)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PlainBlock(nn.Module):
    """Heads one after the other, then feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        C = config.n_embd
        self.heads = nn.ModuleList(PlainHead(config) for _ in range(config.n_head))
        self.projection, self.dropout = nn.Linear(C, C), nn.Dropout(config.dropout)
        self.feed_forward = nn.Sequential(
            nn.Linear(C, 4 * C), nn.ReLU(), nn.Linear(4 * C, C), nn.Dropout(config.dropout)
        )
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) to the same shape."""
        y = self.norm1(x)
        heads = torch.cat([head(y) for head in self.heads], dim=-1)  # (B, T, C)
        x = x + self.dropout(self.projection(heads))
        return x + self.feed_forward(self.norm2(x))


class PlainHead(nn.Module):
    """Three linear layers and a mask to each head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            nn.Linear(config.n_embd, config.head_size, bias=False) for _ in range(3)
        )
        self.register_buffer("past", torch.ones(config.block_size, config.block_size).tril())
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) to (B, T, D)."""
        T = x.size(1)
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
        scores = scores.masked_fill(self.past[:T, :T] == 0, float("-inf"))
        return self.dropout(F.softmax(scores, dim=-1)) @ v


if __name__ == "__main__":
    run(main)
