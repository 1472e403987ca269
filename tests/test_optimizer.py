"""The rules of optimizer.py: what AdamW is given, and the learning rate over a run."""

import math

import pytest
import torch

from model import ModelConfig, Transformer
from optimizer import Muon, make_optimizers, make_schedule, orthogonalize
from settings import TrainSettings


def small_model():
    return Transformer(ModelConfig(vocab_size=5, block_size=4, n_layer=1, n_head=1, n_embd=4))


def rates(until, start=0, **settings):
    """The learning rates of updates `start` to `until`, by a schedule wound on to `start`."""
    chosen = TrainSettings(**settings)
    [optimizer] = make_optimizers(small_model(), chosen)
    schedule = make_schedule(optimizer, chosen, start)
    found = []
    for _ in range(start, until + 1):
        found.append(optimizer.param_groups[0]["lr"])
        assert found[-1] == schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 7, 40])
def test_the_rate_rises_to_the_peak_and_falls_to_min_lr(warmup):
    """Above 0 at step 0, the peak at the end of warm-up, min_lr at max_iters, never outside."""
    found = rates(40, max_iters=40, warmup_iters=warmup, learning_rate=0.01, min_lr=0.001)
    assert all(0 < rate < 0.01 + 1e-9 for rate in found)
    assert found[warmup] == pytest.approx(0.01) == max(found)
    assert found[:warmup] == pytest.approx([0.01 * (i + 1) / (warmup + 1) for i in range(warmup)])
    for step, rate in list(enumerate(found))[warmup:]:
        part = (step - warmup) / max(1, 40 - warmup)
        assert rate == pytest.approx(0.001 + 0.009 * (1 + math.cos(math.pi * part)) / 2)
    assert warmup == 40 or found[-1] == pytest.approx(0.001)


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("start", [0, 1, 6, 7, 8, 19, 20])
def test_a_schedule_wound_on_goes_on_to_the_last_bit(start, warmup):
    """A resumed run has the very rates of a straight one: torch computes each from the last."""
    settings = {"max_iters": 20, "warmup_iters": warmup}
    assert rates(20, start, **settings) == rates(20, **settings)[start:]


@pytest.mark.parametrize(("max_iters", "warmup"), [(0, 0), (1, 0), (1, 1)])
def test_the_shortest_runs_have_a_rate(max_iters, warmup):
    """No division by zero where there is nothing to fall over."""
    found = rates(max_iters, max_iters=max_iters, warmup_iters=warmup)
    assert all(0 < rate <= 1e-3 for rate in found)


def test_the_rate_may_stay_as_it_is():
    """With min_lr at learning_rate."""
    assert rates(9, max_iters=9, min_lr=1e-3) == [1e-3] * 10


def test_every_weight_is_moved():
    """All parameters, each once, in the one group; with tied embeddings too."""
    for tied in (False, True):
        config = ModelConfig(5, 4, n_layer=1, n_head=1, n_embd=4, tied_embeddings=tied)
        model = Transformer(config)
        [[group]] = [one.param_groups for one in make_optimizers(model, TrainSettings())]
        assert [id(weight) for weight in group["params"]] == [id(w) for w in model.parameters()]


def test_vectors_may_be_left_out_of_the_decay():
    """With decayed="matrices", a step without gradients shrinks matrices and embeddings alone."""
    model = small_model()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    settings = TrainSettings(decayed="matrices", weight_decay=0.5, learning_rate=0.1)
    [optimizer] = make_optimizers(model, settings)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for name, weight in model.named_parameters():
        share = 1 - 0.1 * 0.5 if weight.dim() > 1 else 1
        torch.testing.assert_close(weight.detach(), before[name] * share)


def test_a_step_is_that_of_adamw():
    """Against the formulas of arXiv:1711.05101, in float64, over three steps."""
    settings = TrainSettings(learning_rate=0.01, weight_decay=0.1, beta1=0.8, beta2=0.9)
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2, bias=False).double()
    [optimizer] = make_optimizers(model, settings)
    weight = model.weight.detach().clone()
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in (1, 2, 3):
        gradient = torch.randn_like(weight)
        model.weight.grad = gradient
        optimizer.step()
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.9 * square + 0.1 * gradient**2
        length = (square / (1 - 0.9**step)).sqrt() + 1e-8
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * mean / (1 - 0.8**step) / length
        torch.testing.assert_close(model.weight.detach(), weight)


def test_a_former_state_gives_the_memory_and_the_settings_the_numbers():
    """So that a resumed run may change its rates: torch's own loading would bring the old ones."""
    model = small_model()
    [old] = make_optimizers(model, TrainSettings(weight_decay=0.5, beta1=0.5))
    model(torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.int64))[1].backward()
    old.step()
    [new] = make_optimizers(model, TrainSettings(learning_rate=0.1, beta1=0.7), [old.state_dict()])
    (group,) = new.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.1, (0.7, 0.999), 0.03)
    for weight in model.parameters():
        assert torch.equal(new.state[weight]["exp_avg"], old.state[weight]["exp_avg"])
        assert new.state[weight]["step"] == 1


def muon_model() -> Transformer:
    """A model whose blocks hold matrices of three shapes."""
    torch.manual_seed(1)
    return Transformer(ModelConfig(vocab_size=11, n_layer=2, n_head=2, n_embd=16, block_size=8))


def test_orthogonalize_brings_singular_values_near_one():
    """The promise of its docstring, for wide and tall matrices of any scale."""
    torch.manual_seed(0)
    for shape in ((3, 64, 32), (2, 96, 32), (2, 32, 96)):
        for scale in (1e-3, 1.0, 1e3):
            values = torch.linalg.svdvals(orthogonalize(scale * torch.randn(shape)))
            assert values.min() > 0.67 and values.max() < 1.15


def test_muon_moves_as_torchs_own():
    """Two steps of torch.optim.Muon, which works in bfloat16, hence the tolerance."""
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((24, 8), (8, 24), (24, 8))]
    theirs = [torch.nn.Parameter(weight.detach().clone()) for weight in ours]
    pair = (
        Muon(ours, lr=0.1, weight_decay=0.1),
        torch.optim.Muon(theirs, lr=0.1, weight_decay=0.1, momentum=0.95, nesterov=True),
    )
    for _ in range(2):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in pair:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).abs().max() < 0.02 * other.abs().max()


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest():
    """Every parameter has exactly one optimizer."""
    model = muon_model()
    adamw, muon = make_optimizers(model, TrainSettings(optimizer="muon"))
    taken = [id(w) for one in (adamw, muon) for group in one.param_groups for w in group["params"]]
    assert sorted(taken) == sorted(map(id, model.parameters()))
    names = {id(weight): name for name, weight in model.named_parameters()}
    assert {names[id(w)].split(".")[0] for w in muon.param_groups[0]["params"]} == {"blocks"}
    assert all(w.dim() == 2 for w in muon.param_groups[0]["params"])


def test_muon_anneals_to_the_same_share_of_its_rate():
    """min_lr is the end of AdamW's cosine; Muon's ends at min_lr / learning_rate of muon_lr."""
    settings = TrainSettings(optimizer="muon", max_iters=5, learning_rate=1e-2, min_lr=1e-3)
    optimizers = make_optimizers(muon_model(), settings)
    ends = [make_schedule(one, settings, 5).get_last_lr()[0] for one in optimizers]
    assert ends == pytest.approx([1e-3, 2e-3])
