"""Text from a model: filters over logits, and the loop that writes token by token.

Shapes: B rows (texts written side by side), V vocabulary size.
"""

import contextlib
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from model import KVCache, Transformer
from tokenizer import CharTokenizer


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn; the filters act in this order, and the defaults switch each off."""

    repetition_penalty: float = 1.0  # over 1: less of what the context holds
    temperature: float = 1.0  # 0: always the likeliest token, and nothing below matters
    top_k: int = 0  # only so many of the likeliest; 0: all
    top_p: float = 1.0  # only the likeliest that together have this probability
    min_p: float = 0.0  # only those with this share of the likeliest one's probability


class Drawn(NamedTuple):
    """A token of one row, and its log-probability to the model, whatever the filters."""

    row: int
    token: int
    log_probability: float


@torch.inference_mode()
def generate(
    model: Transformer,
    prompts: list[list[int]],
    seeds: list[int],
    max_new_tokens: int,
    sampling: Sampling,
    exact: bool = False,
    finished: Collection[int] = (),
) -> Iterator[list[Drawn]]:
    """Continues each prompt by itself, all in one batch: a step yields a token of every row.

    prompts: token ids, at least one each; the model sees the last block_size of them.
    seeds: one a row; a row's text depends on its own prompt and seed, not on its neighbours.
    exact: each token is drawn from the last block_size tokens, which costs reading all of them
        anew once there are more. Otherwise only half of them are read anew when the context is
        full, and it grows until it is full again: the cost of a token stays flat.
    finished: rows to write no further; the caller may add to it between steps.
    """
    if not all(prompts):
        raise ValueError("an empty prompt; the model needs a token to go on from")
    texts, rows = [list(prompt) for prompt in prompts], list(range(len(prompts)))
    streams = [torch.Generator().manual_seed(seed) for seed in seeds]
    block_size = model.config.block_size
    kept = block_size if exact else max(1, block_size // 2)
    cache = new_cache(model, len(rows))
    refill(model, cache, rows, [text[-block_size:] for text in texts])
    for _ in range(max_new_tokens):
        if any(row in finished for row in rows):
            stay = [i for i, row in enumerate(rows) if row not in finished]
            cache.keep(stay)
            rows = [rows[i] for i in stay]
        if not rows:
            return
        logits = read(model, cache, [texts[row] for row in rows], kept)  # (B, V)
        seen = [texts[row][-block_size:] for row in rows]
        tokens = draw(logits, seen, sampling, [streams[row] for row in rows])  # (B,)
        logs = F.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0]  # (B,)
        drawn = list(map(Drawn, rows, tokens.tolist(), logs.tolist()))
        for row, token, _ in drawn:
            texts[row].append(token)
        yield drawn


def write(
    model: Transformer,
    tokenizer: CharTokenizer,
    prompt: str,
    length: int,
    seed: int,
    sampling: Sampling | None = None,
) -> str:
    """One continuation of prompt, without it, `length` tokens long."""
    tokens = tokenizer.encode(prompt or default_start(tokenizer))
    steps = generate(model, [tokens], [seed], length, sampling or Sampling())
    return tokenizer.decode(drawn.token for [drawn] in steps)


def default_start(tokenizer: CharTokenizer) -> str:
    """What an empty prompt stands for: a new line, or else the first character there is."""
    return tokenizer.decode([0]) if tokenizer.unknown("\n") else "\n"


# ------------------------------------------------------------------------------------- reading


def read(model: Transformer, cache: KVCache, texts: list[list[int]], kept: int) -> Tensor:
    """The logits of what follows each text, (B, V), as float64 on the CPU.

    The cache holds all of each text but its last token. A row of it that is full is first read
    anew from the last `kept` tokens.
    """
    full = [i for i, length in enumerate(cache.lengths) if length == model.config.block_size]
    if full:
        refill(model, cache, full, [texts[i][-kept:] for i in full])
    newest = torch.tensor([text[-1:] for text in texts], device=cache.store.device)  # (B, 1)
    with evaluating(model):
        logits, _ = model(newest, cache=cache)  # (B, 1, V)
    return logits[:, 0].cpu().double()


def refill(model: Transformer, cache: KVCache, rows: list[int], texts: list[list[int]]) -> None:
    """Reads all of each text but its last token into these rows of the cache."""
    lengths = [len(text) - 1 for text in texts]
    width = max(1, *lengths)
    padded = [
        text[:-1] + [0] * (width - length) for text, length in zip(texts, lengths, strict=True)
    ]
    fresh = new_cache(model, len(rows))
    with evaluating(model):
        model(torch.tensor(padded, device=cache.store.device), cache=fresh, lengths=lengths)
    cache.replace(rows, fresh)


def new_cache(model: Transformer, batch_size: int) -> KVCache:
    """An empty cache for the model, where the model is."""
    weight = model.token_embedding.weight
    return KVCache(model.config, batch_size, weight.device, weight.dtype)


@contextlib.contextmanager
def evaluating(model: Transformer) -> Iterator[None]:
    """No dropout inside; afterwards the model is as it was."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()


@torch.inference_mode()
def score(model: Transformer, tokens: list[int]) -> float:
    """The mean loss in nats of each token but the first, given at least two.

    Windows of block_size lie half of it apart, and a token counts in the first that has it: each
    is predicted once, and from at least half a window wherever the text has that much before it.
    """
    size = min(model.config.block_size, len(tokens) - 1)
    last = len(tokens) - 1 - size
    starts = torch.tensor([*range(0, last, max(1, size // 2)), last])
    ids, counted, total = torch.tensor(tokens), 0, 0.0
    for chunk in starts.split(32):
        windows = ids[chunk[:, None] + torch.arange(size + 1)]  # (B, T + 1)
        windows = windows.to(model.token_embedding.weight.device)
        with evaluating(model):
            logits, _ = model(windows[:, :-1])  # (B, T, V)
        nats = F.cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction="none")  # (B, T)
        for start, losses in zip(chunk.tolist(), nats, strict=True):
            total += losses[counted - start :].sum().item()
            counted = start + size
    return total / counted


# ------------------------------------------------------------------------------------- drawing


def draw(
    logits: Tensor, seen: list[list[int]], sampling: Sampling, streams: list[torch.Generator]
) -> Tensor:
    """A token for each row of logits (B, V), as (B,); seen and streams are the rows' own.

    Takes one number from each stream, or none at temperature 0.
    """
    logits = penalize(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = temper(logits, sampling.temperature)
    logits = keep_top_k(logits, sampling.top_k)
    logits = keep_top_p(logits, sampling.top_p)
    logits = keep_min_p(logits, sampling.min_p)
    cumulative = F.softmax(logits, -1).cumsum(-1)  # (B, V)
    # In float32, where 1 is out of reach even after the product in float64.
    uniform = torch.cat([torch.rand(1, generator=stream) for stream in streams])[:, None]  # (B, 1)
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)[:, 0]


def penalize(logits: Tensor, seen: list[list[int]], penalty: float) -> Tensor:
    """Makes the tokens seen less likely (penalty over 1) or more, as in arXiv:1909.05858, 4.1."""
    if penalty == 1:
        return logits
    mask = torch.zeros_like(logits, dtype=torch.bool)
    for row, tokens in zip(mask, seen, strict=True):
        row[tokens] = True
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(mask, penalized, logits)


def temper(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities to the power 1 / temperature: below 1 sharper, above flatter."""
    # From 0 downwards, so that nothing overflows however small the temperature.
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Rules out all but the k likeliest tokens; of equal ones the lower ids go first. 0: off."""
    if not 0 < k < logits.size(-1):
        return logits
    order = logits.argsort(dim=-1, descending=True, stable=True)
    return logits.scatter(-1, order[:, k:], -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Rules out all but the fewest likeliest tokens that reach p together; never all. 1: off."""
    if p >= 1:
        return logits
    order = logits.argsort(dim=-1, descending=True, stable=True)
    probabilities = F.softmax(logits, -1).gather(-1, order)
    likelier = probabilities.cumsum(-1) - probabilities  # of the tokens before, together
    ruled_out = torch.empty_like(order, dtype=torch.bool).scatter(-1, order, likelier >= p)
    return logits.masked_fill(ruled_out, -math.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Rules out tokens with less than p times the probability of the likeliest. 0: off."""
    if p <= 0:
        return logits
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -math.inf)
