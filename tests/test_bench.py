"""The rules of bench.py: what is compared does the same work, and the figures add up."""

import dataclasses

import numpy as np
import pytest
import torch

import bench
from model import ModelConfig, Transformer
from settings import UserError

CPU = torch.device("cpu")


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
    turns: list[str] = []
    ways = {"ours": lambda: turns.append("ours"), "plain": lambda: turns.append("plain")}
    seconds = bench.take_turns(ways, 3)
    ours, plain = bench.compare("work", seconds, lambda seconds: 60 / seconds, "a minute")
    assert turns == ["ours", "plain"] * 4
    assert (ours.value, plain.value) == (30, pytest.approx(60 / 9))
    assert (ours.ours, plain.ours) == (1, 4.5)
    assert ours.spread == 1 and "4.50 times" in str(plain)


def test_shares_are_told_and_an_unknown_card_too():
    """A card that is not in the table gets no made-up figure."""
    figure = bench.Figure("training", "ours", 5, "tokens/s", 0, 1)
    shares = {"a large product's rate": 0.43, "the card's peak (MFU)": None}
    told = str(dataclasses.replace(figure, shares=shares))
    assert told.endswith("43% of a large product's rate, the card's peak (MFU): unknown card")
    assert "%" not in str(figure).partition("takes")[2]


def test_updates_change_the_weights(monkeypatch):
    """What is timed as training does learn: each turn ends elsewhere than it began."""
    config = ModelConfig(bench.VOCABULARY, block_size=8, n_layer=1, n_head=1, n_embd=8)
    model = Transformer(config)
    monkeypatch.setattr(bench, "ModelConfig", lambda *_, **__: config)
    monkeypatch.setattr(bench, "models", lambda: {"ours": lambda _: model})
    act = bench.updates("ours", 0.4, 2, CPU)
    before = model.head.weight.clone()
    act()
    assert not torch.equal(model.head.weight, before)
    assert model.head.weight.grad is None


def test_peak_memory_is_in_bytes_and_grows():
    """Linux tells kilobytes; and a peak stays after what made it has gone."""
    before = bench.peak_memory(CPU)
    np.ones(before, np.uint8)
    assert 1 < bench.peak_memory(CPU) / before < 3


@pytest.mark.slow
def test_memory_is_this_process_own():
    """getrusage on Linux begins with what the parent had held, and growth would come out as 0."""
    held = np.ones(bench.peak_memory(CPU), np.uint8)
    options = bench.BenchSettings(quick=True)
    ours, plain, *_ = bench.memory(options, CPU)
    assert len(held) > 0 and 50 < ours.value < 1000 and 50 < plain.value < 1000
    assert (ours.ours, plain.ours) == (1, pytest.approx(plain.value / ours.value))


def test_prepared_text_is_as_large_as_asked_for(tmp_path):
    """Made-up English is of the length that is told; plain preparation keeps every character."""
    text = bench.made_up_english(2_000_000)
    assert 1_500_000 < len(text) <= 2_000_000
    (tmp_path / "text.txt").write_text(text[:5000], "utf-8")
    bench.plain_preparation(tmp_path / "text.txt", tmp_path / "plain.npy")
    assert len(np.load(tmp_path / "plain.npy")) == len(text[:5000].replace("\n\n", ""))


def test_unknown_parts_are_refused():
    """A misspelt part is told at once, with those there are."""
    with pytest.raises(UserError, match="only = trainin: there are preparation, feeding"):
        bench.main(["--only", "trainin"])


@pytest.mark.slow
def test_the_whole_bench(capsys):
    """Every section runs, and the last line is the table as JSON."""
    bench.main(["--quick", "--only", *bench.SECTIONS])
    last = capsys.readouterr().out.splitlines()[-1]
    told = {figure["what"].split(" ")[0].strip(",") for figure in bench.json.loads(last)}
    assert told == set(bench.SECTIONS)
