"""The mathematics of model.py: causality, heads, counts, options, and the cache."""

import ast
import copy
import dataclasses
import io
import itertools
import math
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import model as model_file
from model import Dropout, KVCache, ModelConfig, MultiHeadAttention, Transformer
from settings import ModelSettings

SMALL = ModelConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16, dropout=0.0)
ANOTHER = {
    "vocab_size": 12,
    "block_size": 9,
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 20,
    "dropout": 0.5,
    "position": "rope",
    "norm": "rmsnorm",
    "feed_forward": "gelu",
    "tied_embeddings": True,
    "qk_norm": True,
    "bias": False,
}  # every option that changes what is computed, at a value that SMALL has not
CHOICES = {
    "position": ("learned", "sinusoidal", "rope"),
    "norm": ("layernorm", "rmsnorm"),
    "feed_forward": ("relu", "gelu", "relu2", "swiglu"),
    "tied_embeddings": (False, True),
    "qk_norm": (False, True),
    "bias": (True, False),
}
COMBINATIONS = [
    dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())
]
ONE_BY_ONE = [{name: value} for name, values in CHOICES.items() for value in values[1:]]
VARIANTS = [{}, *ONE_BY_ONE, COMBINATIONS[-1]]

each_variant = pytest.mark.parametrize(
    "options", VARIANTS, ids=lambda options: "-".join(map(str, options.values())) or "plain"
)


def make(seed: int = 0, **options) -> Transformer:
    """A small model in eval mode; the same seed and options give the same one."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Transformer(dataclasses.replace(SMALL, **options)).eval()


def some_tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SMALL.vocab_size, shape, generator=generator)


# ------------------------------------------------------------------------------------ attention


@each_variant
def test_what_comes_later_changes_nothing_before(options):
    """A mask off by one, or none, would let position t see the token it is to predict."""
    model, tokens = make(**options), some_tokens(2, 8)
    before, _ = model(tokens)
    for t in range(8):
        changed = tokens.clone()
        changed[:, t] = (tokens[:, t] + 1) % SMALL.vocab_size
        after, _ = model(changed)
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-6)
        assert ((after - before)[:, t:].abs().amax((0, 2)) > 1e-5).all()


@each_variant
def test_gradient_reaches_the_past_and_only_the_past(options):
    """Stronger than comparing outputs: each position learns from all before it, none after."""
    model, tokens = make(**options), some_tokens(1, 8)
    embedded = []
    model.token_embedding.register_forward_hook(lambda module, _, x: embedded.append(x))
    for t in range(8):
        logits, _ = model(tokens)
        (gradient,) = torch.autograd.grad(logits[0, t].square().sum(), embedded.pop())
        reached = gradient[0].abs().sum(-1) > 0
        assert reached.tolist() == [s <= t for s in range(8)]


@pytest.mark.parametrize("options", [{}, {"position": "rope"}, {"qk_norm": True}, COMBINATIONS[-1]])
def test_heads_together_are_the_attention(options):
    """`Head` is the definition; the fused product of all heads must give the same."""
    model = make(**options, dropout=0.5)
    rotation = model.rotation and model.rotation(torch.arange(8))
    for block in model.blocks:
        x = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(2))
        heads = torch.cat([head(x, rotation) for head in block.attention.heads()], -1)
        together = block.attention(x, rotation)
        torch.testing.assert_close(block.attention.projection(heads), together)


def test_attention_written_out():
    """Scores are scaled by the head's own size D; some tutorials scale by the width C."""
    attention = make(n_head=4).blocks[0].attention
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(3))
    q, k, v = (x @ weight.T for weight in attention.query_key_value.weight.chunk(3))
    gathered = []
    for h in range(4):
        part = slice(4 * h, 4 * h + 4)
        scores = q[0, :, part] @ k[0, :, part].T / math.sqrt(4)
        scores = scores + torch.full((5, 5), -math.inf).triu(1)
        gathered.append(scores.softmax(-1) @ v[0, :, part])
        weights = attention.heads()[h].weights(x)[0]
        torch.testing.assert_close(weights, scores.softmax(-1))
    torch.testing.assert_close(attention(x)[0], attention.projection(torch.cat(gathered, -1)))


def test_heads_are_views():
    """A head has no weights of its own: it follows the matrix, and learns into it."""
    attention = make().blocks[0].attention
    head = attention.heads()[1]
    assert not list(head.parameters())
    attention.query_key_value.weight.data.zero_()
    assert not head.key.any()
    head.value.sum().backward()
    learned = attention.query_key_value.weight.grad.abs().sum(1) > 0
    assert learned.nonzero()[:, 0].tolist() == list(range(40, 48))  # the second head's values


def test_heads_drop_as_the_attention_does():
    attention = make(dropout=0.5).blocks[0].attention
    x = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(4))
    still, moving = attention.heads()[0], attention.train().heads()[0]
    assert torch.equal(still(x), still(x))
    assert not torch.equal(moving(x), moving(x))


# ------------------------------------------------------------------------------- the whole model


@pytest.mark.parametrize(
    ("V", "S", "L", "C", "heads"),
    [(11, 8, 2, 16, (1, 2, 4, 16)), (80, 128, 4, 192, (1, 3, 6)), (5, 1, 1, 8, (1, 2))],
)
def test_parameter_count(V, S, L, C, heads):
    """The formula of the docstring, whatever the number of heads."""
    expected = V * C + S * C + L * (12 * C**2 + 10 * C) + 2 * C + (C + 1) * V
    counts = {Transformer(ModelConfig(V, S, L, H, C)).parameter_count() for H in heads}
    assert counts == {expected}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [28, 80, 500])
def test_untrained_loss_is_that_of_a_guess(vocab_size, tied):
    """A model that is sure of itself before it has learned anything wastes its first steps."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size, tied_embeddings=tied)).eval()
    tokens = torch.randint(vocab_size, (8, 129))
    _, loss = model(tokens[:, :-1], tokens[:, 1:])
    assert abs(loss.item() - math.log(vocab_size)) < 0.25


def test_what_and_where_begin_at_one_scale():
    """Sines of size 1 on tied embeddings of size 0.02: the model saw positions, and no tokens."""
    for options in COMBINATIONS:
        model = make(**options)
        if model.position_embedding is not None:
            where = model.position_embedding(torch.arange(8)).std()
            assert 0.3 < where / model.token_embedding.weight.std() < 3, options


def test_loss_is_the_mean_negative_log_probability():
    model, tokens = make(), some_tokens(3, 7)
    logits, loss = model(tokens[:, :-1], tokens[:, 1:])
    log_probabilities = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])
    torch.testing.assert_close(loss, -log_probabilities.mean())
    assert model(tokens)[1] is None


def test_dropout_belongs_to_training():
    """Generating with dropout left on is a well-known slip."""
    model, tokens = make(dropout=0.5), some_tokens(2, 8)
    assert torch.equal(model(tokens)[0], model(tokens)[0])
    model.train()
    assert not torch.equal(model(tokens)[0], model(tokens)[0])


def test_one_batch_can_be_learned_by_heart():
    model, tokens = make().train(), some_tokens(4, 9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        _, loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_flops_per_token_are_those_of_the_products():
    """The formula against a count of every matrix product, forward and backward."""
    for options in [{}, {"tied_embeddings": True, "position": "rope"}, {"feed_forward": "swiglu"}]:
        model, tokens = make(**options, dropout=0.5).train(), some_tokens(2, 8)
        with FlopCounterMode(display=False) as counter:
            model(tokens, tokens)[1].backward()
        assert model.flops_per_token() * tokens.numel() == counter.get_total_flops()


def test_lengths():
    model = make()
    for length in range(1, 9):
        assert model(some_tokens(2, length))[0].shape == (2, length, 11)
    with pytest.raises(ValueError, match="9 tokens; block_size is 8"):
        model(some_tokens(1, 9))


def test_every_option_changes_the_model():
    """An option that does nothing is worse than none."""
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    assert set(ANOTHER) == names - {"activation_checkpointing"}
    torch.manual_seed(0)
    plain, tokens = make().train(), some_tokens(2, 8)
    shapes = {name: weight.shape for name, weight in plain.state_dict().items()}
    for name, value in ANOTHER.items():
        other = make(**{name: value}).train()
        other_shapes = {name: weight.shape for name, weight in other.state_dict().items()}
        same_weights = shapes == other_shapes
        with torch.random.fork_rng():
            assert not same_weights or not torch.equal(other(tokens)[0], plain(tokens)[0]), name


def test_every_feed_forward_differs():
    """Same weights, another bend; swiglu has one more matrix and as many parameters or nearly."""
    outputs = [make(feed_forward=name)(some_tokens(1, 8))[0] for name in CHOICES["feed_forward"]]
    for one, other in itertools.combinations(outputs, 2):
        assert not torch.allclose(one, other)
    plain, gated = (
        sum(p.numel() for p in make(n_embd=24, feed_forward=name).blocks[0].parameters())
        for name in ("relu", "swiglu")
    )
    assert abs(gated / plain - 1) < 0.02


def test_all_combinations_learn():
    """Each of the options with each of the others: a loss, and a gradient for every parameter."""
    tokens = some_tokens(2, 9)
    for options in COMBINATIONS:
        model = make(**options)
        _, loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.any(), (options, name)


@pytest.mark.parametrize("options", COMBINATIONS[:: len(COMBINATIONS) // 8])
def test_smallest_sizes(options):
    """Width 1 or 2, one layer, one head, a context of one token."""
    width = 2 if options["position"] == "rope" else 1
    model = make(**options, n_embd=width, n_head=1, n_layer=1, block_size=1)
    assert model(some_tokens(1, 1))[0].isfinite().all()


def test_rope_sees_distances_alone():
    """Attention weights stay the same when all positions move by as much."""
    model = make(position="rope", block_size=32)
    head = model.blocks[0].attention.heads()[0]
    x = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(5))
    here, there = (model.rotation(torch.arange(8) + start) for start in (0, 20))
    torch.testing.assert_close(head.weights(x, here), head.weights(x, there))
    assert not torch.allclose(head.weights(x, here), head.weights(x))


def test_sinusoids():
    """The formula of the paper: sin at even places, cos at odd ones, also for an odd width."""
    for width in (6, 7):
        table = model_file.sinusoids(dataclasses.replace(SMALL, n_embd=width, n_head=1))
        for position, i in itertools.product(range(8), range(width)):
            angle = position / 10000 ** ((i - i % 2) / (width + width % 2))
            expected = math.cos(angle) if i % 2 else math.sin(angle)
            assert table[position, i].item() == pytest.approx(expected * math.sqrt(2), abs=1e-6)


@pytest.mark.parametrize(
    "wrong", [{"position": "alibi"}, {"norm": "batch"}, {"feed_forward": "tanh"}, {"n_layer": 0}]
)
def test_what_no_model_can_be_made_of_is_refused(wrong):
    """A name that nobody knows must not pass for the default, with the file lifted out or not."""
    [(name, value)] = wrong.items()
    with pytest.raises(ValueError, match=f"{name} {value!r} is"):
        dataclasses.replace(SMALL, **wrong)


def test_the_settings_allow_what_the_model_knows():
    """settings.py lists the choices for the command line; the lists are the model's."""
    for field in dataclasses.fields(ModelSettings):
        if field.name in model_file.CHOICES:
            assert field.metadata["valid"] == model_file.CHOICES[field.name]
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    assert names == {field.name for field in dataclasses.fields(ModelSettings)} | {"vocab_size"}


def test_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match="n_head 3 does not divide n_embd 16"):
        dataclasses.replace(SMALL, n_head=3)
    with pytest.raises(ValueError, match="odd"):
        dataclasses.replace(SMALL, n_embd=6, position="rope")


# ------------------------------------------------------------------------ activation checkpointing


def learned(tokens: torch.Tensor, **options) -> list[torch.Tensor]:
    """The loss, every gradient, and the random stream after them, of a step in training."""
    model = make(**options).train()
    torch.manual_seed(6)
    _, loss = model(tokens, tokens)
    loss.backward()
    return [loss, *(weight.grad for weight in model.parameters()), torch.get_rng_state()]


@pytest.mark.parametrize("options", [{}, {"dropout": 0.4}, COMBINATIONS[-1] | {"dropout": 0.4}])
def test_checkpointing_changes_no_bit(options):
    """What is computed again must drop the same: other masks would be other gradients, silently."""
    plain = learned(some_tokens(2, 8), **options)
    again = learned(some_tokens(2, 8), **options, activation_checkpointing=True)
    assert all(itertools.starmap(torch.equal, zip(plain, again, strict=True)))


def bytes_kept(**options) -> int:
    """The size of all that a forward pass of four windows keeps for backward, but the weights."""
    model, sizes = make(**options).train(), {}
    weights = {weight.untyped_storage() for weight in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(some_tokens(4, 8), some_tokens(4, 8))
    return sum(size for storage, size in sizes.items() if storage not in weights)


def test_checkpointing_keeps_the_input_of_each_block_alone():
    """B T C numbers of four bytes; without it more than ten times as many."""
    plain, again = (
        bytes_kept(n_layer=3, dropout=0.4, activation_checkpointing=again)
        - bytes_kept(n_layer=2, dropout=0.4, activation_checkpointing=again)
        for again in (False, True)
    )
    assert plain > 10 * again == 10 * 4 * (4 * 8 * 16)


def test_checkpointing_is_for_training():
    """Where nothing is kept for backward, nothing is to be computed again."""
    model, tokens, calls = make(activation_checkpointing=True), some_tokens(1, 8), []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    model(tokens, tokens)[1].backward()
    assert len(calls) == 1
    model.train()(tokens, tokens)[1].backward()
    assert len(calls) == 3
    with torch.no_grad():
        model(tokens, cache=KVCache(model.config, 1))
    assert len(calls) == 4


# ------------------------------------------------------------------------------ Python's contracts


@each_variant
def test_copies_are_whole_and_apart(options):
    """In one well-known model a deep copy still computed with the weights of the original."""
    model, tokens = make(**options), some_tokens(1, 8)
    expected, _ = model(tokens)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), make(seed=1, **options)]
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    copies[-1].load_state_dict(torch.load(buffer, weights_only=True))
    for parameter in model.parameters():
        parameter.data.zero_()
    for copied in copies:
        assert torch.equal(copied(tokens)[0], expected)


def test_state_holds_parameters_alone():
    """Computed tables are not saved: a checkpoint stays small, and loads where they change."""
    for options in VARIANTS:
        model = make(**options)
        tied = {"head.weight"} if model.config.tied_embeddings else set()
        assert set(model.state_dict()) == {name for name, _ in model.named_parameters()} | tied


def test_two_models_live_together():
    """Sizes in module globals, as in many a tutorial, allow only one model at a time."""
    one, other = make(), make(vocab_size=5, block_size=3, n_embd=6, n_head=1, n_layer=1)
    before, _ = one(some_tokens(1, 8))
    assert other(torch.zeros(1, 3, dtype=torch.long))[0].shape == (1, 3, 5)
    assert torch.equal(one(some_tokens(1, 8))[0], before)


def test_the_file_needs_torch_alone():
    """model.py can be lifted out of the repository as one file."""
    nodes = list(ast.walk(ast.parse(Path(model_file.__file__).read_text("utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    roots = {name.partition(".")[0] for name in names}
    assert roots - sys.stdlib_module_names == {"torch"}


# ------------------------------------------------------------------------------------- the cache


def assert_last(cached: torch.Tensor, model: Transformer, rows: list[torch.Tensor]) -> None:
    """The cached logits (B, 1, V) are those that each row by itself ends with."""
    whole = torch.stack([model(row[None])[0][0, -1:] for row in rows])
    torch.testing.assert_close(cached, whole, rtol=0, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("first", [1, 3, 8])
@each_variant
def test_cached_equals_uncached(options, first):
    """At every step from the prompt to a full cache, for a batch."""
    model, tokens = make(**options), some_tokens(3, 8)
    cache = KVCache(model.config, 3)
    logits, _ = model(tokens[:, :first], cache=cache)
    assert_last(logits, model, list(tokens[:, :first]))
    for t in range(first, 8):
        logits, _ = model(tokens[:, t : t + 1], cache=cache)
        assert_last(logits, model, list(tokens[:, : t + 1]))
    with pytest.raises(ValueError, match="8 \\+ 1 tokens; the cache has room for 8"):
        model(tokens[:, :1], cache=cache)


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(1, 16), (16, 2), (8, 32)])
def test_room_of_the_cache_is_block_size(shape):
    """The room was once taken from the head's size, which happened to equal block_size here."""
    block_size, width = shape
    model = make(block_size=block_size, n_embd=width)
    cache, tokens = KVCache(model.config, 1), some_tokens(1, block_size)
    assert_last(model(tokens, cache=cache)[0], model, list(tokens))
    with pytest.raises(ValueError, match=f"room for {block_size}"):
        model(tokens[:, :1], cache=cache)


@torch.inference_mode()
def test_several_tokens_at_a_time():
    """Every way of cutting the text in three."""
    model, tokens = make(), some_tokens(2, 8)
    for a, b in itertools.combinations(range(1, 8), 2):
        cache = KVCache(model.config, 2)
        for part in tokens.tensor_split((a, b), dim=1):
            logits, _ = model(part, cache=cache)
        assert_last(logits, model, list(tokens))


@torch.inference_mode()
@each_variant
def test_rows_of_unequal_lengths(options):
    """Every pair of lengths: each row as if alone, at the prompt and at every step after it."""
    model, tokens = make(**options), some_tokens(2, 8)
    for lengths in itertools.product(range(1, 9), repeat=2):
        cache, now = KVCache(model.config, 2), list(lengths)
        padded = torch.zeros(2, max(lengths), dtype=torch.long)
        for row, length in enumerate(lengths):
            padded[row, :length] = tokens[row, :length]
        logits, _ = model(padded, cache=cache, lengths=now)
        assert_last(logits, model, [tokens[row, : now[row]] for row in range(2)])
        while max(now) < 8:
            newest = torch.stack([tokens[row, n : n + 1] for row, n in enumerate(now)])
            logits, _ = model(newest, cache=cache)
            now = [n + 1 for n in now]
            assert_last(logits, model, [tokens[row, : now[row]] for row in range(2)])


@torch.inference_mode()
@pytest.mark.parametrize("options", [{}, {"position": "rope"}])
def test_unequal_parts_for_unequal_rows(options):
    """Padded parts on top of rows that differ already; a row may get none at all."""
    model, tokens = make(**options), some_tokens(3, 8)
    cache, done = KVCache(model.config, 3), [0, 0, 0]
    for counts in ([1, 3, 2], [2, 0, 1], [1, 2, 3]):
        padded = torch.zeros(3, max(counts), dtype=torch.long)
        for row, count in enumerate(counts):
            padded[row, :count] = tokens[row, done[row] : done[row] + count]
        logits, _ = model(padded, cache=cache, lengths=counts)
        done = [before + count for before, count in zip(done, counts, strict=True)]
        there = [row for row, count in enumerate(counts) if count]
        assert_last(logits[there], model, [tokens[row, : done[row]] for row in there])


@torch.inference_mode()
def test_rows_that_stay_go_on_as_before():
    """keep: rows leave the batch, in any order, whether the lengths are equal or not."""
    model, tokens = make(), some_tokens(4, 8)
    for lengths in ([4, 4, 4, 4], [2, 4, 3, 4]):
        cache = KVCache(model.config, 4)
        model(tokens[:, :4], cache=cache, lengths=lengths)
        cache.keep([3, 1])
        logits, _ = model(torch.stack([tokens[3, 4:5], tokens[1, 4:5]]), cache=cache)
        assert_last(logits, model, [tokens[3, :5], tokens[1, :5]])


@torch.inference_mode()
def test_replaced_rows_go_on_from_what_they_got():
    """replace: one row full, one new; what lay in the slots before must not shine through."""
    model, tokens = make(), some_tokens(3, 8)
    cache, fresh = KVCache(model.config, 3), KVCache(model.config, 2)
    model(tokens, cache=cache, lengths=[8, 5, 8])
    others = some_tokens(2, 4, seed=9)
    model(others[:, :3], cache=fresh, lengths=[3, 2])
    cache.replace([2, 0], fresh)
    assert cache.lengths == [2, 5, 3]
    newest = torch.stack([others[1, 2:3], tokens[1, 5:6], others[0, 3:4]])
    logits, _ = model(newest, cache=cache)
    assert_last(logits, model, [others[1, :3], tokens[1, :6], others[0, :4]])


@torch.inference_mode()
def test_cache_in_another_precision():
    """The cache is as precise as it is told to be."""
    model = make().bfloat16()
    tokens = some_tokens(2, 5)
    cache = KVCache(model.config, 2, dtype=torch.bfloat16)
    logits, _ = model(tokens, cache=cache, lengths=[5, 3])
    logits, _ = model(tokens[:, :1], cache=cache)
    assert logits.dtype == cache.store.dtype == torch.bfloat16
    expected = model(torch.cat((tokens[:1], tokens[:1, :1]), 1))[0][0, -1]
    torch.testing.assert_close(logits[0, 0], expected, rtol=0.1, atol=0.05)


def test_cross_entropy_ignores_nothing():
    """Token 0 is a token like any other, not padding."""
    model, zeros = make(), torch.zeros(1, 4, dtype=torch.long)
    logits, loss = model(zeros, zeros)
    torch.testing.assert_close(loss, F.cross_entropy(logits[0], zeros[0]))


@pytest.mark.parametrize("p", [0.1, 0.4, 0.5, 0.9])
def test_dropout_drops_a_share_p_and_keeps_the_mean(p):
    """Masks cut from 64-bit draws: the share within five standard deviations, runs as by chance."""
    torch.manual_seed(1)
    count = 1_000_003  # not a multiple of four
    y = Dropout(p).train()(torch.ones(count))
    kept = y > 0
    assert kept.float().mean().item() == pytest.approx(1 - p, abs=5 * (p * (1 - p) / count) ** 0.5)
    assert y[kept].unique().tolist() == pytest.approx([1 / (1 - p)], rel=1e-3)
    assert y.mean().item() == pytest.approx(1, abs=5 * (p / (1 - p) / count) ** 0.5)
    for distance in (1, 2, 3, 4, 5):  # neighbours share a draw, and are to be independent
        both = (kept[:-distance] & kept[distance:]).float().mean().item()
        assert both == pytest.approx((1 - p) ** 2, abs=5 / count**0.5)


def test_dropout_takes_its_masks_from_the_seeded_stream_and_passes_gradients():
    """The same seed gives the same mask, the next draw another; the gradient is the mask."""
    x = torch.randn(7, 5, requires_grad=True)
    dropout = Dropout(0.4).train()
    torch.manual_seed(3)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(3)
    assert torch.equal(dropout(x), first)
    assert not torch.equal(first == 0, second == 0)
    first.sum().backward()
    torch.testing.assert_close(x.grad * x.detach(), first.detach())


def test_dropout_is_off_outside_training_and_at_zero():
    """Nothing is drawn, nothing changed."""
    x = torch.randn(4, 4)
    assert Dropout(0.4).eval()(x) is x or torch.equal(Dropout(0.4).eval()(x), x)
    assert torch.equal(Dropout(0.0).train()(x), x)


def test_dropped_attention_is_the_library_s_on_average():
    """The path that is taken with dropout on a CPU agrees with the fused one but for the masks."""
    torch.manual_seed(1)
    attention = MultiHeadAttention(
        ModelConfig(5, n_head=2, n_embd=8, dropout=1e-9)
    ).train()  # rounds to no mask at all
    x = torch.randn(2, 8, attention.config.n_embd)
    by_hand = attention(x)
    torch.testing.assert_close(by_hand, attention.eval()(x), atol=1e-5, rtol=1e-4)
