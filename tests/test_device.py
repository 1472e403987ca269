"""The rules of device.py; stand-ins play the accelerators, and what needs a real one is skipped."""

import warnings

import pytest
import torch

import device as machine
from model import ModelConfig, Transformer
from settings import UserError

CPU = torch.device("cpu")


@pytest.fixture
def there(monkeypatch):
    """Makes believe that so many CUDA devices are there, and Apple's or not."""

    def there(cuda=0, mps=False, bfloat16=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: bfloat16)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return there


@pytest.mark.parametrize(
    ("cuda", "mps", "name", "expected"),
    [
        (0, False, "auto", "cpu"),
        (0, True, "auto", "mps"),
        (1, True, "auto", "cuda"),
        (1, False, "cpu", "cpu"),
        (2, False, "cuda", "cuda"),
        (2, False, "cuda:1", "cuda:1"),
        (0, True, "mps", "mps"),
        (0, False, "cpu:0", "cpu:0"),
    ],
)
def test_a_device_is_chosen(there, cuda, mps, name, expected):
    """auto takes the fastest there is; a name is taken at its word."""
    there(cuda, mps)
    assert str(machine.choose_device(name)) == expected


@pytest.mark.parametrize("name", ["cuda", "cuda:7", "mps", "cpu:1", "xpu", "meta"])
def test_a_device_that_is_not_there_is_refused(there, name):
    """With the number of its kind on this machine, and what would do."""
    there()
    count = int(name == "cpu:1")
    expected = f"device = '{name}': this machine has {count} of that kind; try auto or cpu"
    with pytest.raises(UserError, match=f"^{expected}$"):
        machine.choose_device(name)


def test_the_index_of_a_device_counts_from_0(there):
    """Two devices are cuda:0 and cuda:1."""
    there(cuda=2)
    with pytest.raises(UserError, match="this machine has 2 of that kind"):
        machine.choose_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "cuda:-1", "CPU", "cpu cuda"])
def test_what_is_no_device_is_refused(name):
    """With those that are."""
    with pytest.raises(UserError, match="expected auto, cpu, cuda, cuda:N or mps"):
        machine.choose_device(name)


def test_the_precision_is_chosen(there):
    """bfloat16 only where CUDA has it; a name is taken at its word."""
    there(cuda=1)
    assert machine.choose_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert machine.choose_dtype("auto", CPU) is torch.float32
    there(cuda=1, bfloat16=False)
    assert machine.choose_dtype("auto", torch.device("cuda")) is torch.float32
    for name in ("float32", "bfloat16", "float16"):
        assert machine.choose_dtype(name, CPU) is getattr(torch, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_run_in_the_precision_and_weights_stay(dtype):
    """float32 needs no context at all."""
    layer = torch.nn.Linear(2, 2)
    with machine.autocast(CPU, dtype):
        assert layer(torch.ones(1, 2)).dtype is dtype
    assert layer.weight.dtype is torch.float32


def test_a_device_is_described(monkeypatch):
    """As one would name it to a person."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a fast one {device.index}")
    assert machine.describe(torch.device("cuda:1")) == "cuda:1 (a fast one 1)"
    assert machine.describe(torch.device("mps")) == "mps"
    assert machine.describe(CPU) == f"cpu ({torch.get_num_threads()} threads)"


def small_model():
    return Transformer(ModelConfig(vocab_size=5, block_size=4, n_layer=1, n_head=1, n_embd=4))


TOKENS = torch.zeros(2, 4, dtype=torch.int64)


def test_a_compiler_that_fails_is_one_warning(monkeypatch):
    """And the model goes on as it is, its gradients and random streams untouched."""

    class Broken(torch.nn.Module):
        def forward(self, *_):
            torch.rand(3)
            raise RuntimeError("\nno working C++ compiler was found\nand much more")

    monkeypatch.setattr(torch, "compile", lambda model: Broken())
    model, before = small_model(), torch.get_rng_state()
    with pytest.warns(UserWarning) as caught:
        assert machine.compiled(model, TOKENS) is model
    assert [str(warning.message) for warning in caught] == [
        "compile: going on without, since it failed: no working C++ compiler was found"
    ]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_compiler_that_fails_without_a_word_is_still_a_warning(monkeypatch):
    """Its error may have no text: then its name has to do."""

    def fail(_):
        raise NotImplementedError

    monkeypatch.setattr(torch, "compile", fail)
    with pytest.warns(UserWarning, match="compile: going on without, since it failed: Not"):
        machine.compiled(small_model(), TOKENS)


def test_what_is_compiled_is_tried_first(monkeypatch):
    """Forward and backward, since a compiler fails only when it is used; no gradient remains."""
    model, tried = small_model(), []
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: tried.append(backward(loss)))
    before = torch.get_rng_state()
    assert machine.compiled(model, TOKENS) is model and len(tried) == 1
    assert all(weight.grad is None for weight in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_without_a_compiler_on_the_path(monkeypatch, tmp_path):
    """What torch really does then."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    model = small_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert machine.compiled(model, TOKENS) is model
    assert "compile: going on without" in str(caught[-1].message)
    assert not any(name.startswith("_orig_mod") for name in model.state_dict())


def test_the_random_state_is_put_back():
    """What is drawn after is what was drawn before."""
    state = machine.random_state(CPU)
    drawn = torch.rand(3)
    machine.set_random_state(state, CPU)
    assert torch.equal(torch.rand(3), drawn)


def test_the_state_of_another_device_does_not_matter_here():
    """A run of a GPU goes on on a CPU: dropout draws other numbers, and that is all."""
    state = machine.random_state(CPU) | {"cuda": torch.zeros(16, dtype=torch.uint8)}
    machine.set_random_state(state, CPU)
    assert torch.equal(torch.get_rng_state(), state["cpu"])


def test_the_random_state_of_a_gpu_is_kept_with_the_cpus(monkeypatch):
    """Dropout draws on the GPU, so that its stream has to be put back too."""
    streams = {"cuda": torch.tensor([1, 2, 3], dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _device: streams["cuda"])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda s, _device: streams.update(cuda=s))
    state = machine.random_state(torch.device("cuda"))
    assert torch.equal(state["cuda"], streams["cuda"])
    machine.set_random_state(state | {"cuda": torch.ones(1)}, torch.device("cuda"))
    assert torch.equal(streams["cuda"], torch.ones(1))
    del state["cuda"]  # a run of the CPU, gone on with here
    machine.set_random_state(state, torch.device("cuda"))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
)
def test_out_of_memory_becomes_advice(error):
    """Whichever of three ways it comes about."""
    with (
        pytest.raises(UserError, match=r"^out of memory: lower it$"),
        machine.memory_advice("lower it"),
    ):
        raise error


def test_memory_really_gone_becomes_advice():
    """More than any machine has: torch's own words for it must be known."""
    with (
        pytest.raises(UserError, match=r"^out of memory: lower it$"),
        machine.memory_advice("lower it"),
    ):
        torch.empty(2**50)


def test_other_errors_pass():
    """Advice about memory would lead astray."""
    with pytest.raises(RuntimeError, match="shapes"), machine.memory_advice("lower it"):
        raise RuntimeError("shapes do not fit")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_on_a_gpu():
    """For real: what is drawn there after is what was drawn before."""
    gpu = torch.device("cuda")
    state = machine.random_state(gpu)
    drawn = torch.rand(3, device=gpu)
    machine.set_random_state(state, gpu)
    assert torch.equal(torch.rand(3, device=gpu), drawn)


def test_float16_needs_the_scaling_of_cuda():
    """Without it small gradients are 0, and the loss just stays where it is."""
    with pytest.raises(UserError, match=r"dtype = float16 on cpu: .* bfloat16 or float32"):
        machine.check_dtype("float16", CPU)
    machine.check_dtype("float16", torch.device("cuda"))
    machine.check_dtype("auto", CPU)


def test_a_gpu_may_use_tf32_and_nothing_changes_on_a_cpu(monkeypatch):
    """There the same switch would allow products in bfloat16."""
    precisions = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    machine.allow_tf32(CPU)
    assert precisions == []
    machine.allow_tf32(torch.device("cuda"))
    assert precisions == ["high"]


def test_batches_are_pinned_on_their_way_to_a_gpu_alone(monkeypatch):
    """A copy from pinned memory goes on while the host does; others need none."""
    tensor = torch.arange(3)
    assert machine.moved(tensor, CPU) is tensor
    sent = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: sent.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *where, **how: sent.append((where, how)))
    machine.moved(tensor, torch.device("cuda"))
    assert sent == ["pinned", ((torch.device("cuda"),), {"non_blocking": True})]
