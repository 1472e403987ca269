"""Measures speeds side by side: ours, the plain way, and Hugging Face's GPT-2 if it is there.

usage: python bench.py [--only generation training ...] [--quick]

The ways take turns, so that all meet the same machine; the figures are medians. The plain way, at
the end of this file, is what a tutorial writes: a loop over heads, masks as buffers, the text laid
out anew for each batch, every token read again for each character written.
"""

import contextlib
import dataclasses
import importlib.util
import io
import json
import logging
import multiprocessing
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import device as machine
import settings
from batches import Batch, TrainingBatches, evaluation_batches
from generate import Sampling, generate
from model import ModelConfig, Transformer
from optimizer import make_optimizers
from prepare import PrepareSettings, prepare
from settings import TrainSettings, resolve, run, setting

VOCABULARY, BATCH_SIZE = 80, 64
SECTIONS = (
    "preparation", "feeding", "training", "memory", "evaluation", "generation", "startup", "profile"
)  # fmt: skip
# FLOPs a second in bfloat16 (before Ampere float16) with sums in float32 and no sparsity, by
# NVIDIA's data sheets and, for the RTX cards, the appendices of its GA102 and Ada white papers.
CARDS = {
    "NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12, "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA GeForce RTX 4090": 165e12, "NVIDIA GeForce RTX 3090": 71e12, "NVIDIA L4": 121e12,
    "Tesla V100-SXM2-32GB": 125e12, "Tesla V100-SXM2-16GB": 125e12, "Tesla T4": 65e12,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to measure"""

    only: tuple[str, ...] = setting(SECTIONS[:-1], f"what to measure, of {', '.join(SECTIONS)}")
    repeats: int = setting(5, "turns that each way takes; the median counts", "[1, inf)")
    quick: bool = setting(False, "one turn and less work: under a minute, and rough")
    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps; auto takes the fastest there is")

    def conflicts(self) -> Iterator[tuple[set[str], str]]:
        """Every rule that is broken, with the names it is about."""
        if unknown := set(self.only) - set(SECTIONS):
            yield {"only"}, f"only = {', '.join(unknown)}: there are {', '.join(SECTIONS)}"

    @property
    def turns(self) -> int:
        """How many turns each way takes."""
        return 1 if self.quick else self.repeats

    @property
    def windows(self) -> int:
        """How many windows a model is trained on at a time; 64 are the tutorial's."""
        return 16 if self.quick else BATCH_SIZE


@dataclass(frozen=True)
class Figure:
    """One line of the table: what one way takes, beside what ours takes."""

    what: str
    way: str
    value: float
    unit: str
    spread: float  # of the turns, (slowest - fastest) / median
    ours: float  # this way's time or memory in units of ours
    shares: dict[str, float | None] = dataclasses.field(default_factory=dict)  # of which limit

    def __str__(self) -> str:
        value = f"{self.value:12,.2f} {self.unit:9} +-{self.spread / 2:4.0%}"
        shares = ""
        for limit, share in self.shares.items():
            shares += f", {limit}: unknown card" if share is None else f", {share:.0%} of {limit}"
        return f"{self.what:22} {self.way:24} {value}  takes {self.ours:6.2f} times ours{shares}"


def main(argv: list[str]) -> None:
    """Prints the table, then the same as one line of JSON."""
    options = resolve(BenchSettings, argv, __doc__)
    device = machine.choose_device(options.device)
    print(f"torch {torch.__version__}, {machine.describe(device)}; {options.windows} windows")
    sections = (
        preparation, feeding, training, memory, evaluation, generation, startup, profile,
    )  # fmt: skip
    measures = dict(zip(SECTIONS, sections, strict=True))
    figures: list[Figure] = []
    for section in options.only:
        for figure in measures[section](options, device):
            print(figure, flush=True)
            figures.append(figure)
    print(json.dumps([dataclasses.asdict(figure) for figure in figures]))


def take_turns(ways: dict[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Seconds of each turn of each way, after a turn that does not count."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns + 1):
        for way, act in ways.items():
            began = time.perf_counter()
            act()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            if turn:
                seconds[way].append(time.perf_counter() - began)
    return seconds


def compare(
    what: str, costs: dict[str, list[float]], value: Callable[[float], float], unit: str
) -> Iterator[Figure]:
    """The figures of ways that do the same; the first is ours.

    costs: seconds or bytes that each turn of each way took; value: from a cost to the unit.
    """
    medians = {way: statistics.median(each) for way, each in costs.items()}
    ours = medians[next(iter(costs))]
    for way, each in costs.items():
        spread = (max(each) - min(each)) / medians[way]
        yield Figure(what, way, value(medians[way]), unit, spread, medians[way] / ours)


# ------------------------------------------------------------------------------- the sections


def preparation(options: BenchSettings, _device: torch.device) -> Iterator[Figure]:
    """Megabytes a second from a text file to token files."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        path.write_text(made_up_english(2_000_000 if options.quick else 20_000_000), "utf-8")
        megabytes = path.stat().st_size / 1e6
        wanted = PrepareSettings(text=(str(path),), name="ours", data_dir=folder, overwrite=True)

        def ours() -> None:
            silent = io.StringIO()
            with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
                prepare(wanted)

        ways = {"ours": ours, "plain": lambda: plain_preparation(path, path.with_suffix(".npy"))}
        seconds = take_turns(ways, options.turns)
    what = f"preparation, {megabytes:.0f} MB"
    yield from compare(what, seconds, lambda seconds: megabytes / seconds, "MB/s")


def feeding(options: BenchSettings, _device: torch.device) -> Iterator[Figure]:
    """Milliseconds to make a training batch from 2.5 million characters."""
    tokens, paragraphs = made_up_text(2_500_000)
    batches = TrainingBatches(tokens, paragraphs, 128, BATCH_SIZE, seed=1)
    lists = [list(part) for part in np.split(tokens, paragraphs[1:-1])]
    ways = {
        "ours": lambda: [next(batches) for _ in range(100)],
        "plain": lambda: plain_batch(lists, 128, BATCH_SIZE),
    }
    seconds = take_turns(ways, options.turns)
    seconds["ours"] = [each / 100 for each in seconds["ours"]]
    yield from compare("feeding", seconds, lambda seconds: seconds * 1000, "ms")


def training(options: BenchSettings, device: torch.device) -> Iterator[Figure]:
    """Tokens a second of updates at the tutorial's size, with its dropout and without."""
    config, count = ModelConfig(VOCABULARY), 1 if device.type == "cpu" else 20
    acts = {
        (way, dropout): updates(way, dropout, options.windows, device, count)
        for dropout in (0.4, 0.0)
        for way in models()
    }
    seconds = take_turns(acts, options.turns)
    dropped = {way: seconds[way, 0.4] for way in models()}
    whole = {way: seconds[way, 0.0] for way in models()} | {"ours, dropout 0.4": dropped["ours"]}
    tokens, limits = count * options.windows * config.block_size, rates(device)
    flops = Transformer(config).flops_per_token()  # the same for all of this shape
    for what, group in ("training, dropout 0.4", dropped), ("training, no dropout", whole):
        for figure in compare(what, group, lambda seconds: tokens / seconds, "tokens/s"):
            shares = {limit: rate and figure.value * flops / rate for limit, rate in limits.items()}
            yield dataclasses.replace(figure, shares=shares)


def updates(
    way: str, dropout: float, windows: int, device: torch.device, count: int = 1
) -> Callable[[], object]:
    """Some updates of a model's weights, made as train.py makes them, to be timed."""
    config = ModelConfig(VOCABULARY, dropout=dropout)
    model = models()[way](config).to(device).train()
    [optimizer] = make_optimizers(model, TrainSettings())
    tokens, _ = made_up_text(windows * config.block_size + 1)
    [batch] = evaluation_batches(tokens, config.block_size, windows)
    inputs, targets = (tensor.to(device) for tensor in batch)
    dtype = machine.choose_dtype("auto", device)

    def act() -> None:
        for _ in range(count):
            with machine.autocast(device, dtype):
                loss = model(inputs, targets)[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return act


def rates(device: torch.device) -> dict[str, float | None]:
    """FLOPs a second of one large matrix product, measured, and of a GPU what its maker promises.

    A share of that is the model FLOPs utilization, MFU, of PaLM, arXiv:2204.02311, appendix B.
    """
    size = 1024 if device.type == "cpu" else 8192
    matrix = torch.randn(size, size, device=device, dtype=machine.choose_dtype("auto", device))
    seconds = min(take_turns({"product": lambda: matrix @ matrix}, 10)["product"])
    limits = {"a large product's rate": 2 * size**3 / seconds}
    if device.type == "cuda":
        limits["the card's peak (MFU)"] = CARDS.get(torch.cuda.get_device_name(device))
    return limits


def memory(options: BenchSettings, device: torch.device) -> Iterator[Figure]:
    """Megabytes that an update takes at its peak, beside the weights; each in a fresh process."""
    if device.type == "mps" or (device.type == "cpu" and sys.platform == "win32"):
        return  # they tell no peak
    turns, spawn = min(3, options.turns), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as fresh:
        grown = {
            way: list(fresh.map(growth, [way] * turns, [options.windows] * turns, [device] * turns))
            for way in models()
        }
    yield from compare("memory of an update", grown, lambda grown: grown / 1e6, "MB")


def growth(way: str, windows: int, device: torch.device) -> int:
    """By how many bytes the peak grows with two updates, the first of which makes AdamW's state."""
    act = updates(way, 0.4, windows, device, count=2)
    before = peak_memory(device)
    act()
    return peak_memory(device) - before


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held at a time: on the GPU, or else in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # Linux, whose getrusage begins with what the parent process held
        return int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text("utf-8"))[1]) * 1024
    import resource  # Windows has none; the unit here is macOS's

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def evaluation(options: BenchSettings, device: torch.device) -> Iterator[Figure]:
    """Tokens a second of losses over a validation split."""
    tokens, _ = made_up_text(16_000 if options.quick else 50_000)
    config, dtype = ModelConfig(VOCABULARY), machine.choose_dtype("auto", device)

    def whole_split(way: str) -> Callable[[], object]:
        model = models()[way](config).to(device).eval()

        @torch.no_grad()
        def act() -> None:
            for inputs, targets in evaluation_batches(tokens, config.block_size, BATCH_SIZE):
                with machine.autocast(device, dtype):
                    model(inputs.to(device), targets.to(device))

        return act

    seconds = take_turns({way: whole_split(way) for way in models()}, options.turns)
    yield from compare("evaluation", seconds, lambda seconds: len(tokens) / seconds, "tokens/s")


def generation(options: BenchSettings, device: torch.device) -> Iterator[Figure]:
    """Tokens a second of writing, for one text and for ten, and of the limit set by the memory."""
    config, length = ModelConfig(VOCABULARY), 100 if options.quick else 300
    model, plain = (kind(config).to(device).eval() for kind in (Transformer, PlainGPT))
    for rows in (1, 10):
        ways = {
            "ours": lambda rows=rows: our_writing(model, rows, length, exact=False),
            "ours, exact": lambda rows=rows: our_writing(model, rows, length, exact=True),
            "plain": lambda rows=rows: plain_writing(plain, rows, length),
        }
        if "Hugging Face" in models():
            other = HuggingFace(config, length + 1).to(device).eval()
            ways["Hugging Face"] = lambda rows=rows, other=other: other.write(rows, length)
        rate = lambda seconds, rows=rows: rows * length / seconds  # noqa: E731
        seconds = take_turns(ways, options.turns)
        figures = list(compare(f"generation, {rows} of {length}", seconds, rate, "tokens/s"))
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


def startup(options: BenchSettings, _device: torch.device) -> Iterator[Figure]:
    """Seconds until a command answers, most of which torch takes for itself."""

    def command(*arguments: str) -> Callable[[], object]:
        line = [sys.executable, *arguments]
        return lambda: subprocess.run(line, cwd=settings.ROOT, capture_output=True, check=True)

    ways = {
        "train.py --show": command("train.py", "config/fairy_tales.py", "--show"),
        "sample.py --help": command("sample.py", "--help"),
        "import torch": command("-c", "import torch"),
    }
    yield from compare("startup", take_turns(ways, options.turns), float, "s")


def profile(options: BenchSettings, device: torch.device) -> Iterator[Figure]:
    """Milliseconds of an update, and of the ten operations in it that take the most."""
    spent = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    whole: dict[str, float] = {}
    for way in ("ours", "plain"):
        act = updates(way, 0.4, options.windows, device)
        act()
        with torch.profiler.profile() as profiler:
            act()
        times = {
            event.key.removeprefix("aten::"): getattr(event, spent) / 1000
            for event in profiler.key_averages()
            if event.device_type == torch.autograd.DeviceType.CPU  # kernels count with their caller
        }
        whole[way] = times["all operations"] = sum(times.values())
        for name in sorted(times, key=times.get, reverse=True)[:11]:
            what, share = f"profile, {way}", times[name] / whole["ours"]
            yield Figure(what, name[-24:], times[name], "ms", 0.0, share)


# ------------------------------------------------------------------------------- made-up work


def made_up_text(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and paragraph starts; speeds do not depend on what is written."""
    generator = np.random.default_rng(1)
    tokens = generator.integers(0, VOCABULARY, length, dtype=np.uint8)
    return tokens, np.append(np.arange(0, length - 300, 300), length)


def made_up_english(length: int) -> str:
    """The words and line breaks of the tales in a random order, over and over."""
    tales = sorted((settings.ROOT / "data" / "tales").glob("*.txt"))
    words = [word for tale in tales for word in re.findall(r"\S+\s*", tale.read_text("utf-8"))]
    random.Random(1).shuffle(words)
    text = "".join(words)
    return text * (length // len(text))


# ------------------------------------------------------------------------------- the other ways


def models() -> dict[str, type[nn.Module]]:
    """The ways to build the model; ours first."""
    there = importlib.util.find_spec("transformers")
    other = {"Hugging Face": HuggingFace} if there else {}
    return {"ours": Transformer, "plain": PlainGPT} | other


def plain_preparation(path: Path, target: Path) -> None:
    """Paragraphs as lists, shuffled, and a look into a dictionary for each character."""
    text = path.read_text("utf-8")
    ids = {character: number for number, character in enumerate(sorted(set(text)))}
    paragraphs = [[ids[character] for character in part] for part in text.split("\n\n")]
    random.shuffle(paragraphs)
    np.save(target, np.array([token for paragraph in paragraphs for token in paragraph]))


def plain_batch(paragraphs: list[list[int]], block_size: int, batch_size: int) -> Batch:
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

    positions: it cannot slide its cache, so it needs room for all that it is to write.
    """

    def __init__(self, config: ModelConfig, positions: int | None = None) -> None:
        super().__init__()
        import transformers

        positions = positions or config.block_size
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
