"""How the weights are moved: AdamW, or Muon for the matrices, and the step size over the run."""

import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from settings import TrainSettings


def make_optimizers(
    model: nn.Module, settings: TrainSettings, states: list[dict[str, Any]] | None = None
) -> list[Optimizer]:
    """AdamW over every parameter; or, as the settings say, over all but those that Muon takes.

    states: of a run to go on with; the optimizers' memory is from there, their numbers never.
    """
    inside = {id(weight): weight for weight in muon_matrices(model, settings)}
    rest = [weight for weight in model.parameters() if id(weight) not in inside]
    optimizers: list[Optimizer] = [
        AdamW(
            decay_groups(rest, settings),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            fused=True,  # one kernel for all parameters; torch has it for cpu, cuda and mps
        )
    ]
    if inside:
        optimizers.append(Muon(inside.values(), settings.muon_lr, settings.weight_decay))
    for optimizer, state in zip(optimizers, states or [], strict=bool(states)):
        fresh = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state["state"], "param_groups": fresh})
    return optimizers


def decay_groups(weights: list[nn.Parameter], settings: TrainSettings) -> list[dict[str, Any]]:
    """AdamW's groups: all decay alike, or matrices and embeddings do and vectors do not."""
    if settings.decayed == "all":
        return [{"params": weights, "weight_decay": settings.weight_decay}]
    matrices = [weight for weight in weights if weight.dim() > 1]
    vectors = [weight for weight in weights if weight.dim() == 1]
    return [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def muon_matrices(model: nn.Module, settings: TrainSettings) -> list[nn.Parameter]:
    """The matrices inside the blocks, if Muon is to move them."""
    if settings.optimizer != "muon":
        return []
    named = model.named_parameters()
    return [weight for name, weight in named if name.startswith("blocks.") and weight.dim() == 2]


def make_schedule(optimizer: Optimizer, settings: TrainSettings, step: int) -> LRScheduler:
    """Linear warm-up to the optimizer's rate, then a cosine down at max_iters; wound on to `step`.

    The cosine ends at min_lr, or for another rate than learning_rate at the same share of it.
    Winding it on, rather than loading its state, lets a resumed run change the schedule.
    """
    warmup, peak = settings.warmup_iters, optimizer.param_groups[0]["lr"]
    steps, end = max(1, settings.max_iters - warmup), settings.min_lr / settings.learning_rate
    schedule: LRScheduler = CosineAnnealingLR(optimizer, steps, peak * end)
    if warmup:
        rise = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
        schedule = SequentialLR(optimizer, [rise, schedule], milestones=[warmup])
    with warnings.catch_warnings():  # torch warns of a schedule that steps before its optimizer
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(step):
            schedule.step()
    return schedule


class Muon(Optimizer):
    """Momentum, made orthogonal: a matrix moves as far in weak directions as in strong ones.

    After Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. Unlike torch.optim.Muon
    in float32, and for all matrices of a shape at once: bfloat16 is slow on most CPUs.
    """

    def __init__(
        self,
        weights: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update of each matrix (R, C), by lr sqrt(max(1, R / C)) in every direction."""
        for group in self.param_groups:
            weights = sorted((w for w in group["params"] if w.grad is not None), key=shape_of)
            for _, alike in itertools.groupby(weights, shape_of):
                self.move(list(alike), group["lr"], group["weight_decay"], group["momentum"])

    def move(
        self, weights: list[nn.Parameter], lr: float, weight_decay: float, momentum: float
    ) -> None:
        """Updates N matrices of one shape."""
        gradients = torch.stack([weight.grad for weight in weights])  # (N, R, C)
        memory = self.state[weights[0]].setdefault("momentum", torch.zeros_like(gradients))
        memory.lerp_(gradients, 1 - momentum)
        directions = orthogonalize(gradients.lerp_(memory, momentum))  # (N, R, C), Nesterov's way
        rows, columns = weights[0].shape
        for weight, direction in zip(weights, directions, strict=True):
            weight.mul_(1 - lr * weight_decay)
            weight.sub_(direction, alpha=lr * max(1, rows / columns) ** 0.5)


def shape_of(weight: Tensor) -> tuple[int, ...]:
    """The sizes as a tuple, which can be sorted by."""
    return tuple(weight.shape)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Roughly the nearest matrices (N, R, C) whose singular values are 1: within 0.68 and 1.14.

    Five Newton-Schulz steps with the coefficients of Jordan et al. 2024, which reach that range
    fastest rather than 1 exactly.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices  # the products are smaller on the short side
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x
