"""The model: a decoder-only Transformer over token ids, in one file that needs torch alone.

Read it from the whole (`Transformer`) down to one head of attention (`Head`). Letters in the shape
comments: B batch, T time (positions), S positions attended to, C = n_embd, H = n_head, D = C / H.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model; the defaults make the plain one. ValueError where none could be."""

    vocab_size: int
    block_size: int = 128
    n_layer: int = 4
    n_head: int = 3
    n_embd: int = 192
    dropout: float = 0.4
    position: str = "learned"  # sinusoidal; rope: rotary, relative (arXiv:2104.09864)
    norm: str = "layernorm"  # rmsnorm: no mean taken off, no bias (arXiv:1910.07467)
    feed_forward: str = "relu"  # gelu; relu2: squared (arXiv:2109.08668); swiglu (arXiv:2002.05202)
    tied_embeddings: bool = False  # the head reads the token embedding's own matrix
    qk_norm: bool = False  # queries and keys at length sqrt(D) before they meet
    bias: bool = True  # in every linear layer but queries, keys and values, and in LayerNorm
    activation_checkpointing: bool = False  # the inside of a block is computed again for backward

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "dropout" and type(value) is int and value < 1:
                raise ValueError(f"{name} {value} is below 1")
            if name in CHOICES and value not in CHOICES[name]:
                raise ValueError(f"{name} {value!r} is none of {', '.join(CHOICES[name])}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_head {self.n_head} does not divide n_embd {self.n_embd}")
        if self.position == "rope" and self.head_size % 2:
            raise ValueError(
                f"rope turns pairs of numbers; n_embd / n_head {self.head_size} is odd"
            )

    @property
    def head_size(self) -> int:
        """D, the width of one head."""
        return self.n_embd // self.n_head

    @property
    def embedding_std(self) -> float:
        """How large embeddings begin: small where the head has them too, or its logits explode."""
        return 0.02 if self.tied_embeddings else 1.0


class Transformer(nn.Module):
    """Token ids in, logits of each next token out: embeddings, blocks, final norm, linear head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.position_embedding = position_embedding(config)
        self.rotation = Table(rotary_angles(config)) if config.position == "rope" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.final_norm = make_norm(config)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=config.bias)
        if config.tied_embeddings:
            self.head.weight = self.token_embedding.weight
        initialize(self)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache: "KVCache | None" = None,
        lengths: list[int] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of the tokens that follow, and given targets their mean cross-entropy in nats.

        tokens, targets: (B, T) of int64, T at most block_size. Gives logits (B, T, vocab_size).
        cache: what came before; tokens go on from there and are added to it, and the logits are
            those of each row's last token alone, (B, 1, vocab_size).
        lengths: with a cache, how many of each row's T tokens are text; the rest is padding.
        """
        positions = self.positions(tokens) if cache is None else cache.positions(tokens.size(1))
        x = self.token_embedding(tokens)  # (B, T, C)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)  # (B, T, C)
        rotation = None if self.rotation is None else self.rotation(positions)
        again = self.config.activation_checkpointing and self.training
        for layer, block in enumerate(self.blocks):
            inputs = (x, rotation, cache, layer)  # x is (B, T, C)
            x = checkpoint(block, *inputs, use_reentrant=False) if again else block(*inputs)
        if cache is not None:
            x = cache.advance(x, lengths)  # (B, 1, C)
        logits = self.head(self.final_norm(x))  # (B, T, V)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def positions(self, tokens: Tensor) -> Tensor:
        """The positions 0 to T - 1 of tokens (B, T), as (T,). ValueError beyond block_size."""
        if tokens.size(1) > self.config.block_size:
            raise ValueError(f"{tokens.size(1)} tokens; block_size is {self.config.block_size}")
        return torch.arange(tokens.size(1), device=tokens.device)

    def parameter_count(self) -> int:
        """How many numbers are learned; the number of heads does not change it.

        For the plain model: V C + S C + L (12 C^2 + 10 C) + 2 C + (C + 1) V, with S = block_size
        and L = n_layer.
        """
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self) -> int:
        """Multiplications and additions that training on a token takes, forward and backward.

        6 N + 12 L C T, after arXiv:2204.02311, appendix B, with T = block_size. N is the weights of
        linear layers: embeddings are looked up. What checkpointing computes again does not count.
        """
        linear = (part for part in self.modules() if isinstance(part, nn.Linear))
        attention = 12 * self.config.n_layer * self.config.n_embd * self.config.block_size
        return 6 * sum(part.weight.numel() for part in linear) + attention


class Block(nn.Module):
    """Attention, then feed-forward; each reads a normalised x and adds to x (pre-norm)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = MultiHeadAttention(config)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config)

    def forward(
        self, x: Tensor, rotation: Tensor | None, cache: "KVCache | None", layer: int
    ) -> Tensor:
        """x (B, T, C) to the same shape; rotation and cache are for the attention."""
        x = x + self.attention(self.attention_norm(x), rotation, cache, layer)
        return x + self.feed_forward(self.feed_forward_norm(x))


class MultiHeadAttention(nn.Module):
    """Causal self-attention by all heads at once: what each `Head` defines, in one product."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.query_key_value = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.projection = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        rotation: Tensor | None = None,
        cache: "KVCache | None" = None,
        layer: int = 0,
    ) -> Tensor:
        """x (B, T, C) to the same shape. layer: which of the cache's layers this is."""
        B, T, C = x.shape
        qkv = self.query_key_value(x).view(B, T, 3, self.config.n_head, self.config.head_size)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        q, k = meet(q, self.config.qk_norm, rotation), meet(k, self.config.qk_norm, rotation)
        if cache is not None:
            k, v = cache.append(layer, k, v)  # (B, H, S, D)
        if self.dropout.by_hand(x):
            y = self.dropout(causal_weights(q, k)) @ v  # (B, H, T, D)
        else:
            y = F.scaled_dot_product_attention(
                q, k, v,
                attn_mask=None if cache is None else cache.mask,
                is_causal=cache is None,
                dropout_p=self.dropout.p if self.training else 0.0,
            )  # (B, H, T, D)  # fmt: skip
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.dropout(self.projection(y))

    def heads(self) -> list["Head"]:
        """The heads, each a view of the matrix of all: no weights of their own."""
        H, D = self.config.n_head, self.config.head_size
        weights = self.query_key_value.weight.view(3, H, D, -1).unbind(1)  # H of (3, D, C)
        return [Head(weight, self.config).train(self.training) for weight in weights]


class Head(nn.Module):
    """One head of causal self-attention, written out: softmax(q k^T / sqrt(D) + mask) v."""

    def __init__(self, weight: Tensor, config: ModelConfig) -> None:
        super().__init__()
        self.query, self.key, self.value = weight  # (D, C) each
        self.qk_norm = config.qk_norm
        self.dropout = Dropout(config.dropout)

    def weights(self, x: Tensor, rotation: Tensor | None = None) -> Tensor:
        """How much each position (row) attends to each (column): x (B, T, C) to (B, T, T)."""
        q = meet(x @ self.query.T, self.qk_norm, rotation)  # (B, T, D)
        k = meet(x @ self.key.T, self.qk_norm, rotation)  # (B, T, D)
        return causal_weights(q, k)

    def forward(self, x: Tensor, rotation: Tensor | None = None) -> Tensor:
        """x (B, T, C) to what the head gathers, (B, T, D)."""
        return self.dropout(self.weights(x, rotation)) @ (x @ self.value.T)


class FeedForward(nn.Module):
    """Each position by itself: widen to 4 C, bend, narrow to C."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        gated = config.feed_forward == "swiglu"
        # A gate is a third matrix; two thirds of the width keep the parameters at 8 C^2.
        hidden = max(8, 8 * round(config.n_embd / 3)) if gated else 4 * config.n_embd
        self.widen = nn.Linear(config.n_embd, 2 * hidden if gated else hidden, bias=config.bias)
        self.bend = ACTIVATIONS[config.feed_forward]
        self.projection = nn.Linear(hidden, config.n_embd, bias=config.bias)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) to the same shape."""
        return self.dropout(self.projection(self.bend(self.widen(x))))


class Dropout(nn.Module):
    """Zeroes a share p of x in training, and scales the rest so that its mean stays.

    nn.Dropout, but for the CPU, where drawing a number for each element takes a quarter of a
    training step: there one 64-bit draw decides over four elements, with p to the nearest 2^-16.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def by_hand(self, x: Tensor) -> bool:
        """Whether the masks are to be made here rather than by torch."""
        return self.training and self.p > 0 and x.device.type == "cpu"

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape to the same shape."""
        if not self.training:
            return x
        if not self.by_hand(x):
            return F.dropout(x, self.p)
        draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        levels = draws.view(torch.int16)[: x.numel()].view(x.shape)  # -2^15 to 2^15 - 1
        dropped = min(round(self.p * 2**16), 2**16 - 1)
        return x * (levels >= dropped - 2**15).to(x.dtype).mul_(2**16 / (2**16 - dropped))


class KVCache:
    """Keys and values of the tokens read so far, so that each new token is one step of work.

    Slot s of a row holds its position s: rows of unequal lengths all begin at slot 0, and what lies
    beyond a row's length is masked, then overwritten. Room for block_size tokens a row.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (2, config.n_layer, batch_size, config.n_head, config.block_size, config.head_size)
        self.store = torch.zeros(shape, device=device, dtype=dtype)  # keys, values
        self.lengths = [0] * batch_size  # on the host: asking a GPU would wait for it
        self.mask: Tensor | None = None  # of the forward pass under way; None: all is seen

    def positions(self, count: int) -> Tensor:
        """The positions of each row's next tokens: (T,) while the rows are level, else (B, T).

        Raises ValueError where they would not fit.
        """
        start, room, device = max(self.lengths), self.store.size(4), self.store.device
        end = start + count
        if end > room:
            raise ValueError(f"{start} + {count} tokens; the cache has room for {room}")
        self.layers = [layer.unbind() for layer in self.store[..., :end, :].unbind(1)]
        self.level = min(self.lengths) == start
        slots = torch.arange(end, device=device)  # (S,)
        if self.level:
            self.mask = None if count == 1 else slots <= slots[start:, None]  # (T, S)
            return slots[start:]
        self.places = torch.tensor(self.lengths, device=device)[:, None] + slots[:count]  # (B, T)
        self.mask = (slots <= self.places[:, :, None])[:, None]  # (B, 1, T, S)
        return self.places

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds k and v (B, H, T, D) to a layer; gives all of it so far, (B, H, S, D) each."""
        for store, new in zip(self.layers[layer], (k, v), strict=True):
            if self.level:
                store[:, :, -new.size(2) :] = new
            else:
                rows = torch.arange(new.size(0), device=new.device)[:, None]
                store[rows, :, self.places] = new.transpose(1, 2).to(store.dtype)
        return self.layers[layer]

    def advance(self, x: Tensor, lengths: list[int] | None) -> Tensor:
        """Counts the new tokens as read; gives of x (B, T, C) each row's last token, (B, 1, C)."""
        counts = lengths or [x.size(1)] * x.size(0)
        self.lengths = [old + new for old, new in zip(self.lengths, counts, strict=True)]
        if lengths is None:
            return x[:, -1:]
        last = torch.tensor(counts, device=x.device) - 1
        return x[torch.arange(x.size(0), device=x.device), last][:, None]

    def keep(self, rows: list[int]) -> None:
        """Forgets every row but these."""
        self.store = self.store[:, :, rows]
        self.lengths = [self.lengths[row] for row in rows]

    def replace(self, rows: list[int], other: "KVCache") -> None:
        """Puts the rows of another cache in the place of these."""
        used = max(other.lengths)
        self.store[:, :, rows, :, :used] = other.store[..., :used, :]
        for row, length in zip(rows, other.lengths, strict=True):
            self.lengths[row] = length


def initialize(model: Transformer) -> None:
    """The first value of every parameter, by its name.

    Embeddings have unit variance (0.02 squared where the head has them too) and matrices keep a
    third of it, as with torch's defaults; what is added to the stream of the blocks is scaled by
    1 / sqrt(2 n_layer), as in GPT-2. Learned positions begin as sinusoids: neighbours alike, so
    that a head soon finds the character before. docs/experiments.md has the tries.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "norm" in name:
            nn.init.ones_(parameter)
        elif name == "position_embedding.weight":
            parameter.data.copy_(sinusoids(model.config))
        elif name == "token_embedding.weight":
            nn.init.normal_(parameter, std=model.config.embedding_std)
        else:
            depth = 2 * model.config.n_layer if name.endswith("projection.weight") else 1
            nn.init.normal_(parameter, std=(3 * parameter.size(1) * depth) ** -0.5)


def make_norm(config: ModelConfig) -> nn.Module:
    """The normalisation over C before each sublayer and before the head."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd)
    return nn.LayerNorm(config.n_embd, bias=config.bias)


def position_embedding(config: ModelConfig) -> nn.Module | None:
    """What is added to the token embedding at each position, if anything."""
    if config.position == "learned":
        return nn.Embedding(config.block_size, config.n_embd)
    if config.position == "sinusoidal":
        return Table(sinusoids(config))
    return None


class Table(nn.Module):
    """Rows looked up by position, computed rather than learned, and not saved."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows, persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        """The rows at these positions."""
        return self.rows[positions]


def sinusoids(config: ModelConfig) -> Tensor:
    """Sines and cosines of falling frequency, (block_size, C), as in arXiv:1706.03762, 3.5."""
    angles = wave_angles(config.block_size, config.n_embd + config.n_embd % 2)
    waves = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[:, : config.n_embd]
    return waves * math.sqrt(2) * config.embedding_std  # as large as the token embeddings


def rotary_angles(config: ModelConfig) -> Tensor:
    """By how much rope turns each pair of numbers, as cosines and sines: (block_size, 2, D / 2)."""
    angles = wave_angles(config.block_size, config.head_size)
    return torch.stack((angles.cos(), angles.sin()), 1)


def wave_angles(positions: int, width: int) -> Tensor:
    """position / 10000^(2 i / width), (positions, width / 2)."""
    frequencies = 10000 ** -(torch.arange(0, width, 2) / width)
    return torch.outer(torch.arange(positions), frequencies)


def meet(x: Tensor, qk_norm: bool, rotation: Tensor | None) -> Tensor:
    """Queries or keys (..., T, D) as they meet: normalised and turned, where the config says so."""
    if qk_norm:
        x = F.rms_norm(x, x.shape[-1:])
    if rotation is None:
        return x
    cos, sin = rotation.unbind(-2)  # (T, D / 2) each
    if rotation.dim() == 4:
        cos, sin = cos[:, None], sin[:, None]  # (B, 1, T, D / 2)
    left, right = x.chunk(2, dim=-1)  # (..., T, D / 2) each
    return torch.cat((left * cos - right * sin, left * sin + right * cos), -1).type_as(x)


def causal_weights(q: Tensor, k: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D) + mask), (..., T, T): how much each position attends to each."""
    T, D = q.shape[-2:]
    future = q.new_full((T, T), -math.inf).triu(1)
    # Product, scale and mask in one pass: written one by one, they take 5 % of a training step.
    scores = torch.baddbmm(future, q.flatten(0, -3), k.flatten(0, -3).mT, alpha=D**-0.5)
    return F.softmax(scores, dim=-1).view(*q.shape[:-1], T)


def relu_squared(x: Tensor) -> Tensor:
    """ReLU, squared."""
    return F.relu(x).square()


def swiglu(x: Tensor) -> Tensor:
    """The first half of the last axis, gated by SiLU of the second."""
    value, gate = x.chunk(2, dim=-1)
    return value * F.silu(gate)


CHOICES = {
    "position": ("learned", "sinusoidal", "rope"),
    "norm": ("layernorm", "rmsnorm"),
    "feed_forward": ("relu", "gelu", "relu2", "swiglu"),
}
ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "relu2": relu_squared, "swiglu": swiglu}
