"""How the weights are moved: AdamW, and its step size over the run."""

import warnings
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from settings import TrainSettings


def make_optimizer(
    model: nn.Module, settings: TrainSettings, state: dict[str, Any] | None
) -> AdamW:
    """AdamW over every parameter; its memory is from `state`, its numbers from the settings."""
    optimizer = AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,  # one kernel for all parameters; torch has it for cpu, cuda and mps
    )
    if state:
        fresh = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state["state"], "param_groups": fresh})
    return optimizer


def make_schedule(optimizer: Optimizer, settings: TrainSettings, step: int) -> LRScheduler:
    """Linear warm-up to learning_rate, then a cosine to min_lr at max_iters; wound on to `step`.

    Winding it on, rather than loading its state, lets a resumed run change the schedule.
    """
    warmup = settings.warmup_iters
    steps = max(1, settings.max_iters - warmup)
    schedule: LRScheduler = CosineAnnealingLR(optimizer, steps, settings.min_lr)
    if warmup:
        rise = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
        schedule = SequentialLR(optimizer, [rise, schedule], milestones=[warmup])
    with warnings.catch_warnings():  # torch warns of a schedule that steps before its optimizer
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(step):
            schedule.step()
    return schedule
