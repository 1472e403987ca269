"""The rules of bench.py: what is compared does the same work, and the figures add up."""

import pytest
import torch

import bench
from model import ModelConfig, Transformer


def same_weights(plain: bench.PlainGPT, model: Transformer) -> None:
    """Gives the plain model the weights of ours."""
    for name in ("token_embedding", "position_embedding", "head"):
        getattr(plain, name).load_state_dict(getattr(model, name).state_dict())
    plain.norm.load_state_dict(model.final_norm.state_dict())
    for theirs, ours in zip(plain.blocks, model.blocks, strict=True):
        theirs.norm1.load_state_dict(ours.attention_norm.state_dict())
        theirs.norm2.load_state_dict(ours.feed_forward_norm.state_dict())
        theirs.projection.load_state_dict(ours.attention.projection.state_dict())
        theirs.feed_forward[0].load_state_dict(ours.feed_forward.widen.state_dict())
        theirs.feed_forward[2].load_state_dict(ours.feed_forward.projection.state_dict())
        for head, view in zip(theirs.heads, ours.attention.heads(), strict=True):
            with torch.no_grad():
                for name in ("query", "key", "value"):
                    getattr(head, name).weight.copy_(getattr(view, name))


def test_the_plain_model_is_the_same_model():
    """Its logits and loss are ours, so that the speeds are of the same work."""
    config = ModelConfig(11, block_size=8, n_layer=2, n_head=2, n_embd=16)
    plain, model = bench.PlainGPT(config).eval(), Transformer(config).eval()
    same_weights(plain, model)
    tokens, targets = torch.randint(11, (3, 8)), torch.randint(11, (3, 8))
    for theirs, ours in zip(plain(tokens, targets), model(tokens, targets), strict=True):
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)


def test_figures_come_from_medians_in_turn(monkeypatch):
    """The first way is ours; a turn before the others does not count; the rest is arithmetic."""
    clock = iter([0, 0, 0, 2, 0, 6, 0, 1, 0, 9, 0, 3, 0, 12])  # starts and ends
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    options = bench.BenchSettings(repeats=3)
    turns: list[str] = []
    ways = {"ours": lambda: turns.append("ours"), "plain": lambda: turns.append("plain")}
    ours, plain = bench.compare("work", ways, options, lambda seconds: 60 / seconds, "a minute")
    assert turns == ["ours", "plain"] * 4
    assert (ours.value, plain.value) == (30, pytest.approx(60 / 9))
    assert (ours.ours, plain.ours) == (1, 4.5)
    assert ours.spread == 1 and "4.50 times" in str(plain)


@pytest.mark.slow
def test_the_whole_bench(capsys):
    """Every section runs, and the last line is the table as JSON."""
    bench.main(["--quick"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert {figure["what"].split(",")[0] for figure in bench.json.loads(last)} == {
        "feeding", "training", "evaluation", "generation",
    }  # fmt: skip
