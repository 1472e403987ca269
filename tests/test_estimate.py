"""The figures of estimate.py against what they stand for, counted another way or measured."""

import dataclasses
import gc
import itertools
import json
import math
from pathlib import Path

import pytest
import torch

import estimate
from device import autocast, choose_dtype
from estimate import MOST, in_bytes, in_time, lighter, memory_there, rehearse
from model import ModelConfig, Transformer
from optimizer import make_optimizers
from settings import ModelSettings, TrainSettings

CPU = torch.device("cpu")
SMALL = {
    "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "dropout": 0.0, "batch_size": 4,
    "max_iters": 20, "eval_interval": 8,
}  # fmt: skip
VARIANTS = [
    {},
    {"dropout": 0.4},
    {"dropout": 0.4, "activation_checkpointing": True},
    {"dtype": "bfloat16", "position": "rope", "qk_norm": True, "feed_forward": "swiglu"},
    {"optimizer": "muon", "gradient_accumulation_steps": 3},
]

each_variant = pytest.mark.parametrize(
    "options", VARIANTS, ids=lambda options: "-".join(options) or "plain"
)


def a_run(**options) -> tuple[TrainSettings, ModelConfig]:
    """The settings of a small run, but for the options, and its model."""
    settings = TrainSettings(**(SMALL | options))
    names = [field.name for field in dataclasses.fields(ModelSettings)]
    return settings, ModelConfig(80, **{name: getattr(settings, name) for name in names})


def rehearsed(processes: int = 1, **options) -> dict[str, int]:
    """The bytes that a small run would take."""
    return rehearse(*a_run(**options), CPU, processes)


def played(settings: TrainSettings, config: ModelConfig) -> None:
    """Two updates, with contents."""
    model = Transformer(config)
    optimizers = make_optimizers(model, settings)
    tokens = torch.zeros(settings.batch_size, settings.block_size, dtype=torch.int64)
    for _ in range(2):
        for _ in range(settings.gradient_accumulation_steps):
            with autocast(CPU, choose_dtype(settings.dtype, CPU)):
                loss = model(tokens, tokens)[1]
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def reported(there: float = math.inf, processes: int = 1, **options) -> tuple[str, list[str]]:
    """What is printed where so much memory is there, and what was done to measure."""
    done: list[str] = []

    def begin():
        done.append("begin")
        return lambda: done.append("update"), lambda: done.append("evaluate")

    lines = estimate.report(*a_run(**options), CPU, processes, there, begin)
    return "\n".join(lines), done


# ----------------------------------------------------------------------------------------- memory


@each_variant
def test_most_memory_is_what_the_allocator_gave_out(options, tmp_path: Path):
    """Torch must take the same ways without contents, and nothing that it makes may be missed."""
    gc.collect()  # what is left of other tests is not to be freed meanwhile
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        played(*a_run(**options))
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text("utf-8"))["traceEvents"]
    changes = sorted((event for event in events if event["name"] == "[memory]"), key=moment)
    most = max(itertools.accumulate(event["args"]["Bytes"] for event in changes))
    # Beside tensors there are random states, and what products in bfloat16 work with.
    assert rehearsed(**options)[MOST] == pytest.approx(most, rel=0.05)


def moment(event: dict) -> float:
    """When it was."""
    return event["ts"]


@each_variant
def test_activations_are_what_autograd_saves(options):
    """As counted by its own hooks in a real forward pass."""
    settings, config = a_run(**options)
    model, sizes = Transformer(config), {}
    tokens = torch.zeros(settings.batch_size, settings.block_size, dtype=torch.int64)
    given = {tensor.untyped_storage() for tensor in (tokens, *model.parameters())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, autocast(CPU, choose_dtype(settings.dtype, CPU)):
        model(tokens, tokens)
    saved = sum(size for storage, size in sizes.items() if storage not in given)
    assert rehearsed(**options)["activations kept"] == saved


def test_weights_gradients_and_optimizer_state():
    """4 bytes a weight, 4 and 8; Muon takes 4 for the matrices that it moves."""
    model = Transformer(a_run()[1])
    count, tensors = model.parameter_count(), len(list(model.parameters()))
    matrices = [w for name, w in model.named_parameters() if "blocks" in name and w.dim() == 2]
    need, muon = rehearsed(), rehearsed(optimizer="muon")
    assert need["weights"] == need["gradients"] == 4 * count
    assert need["optimizer state"] == 8 * count + 4 * tensors  # each counts its own steps
    assert need["optimizer state"] - muon["optimizer state"] == sum(
        4 * weight.numel() + 4 for weight in matrices
    )


def test_what_one_process_takes():
    """Its share of the windows; and its gradients stay, since they are averaged in place."""
    one, two = rehearsed(batch_size=4), rehearsed(processes=2, batch_size=8)
    assert two[MOST] == rehearsed(batch_size=4, gradient_accumulation_steps=2)[MOST] > one[MOST]
    assert two["activations kept"] == one["activations kept"]


def test_hundreds_of_gigabytes_are_rehearsed_anywhere():
    """That is the use of it: to know before the memory is taken, and the machine with it."""
    need = rehearsed(n_embd=1024, n_head=16, block_size=4096, batch_size=64, dropout=0.4)
    of_attention = 2 * 64 * 16 * 4096**2 * 4 * 3  # layers, windows, heads, T T, bytes, thrice
    assert need["activations kept"] == pytest.approx(of_attention, rel=0.1)


def test_the_memory_there():
    """A whole machine's for one process, and a share for each of several on it."""
    whole = memory_there(CPU, 1)
    assert whole > 2**28
    assert memory_there(CPU, 2) == whole / 2


@pytest.mark.parametrize(
    ("batch_size", "processes", "excess", "parts"),
    [
        (64, 1, 0.1, 2),
        (64, 2, 0.1, 2),
        (64, 1, 3, 4),
        (12, 2, 2.5, 3),
        (7, 1, 0.1, 7),
        (8, 1, 99, 8),
    ],
)
def test_smaller_batches_make_the_same_update(batch_size, processes, excess, parts):
    """As many windows an update, in passes that can be shared out, small enough if any is."""
    settings = TrainSettings(batch_size=batch_size, gradient_accumulation_steps=3)
    changes = list(lighter(settings, CPU, processes, excess))
    smaller = {"batch_size": batch_size // parts, "gradient_accumulation_steps": 3 * parts}
    assert smaller | {"eval_iters": 10 * parts} in changes


def test_what_is_set_or_at_its_end_is_not_advised():
    settings = TrainSettings(batch_size=2, activation_checkpointing=True, dtype="bfloat16")
    assert not list(lighter(settings, CPU, 2, 9.0))
    assert "or instead" not in reported(n_layer=1, batch_size=1, dtype="bfloat16")[0]


# ------------------------------------------------------------------------------------- the report


EXPECTED = """\
Size (computed)
  parameters                30,992
  FLOPs per token          175,104  6 N + 12 L C T; N: weights of linear layers
  FLOPs of the run        2.24e+08  20 updates of 64 tokens

Memory of each process (computed: 2 windows of 16 tokens at a time, in float32)
  weights                  0.1 MiB
  gradients                0.1 MiB
  optimizer state          0.2 MiB
  activations kept         0.1 MiB
  most at one time         0.6 MiB  of 8.0 GiB
  or instead               0.6 MiB  with --activation_checkpointing=true
  or instead               0.5 MiB  with --batch_size=2 --gradient_accumulation_steps=2\
 --eval_iters=20

Time (measured: 3 updates, one evaluation, on cpu (2 threads))
  an update                 200 ms  320 tokens a second
  an evaluation              3.0 s  4 of them; saving comes on top,
                                    and the whole validation split at the end
  the run                   16.0 s
"""


def test_the_report(monkeypatch):
    """Every figure stands under a heading that says whether it is computed or measured."""
    lengths = iter([9.0, 0.5, 0.1, 0.2, 3.0])  # warm-up, three updates, an evaluation
    monkeypatch.setattr(estimate, "seconds", lambda action, device: (action(), next(lengths))[1])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    text, done = reported(there=2**33, processes=2)
    assert done == ["begin", *["update"] * 4, "evaluate"]
    assert f"{text}\n" == EXPECTED


def test_without_room_nothing_is_built():
    """The estimate must not itself run out of memory."""
    need = rehearsed(n_layer=1)[MOST]
    text, done = reported(there=need, n_layer=1)
    assert not done
    assert text.splitlines()[-1] == "Time: not measured, since the most is over 75% of the memory"
    text, done = reported(n_layer=1)
    assert done and "\nMemory (computed: 4 windows of 16 tokens at a time, in float32)\n" in text


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0.0 MiB"), (2**20 * 1.5, "1.5 MiB"), (2**30, "1.0 GiB"), (2**41, "2,048.0 GiB")],
)
def test_bytes_in_words(count, expected):
    assert in_bytes(count) == expected


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0.0004, "0 ms"), (1.9, "1,900 ms"), (2, "2.0 s"), (150, "2.5 min"), (9000, "2.5 hours"),
     (259200, "3.0 days")],
)  # fmt: skip
def test_times_in_words(length, expected):
    assert in_time(length) == expected
