"""The filters on hand-made logits, and generation against plain loops that recompute."""

import itertools
import math
from collections import Counter

import pytest
import torch

from generate import (
    Sampling,
    default_start,
    draw,
    generate,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize,
    score,
    temper,
    write,
)
from model import ModelConfig, Transformer
from tokenizer import CharTokenizer

PLAIN, GREEDY = Sampling(), Sampling(temperature=0)
WILD = Sampling(repetition_penalty=1.3, temperature=1.5, top_k=9, top_p=0.95, min_p=0.02)


def make(block_size: int = 8, **options) -> Transformer:
    """A small model with opinions: its weights are large enough for every token to matter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Transformer(ModelConfig(11, block_size, 2, 2, 16, dropout=0.5, **options)).eval()
        model.head.weight.data.mul_(5)
    return model


def streams(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def tokens_of(steps, rows: int = 1) -> list[list[int]]:
    """What each row wrote."""
    written = [[] for _ in range(rows)]
    for row, token, _ in itertools.chain.from_iterable(steps):
        written[row].append(token)
    return written


def kept(logits: torch.Tensor) -> list[list[int]]:
    """Which tokens of each row are still possible."""
    return [row.isfinite().nonzero()[:, 0].tolist() for row in logits]


def logits_of(*rows: list[float]) -> torch.Tensor:
    """Logits with these probabilities."""
    return torch.tensor(rows, dtype=torch.float64).log()


# ------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (0, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (1, [[1], [0]]),
        (2, [[1, 3], [0, 1]]),
        (3, [[0, 1, 3], [0, 1, 2]]),
        (4, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (1000, [[0, 1, 2, 3], [0, 1, 2, 3]]),
    ],
)
def test_top_k(k, expected):
    """0 and more than there are switch it off; of equal tokens exactly k stay, lowest ids first."""
    logits = logits_of([0.2, 0.4, 0.1, 0.3], [0.25, 0.25, 0.25, 0.25])
    filtered = keep_top_k(logits, k)
    assert kept(filtered) == expected
    assert torch.equal(filtered[filtered.isfinite()], logits[filtered.isfinite()])


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (1e-9, [[1], [0]]),
        (0.39, [[1], [0, 1]]),
        (0.41, [[1, 3], [0, 1]]),
        (0.69, [[1, 3], [0, 1, 2]]),
        (0.71, [[0, 1, 3], [0, 1, 2]]),
        (0.75, [[0, 1, 3], [0, 1, 2]]),
        (0.99, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (1.0, [[0, 1, 2, 3], [0, 1, 2, 3]]),
    ],
)
def test_top_p(p, expected):
    """The fewest that reach p, the one that crosses it included; never none."""
    logits = logits_of([0.2, 0.4, 0.1, 0.3], [0.25, 0.25, 0.25, 0.25])
    assert kept(keep_top_p(logits, p)) == expected


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.0, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (0.2, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (0.26, [[0, 1, 3], [0, 1, 2, 3]]),
        (0.7, [[1, 3], [0, 1, 2, 3]]),
        (1.0, [[1], [0, 1, 2, 3]]),
    ],
)
def test_min_p(p, expected):
    """A share of the likeliest, whatever else there is; equal tokens share their fate."""
    logits = logits_of([0.2, 0.4, 0.1, 0.3], [0.25, 0.25, 0.25, 0.25])
    assert kept(keep_min_p(logits, p)) == expected


def test_filters_leave_what_was_ruled_out():
    """A token of probability 0 stays at 0, and does not count."""
    logits = logits_of([0.0, 0.6, 0.0, 0.4])
    assert kept(keep_top_k(logits, 3)) == kept(keep_top_p(logits, 0.999)) == [[1, 3]]
    assert kept(keep_min_p(logits, 0.01)) == kept(temper(logits, 2.0)) == [[1, 3]]


def test_temperature():
    """Probabilities to the power 1 / temperature; at both ends of the range nothing overflows."""
    logits = logits_of([0.2, 0.4, 0.1, 0.3], [0.7, 0.1, 0.1, 0.1])
    squared = logits.exp() ** 2
    tempered = temper(logits, 0.5).softmax(-1)
    torch.testing.assert_close(tempered, squared / squared.sum(-1, keepdim=True))
    assert temper(1000 * logits, 5e-324).softmax(-1).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    torch.testing.assert_close(temper(logits, 1e300).softmax(-1), torch.full_like(logits, 0.25))


def test_repetition_penalty():
    """Positive logits are divided and negative ones multiplied: both become less likely."""
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0], [2.0, -2.0, 1.0, 0.0]])
    seen = [[0, 1, 1], [3]]
    assert penalize(logits, seen, 2.0).tolist() == [[1, -4, 1, 0], [2, -2, 1, 0]]
    assert penalize(logits, seen, 0.5).tolist() == [[4, -1, 1, 0], [2, -2, 1, 0]]
    assert penalize(logits, seen, 1.0).tolist() == logits.tolist()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU"))])  # fmt: skip
def test_filters_work_where_the_logits_are(device):
    logits = logits_of([0.2, 0.4, 0.1, 0.3]).to(device)
    assert kept(keep_min_p(keep_top_p(keep_top_k(logits, 3), 0.7), 0.8)) == [[1]]


# ------------------------------------------------------------------------------------- drawing


def drawn(logits: torch.Tensor, times: int = 1, **sampling) -> Counter:
    """How often each token comes."""
    [stream] = streams(1)
    return Counter(draw(logits, [[0]], Sampling(**sampling), [stream]).item() for _ in range(times))


def test_draws_follow_the_probabilities():
    """Within four standard deviations of each count."""
    probabilities = [0.05, 0.6, 0.0, 0.25, 0.1]
    counts = drawn(logits_of(probabilities), 4000)
    for token, p in enumerate(probabilities):
        assert abs(counts[token] - 4000 * p) <= 4 * math.sqrt(4000 * p * (1 - p))


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_the_ends_of_the_uniform_draw(uniform, monkeypatch):
    """Rounding must neither give a token of probability 0 nor one past the vocabulary."""
    monkeypatch.setattr(torch, "rand", lambda count, generator: torch.tensor([uniform]))
    for size in (3, 80, 1000):
        weights = torch.rand_like(torch.zeros(size, dtype=torch.float64)) + 1e-9
        weights[0] = weights[-1] = 0
        token = draw(weights.log()[None], [[0]], PLAIN, streams(1))
        assert token.item() == (1 if uniform == 0 else size - 2)


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(top_k=1), Sampling(top_p=1e-9), Sampling(temperature=1e-300)]
)
def test_greedy_in_four_ways(sampling):
    """Temperature 0, and each filter at its narrowest, are the argmax, for every row and seed."""
    logits = torch.randn(50, 11, generator=streams(0)[0], dtype=torch.float64)
    for seed in range(3):
        tokens = draw(logits, [[0]] * 50, sampling, streams(*range(seed, seed + 50)))
        assert torch.equal(tokens, logits.argmax(-1))


def test_greedy_among_equals_takes_the_first():
    logits = logits_of([0.1, 0.3, 0.3, 0.3])
    assert drawn(logits, temperature=0) == drawn(logits, top_k=1) == {1: 1}


def test_greedy_takes_nothing_from_the_stream():
    [stream] = streams(1)
    before = stream.get_state()
    draw(logits_of([0.5, 0.5]), [[0]], GREEDY, [stream])
    assert torch.equal(stream.get_state(), before)


def test_the_order_of_the_filters():
    """Penalty, temperature, top-k, top-p, min-p: each case comes out otherwise in another order."""
    logits = logits_of([0.4, 0.35, 0.25])
    # The penalty acts on greedy too: the token seen falls behind.
    penalized = draw(torch.tensor([[2.0, 1.9, 0]]), [[0]], Sampling(2.0, 0), streams(1))
    assert penalized.item() == 1
    # Flattened by the temperature first, the likeliest alone no longer reaches 0.39.
    assert set(drawn(logits, 200, temperature=1e6, top_p=0.39)) == {0, 1}
    # Of the two that top-k leaves, the first alone has 0.53.
    assert set(drawn(logits, 200, top_k=2, top_p=0.5)) == {0}
    # Flattened first, all three are within nine tenths of each other.
    assert set(drawn(logits, 200, temperature=1e6, min_p=0.9)) == {0, 1, 2}


# ------------------------------------------------------------------------------------ generation


def plain_loop(model, prompt, seed, count, sampling, kept):
    """Reads the context anew for each token; it grows to block_size, then `kept` of it are left."""
    text, [stream], block_size = list(prompt), streams(seed), model.config.block_size
    length = min(len(text), block_size)
    for _ in range(count):
        logits, _ = model(torch.tensor([text[-length:]]))
        text += draw(logits[:, -1].double(), [text[-block_size:]], sampling, [stream]).tolist()
        length = length + 1 if length < block_size else kept
    return text[len(prompt) :]


@pytest.mark.parametrize("block_size", [1, 2, 3, 8])
@pytest.mark.parametrize("sampling", [GREEDY, PLAIN, WILD])
@pytest.mark.parametrize("prompt", [[3], [1, 2, 3, 4, 5], list(range(11)) * 2])
def test_against_a_plain_loop(block_size, sampling, prompt):
    """Token for token far past the context: exact as the tutorial does it, default from half."""
    model = make(block_size)
    for exact, kept in ((True, block_size), (False, max(1, block_size // 2))):
        expected = plain_loop(model, prompt, 5, 40, sampling, kept)
        assert tokens_of(generate(model, [prompt], [5], 40, sampling, exact)) == [expected]


@pytest.mark.parametrize("options", [{}, {"position": "rope"}, {"position": "sinusoidal"}])
@pytest.mark.parametrize("exact", [False, True])
def test_each_row_is_what_it_is_alone(exact, options):
    """Prompts of unequal lengths in one batch, past the context, at their own random streams."""
    model = make(**options)
    prompts = [[1], [1, 2, 3], list(range(8)), [4] * 7, list(range(11)) * 2, [1]]
    seeds = [7, 7, 8, 9, 10, 11]
    together = tokens_of(generate(model, prompts, seeds, 30, WILD, exact), 6)
    for prompt, seed, written in zip(prompts, seeds, together, strict=True):
        assert tokens_of(generate(model, [prompt], [seed], 30, WILD, exact)) == [written]
    assert together[0] != together[5]


def test_a_row_that_is_finished_leaves_the_batch():
    """It costs nothing more, and the others write on as if it had never been there."""
    model, finished, sizes = make(), set(), []
    model.blocks[0].register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    prompts, seeds = [[1], [2, 3], [4]], [1, 2, 3]
    written = [[], [], []]
    for count, step in enumerate(generate(model, prompts, seeds, 30, PLAIN, finished=finished), 1):
        for row, token, _ in step:
            written[row].append(token)
        finished |= {4: {1}, 12: {0}, 20: {2}}.get(count, set())
    assert list(map(len, written)) == [12, 4, 20]
    assert sizes[:5] == [3, 3, 3, 3, 3] and set(sizes[5:8]) == {2} and sizes[-1] == 1
    alone = tokens_of(generate(model, [[4]], [3], 20, PLAIN))
    assert written[2] == alone[0]


def test_the_cost_of_a_token_is_flat():
    """The default reads each token about twice, however long the text; exact reads 8 for each."""
    model, read = make(), []
    model.blocks[0].register_forward_pre_hook(lambda module, args: read.append(args[0].size(1)))
    for exact, most in ((False, 2.0), (True, 8.1)):
        read.clear()
        list(generate(model, [[1]], [1], 400, PLAIN, exact))
        assert sum(read) <= 400 * most
        assert max(read) < 8


def test_log_probabilities_are_the_models_own():
    """Whatever the filters: of the likeliest token of all, say, not 0 because it was greedy."""
    model = make()
    for sampling in (GREEDY, WILD):
        text = [1, 2]
        for [(_, token, log_probability)] in generate(model, [text], [1], 6, sampling):
            expected = model(torch.tensor([text]))[0][0, -1].log_softmax(-1)[token]
            assert log_probability == pytest.approx(expected.item(), abs=1e-5)
            text.append(token)


def test_the_smallest_temperature_is_greedy():
    """Drawn in float64: in float32 a temperature of 1e-300 is 0, and divides 0 by 0."""
    coldest = generate(make(), [[1]], [1], 20, Sampling(temperature=1e-300))
    assert tokens_of(coldest) == tokens_of(generate(make(), [[1]], [1], 20, GREEDY))


def test_streams_are_the_rows_own():
    """The same seed gives the same text whatever ran before, and moves no one else's stream."""
    model = make()
    first = tokens_of(generate(model, [[1]], [2**63 + 5], 20, PLAIN))
    state = torch.get_rng_state()
    assert tokens_of(generate(model, [[1]], [2**63 + 5], 20, PLAIN)) == first
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    one, other = (generate(model, [[1]], [2**63 + 5], 20, PLAIN) for _ in range(2))
    halves = [next(one) for _ in range(10)], list(other), list(one)  # two at once
    assert tokens_of(halves[0] + halves[2]) == tokens_of(halves[1]) == first


def test_a_training_model_is_left_as_it_was():
    """No dropout while it writes, and none forgotten: not between steps, nor when abandoned."""
    model = make()
    expected = tokens_of(generate(model, [[1]], [1], 12, PLAIN))
    model.train()
    steps = generate(model, [[1]], [1], 12, PLAIN)
    written = []
    for step in steps:
        assert model.training and model.blocks[0].feed_forward.dropout.training
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        written.append(step)
    assert tokens_of(written) == expected
    model.final_norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(generate(model, [[1]], [1], 12, PLAIN))
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_to_write():
    model = make()
    assert list(generate(model, [[1]], [1], 0, PLAIN)) == []
    assert list(generate(model, [[1]], [1], 5, PLAIN, finished={0})) == []
    with pytest.raises(ValueError, match="empty"):
        list(generate(model, [[1], []], [1, 1], 5, PLAIN))


def test_write():
    """A continuation without its prompt; an empty prompt is a new line, or the first character."""
    model, tokenizer = make(), CharTokenizer("\nabcdefghij")
    [expected] = tokens_of(generate(model, [[1, 2]], [4], 20, WILD))
    assert write(model, tokenizer, "ab", 20, 4, WILD) == tokenizer.decode(expected)
    assert write(model, tokenizer, "", 20, 4) == write(model, tokenizer, "\n", 20, 4)
    other = CharTokenizer("abcdefghijk")
    assert default_start(other) == "a"
    assert write(model, other, "", 20, 4) == write(model, other, "a", 20, 4)


# --------------------------------------------------------------------------------------- scoring


@pytest.mark.parametrize("block_size", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [2, 3, 8, 9, 10, 12, 13, 50, 300])
def test_score(block_size, length):
    """Every token but the first once, each from as much as windows half of one apart allow."""
    model = make(block_size)
    tokens = torch.randint(11, (length,), generator=streams(1)[0]).tolist()
    starts = list(range(0, length, max(1, block_size // 2)))
    last = max(0, length - 1 - block_size)
    total = 0.0
    for target in range(1, length):
        start = next(
            s for s in [*(s for s in starts if s < last), last] if target <= s + block_size
        )
        logits, _ = model(torch.tensor([tokens[start:target]]))
        assert target - start >= min(target, block_size // 2)
        total -= logits[0, -1].log_softmax(-1)[tokens[target]].item()
    assert score(model.train(), tokens) == pytest.approx(total / (length - 1), abs=1e-5)
    assert model.training
