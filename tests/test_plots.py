"""The rules of plots.py; what a picture says is read from the comments in its SVG."""

import importlib
import itertools
import math
import re
import sys

import pytest
import torch

import plots
from checkpoint import load_checkpoint
from model import ModelConfig, Transformer
from plots import (
    attention_maps,
    attention_weights,
    compare_losses,
    embedding_map,
    kind_of,
    loss_curves,
    loss_range,
    principal_components,
)
from settings import UserError
from tokenizer import CharTokenizer


def history_of(count):
    """Evaluations every 50 steps: an untrained 4.4, and a validation loss that rises again."""
    return [
        {
            "step": 50 * i,
            "train_loss": 1 + 3.4 * math.exp(-2 * i),
            "val_loss": 1.1 + 3.3 * math.exp(-2 * i) + 0.5 * i / count,
            "learning_rate": 1e-3,
            "seconds": 360.0 * i,
        }
        for i in range(count)
    ]


def texts(path):
    """What a picture says."""
    return re.findall(r"<!-- (.*?) -->", path.read_text("utf-8"))


def drawn(history, path, title="a run", log=False):
    """The texts of a picture of the losses."""
    loss_curves(history, path, title, log=log)
    return texts(path)


def model_of(text="the cat sat, 3 times", **shape):
    """An untrained model of a text's characters, and its tokenizer."""
    tokenizer = CharTokenizer(text)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16} | shape
    torch.manual_seed(1)
    return Transformer(ModelConfig(vocab_size=tokenizer.vocab_size, **shape)).eval(), tokenizer


# ---------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("count", [1, 2, 25, 1000])
def test_a_picture_of_any_number_of_evaluations(tmp_path, count):
    """One row at the first evaluation, a thousand at the end of a long run: PNG, and no warning."""
    for log in (False, True):
        loss_curves(history_of(count), tmp_path / "loss.png", "a run", log=log)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_a_picture_names_what_it_shows(tmp_path):
    """Axes with units, both curves in their colours, and the step of the lowest validation loss."""
    told = drawn(history_of(25), tmp_path / "loss.svg")
    best = min(history_of(25), key=lambda row: row["val_loss"])
    assert {
        "a run",
        "step",
        "loss, nats per character",
        "learning rate",
        "training, 4.40 to 1.00",
        "validation, 4.40 to 1.58",
        f"best: {best['val_loss']:.3f} at step 150",
        "1,200",
    } <= set(told)
    assert "4.0" not in told  # the axis ends below the untrained loss
    svg = (tmp_path / "loss.svg").read_text("utf-8")
    assert plots.TRAINING.lower() in svg and plots.VALIDATION.lower() in svg
    assert "stroke-dasharray" in svg


def test_a_single_evaluation_is_at_a_single_step(tmp_path):
    """matplotlib alone would mark fractions of a step, all of them written as 0."""
    told = drawn(history_of(1), tmp_path / "loss.svg")
    assert told[told.index("a run") + 1 : told.index("step")] == ["0"]


def test_the_beginning_is_wider_on_a_logarithmic_axis(tmp_path):
    """Step 0 is on it too, which a plain logarithm would leave out."""
    told = drawn(history_of(100), tmp_path / "loss.svg", log=True)
    assert told[told.index("a run") + 1 : told.index("step")] == ["0", "10", "100", "1,000"]


@pytest.mark.parametrize("title", ["童话", "cost_$5_of_$7", "a\\b_{c"])
def test_any_name_may_be_the_title(tmp_path, title):
    """A run's name may lack glyphs in the font, or look like mathematics that does not parse."""
    assert title in drawn(history_of(2), tmp_path / "loss.svg", title)


@pytest.mark.parametrize(("count", "top"), [(1, 4.45), (5, 4.57), (6, 1.68), (100, 1.65)])
def test_the_untrained_loss_does_not_press_the_curve_flat(count, top):
    """The axis fits what comes after the first tenth; with few evaluations it shows them all."""
    history = history_of(count)
    low, high = loss_range([history])
    assert high == pytest.approx(top, abs=0.01)
    losses = [row[key] for row in history for key in ("train_loss", "val_loss")]
    assert min(losses) - 0.2 < low < min(losses)


def test_several_runs_in_one_picture(tmp_path):
    """Each with its name and its best, in colours of its own, on an axis that fits them all."""
    histories = {"out/a$b$": history_of(20), "out/b": [
        row | {"val_loss": row["val_loss"] + 1} for row in history_of(40)
    ]}  # fmt: skip
    compare_losses(histories, tmp_path / "losses.svg")
    told = texts(tmp_path / "losses.svg")
    assert {"out/a$b$, best 1.183 at step 150", "dotted: training", "learning rate"} <= set(told)
    assert "2.6" in told and "4.0" not in told


def test_losses_over_the_minutes(tmp_path):
    """So that runs with updates of different lengths can be compared: 19 times six minutes."""
    for log in (False, True):
        compare_losses({"a": history_of(20)}, tmp_path / "losses.svg", "minutes", log)
        told = texts(tmp_path / "losses.svg")
        assert "minutes" in told and "step" not in told
        assert log or ("100" in told and "200" not in told)


def test_a_failure_leaves_the_picture_before_as_it_was(tmp_path, monkeypatch):
    """The file is replaced when the new one is whole, never written into."""
    path = tmp_path / "loss.png"
    loss_curves(history_of(2), path, "a run")
    before = path.read_bytes()

    def fail(self, file, **_):
        file.write(b"half a picture")
        raise RuntimeError

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    with pytest.raises(RuntimeError):
        loss_curves(history_of(3), path, "a run")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_no_screen_and_no_global_state(tmp_path, monkeypatch):
    """pyplot picks a window system, and keeps every figure until it is told to close it."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    loss_curves(history_of(2), tmp_path / "loss.png", "a run")


@pytest.fixture
def no_matplotlib(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_without_matplotlib_only_drawing_fails(tmp_path, no_matplotlib):
    """Training must run without it; the caller turns the ImportError into a note."""
    importlib.reload(plots)
    with pytest.raises(ImportError):
        plots.loss_curves(history_of(2), tmp_path / "loss.png", "a run")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------- attention


@torch.inference_mode()
@pytest.mark.parametrize(
    "shape", [{}, {"n_head": 1}, {"position": "rope", "qk_norm": True}, {"position": "sinusoidal"}]
)
def test_the_weights_are_those_the_model_uses(shape):
    """What the heads' weights gather is what all heads at once give, in every layer."""
    model, tokenizer = model_of(**shape)
    tokens, seen = torch.tensor(tokenizer.encode("the cat sat")), []
    for block in model.blocks:
        block.attention.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    weights = attention_weights(model, tokens)
    assert len(seen) == 2
    for block, (x, out), layer in zip(model.blocks, seen, weights, strict=True):
        heads = zip(layer, block.attention.heads(), strict=True)
        gathered = torch.cat([weight @ (x[0] @ head.value.T) for weight, head in heads], -1)
        torch.testing.assert_close(block.attention.projection(gathered), out[0])


def test_weights_are_causal_and_leave_no_hook():
    model, tokenizer = model_of()
    weights = attention_weights(model, torch.tensor(tokenizer.encode("the cat")))
    assert weights.shape == (2, 2, 7, 7)
    assert torch.equal(weights, weights.tril())
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 7))
    assert not any(block.attention._forward_hooks for block in model.blocks)


def test_each_map_has_its_characters_on_both_axes(tmp_path):
    """Blanks are made visible; letters that mean something to XML or mathematics are letters."""
    model, tokenizer = model_of(text := "a <&$\n$")
    weights = attention_weights(model, torch.tensor(tokenizer.encode(text)))
    attention_maps(weights, text, tmp_path / "attention.svg", "童话")
    told = texts(tmp_path / "attention.svg")
    for label in ("a", "␣", "↵"):
        assert told.count(label) == 4 * 2
    assert told.count("$") == 4 * 2 * 2
    assert {f"layer {n}, head {h}" for n in (1, 2) for h in (1, 2)} <= set(told)


def test_forty_characters_have_room(tmp_path):
    """A row is at least as high as its letter, 8 points, so that neighbours do not touch."""
    weights = torch.eye(40).expand(1, 2, 40, 40)
    attention_maps(weights, "m" * 40, tmp_path / "attention.svg", "")
    svg = (tmp_path / "attention.svg").read_text("utf-8")
    places = re.findall(r"<!-- m -->\s*<g transform=\"translate\((\S+) (\S+)\)", svg)
    across = [float(x) for x, _ in places[:40]]
    down = [float(y) for _, y in places[40:80]]
    assert min(b - a for line in (across, down) for a, b in itertools.pairwise(line)) > 8


# ------------------------------------------------------------------------------------ embeddings


def test_principal_components_keep_what_varies_most():
    """Points in a plane, turned into many dimensions and moved, keep their distances."""
    generator = torch.Generator().manual_seed(0)
    plane = torch.randn(30, 2, generator=generator, dtype=torch.float64) * torch.tensor([3.0, 1.0])
    turn = torch.linalg.qr(torch.randn(9, 9, generator=generator, dtype=torch.float64))[0]
    points, shares = principal_components(plane @ turn[:2] + 5)
    torch.testing.assert_close(torch.cdist(points, points), torch.cdist(plane, plane))
    assert shares.sum().item() == pytest.approx(1) and shares[0] > shares[1]


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (2, 1), (5, 2)])
def test_few_characters_or_numbers_have_a_plane_too(shape):
    points, shares = principal_components(torch.arange(math.prod(shape)).float().view(shape))
    assert points.shape == (shape[0], 2) and shares.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "characters"),
    [
        ("vowel", "aeioué"),
        ("consonant", "bcyzñ"),
        ("capital", "AZÉ"),
        ("digit", "07²"),
        ("punctuation or space", " \n.,-'\"—“$"),
        ("other letter", "ßж童ա"),
    ],
)
def test_the_kinds_of_characters(kind, characters):
    assert {character: kind_of(character) for character in characters} == dict.fromkeys(
        characters, kind
    )
    assert kind in plots.KINDS


def test_embeddings_are_labelled(tmp_path):
    """Every character once, the kinds that occur, the variance shown, and the positions' map."""
    model, tokenizer = model_of("ab C3,\n")
    embedding_map(model, tokenizer, tmp_path / "embeddings.svg", "a run")
    told = texts(tmp_path / "embeddings.svg")
    for character in "abC3,␣↵":
        assert character in told
    assert {"vowel", "consonant", "capital", "digit", "punctuation or space"} <= set(told)
    assert "other letter" not in told
    assert any("of the variance" in text for text in told) and "cosine similarity" in told


def test_rope_has_no_positions_to_show(tmp_path):
    model, tokenizer = model_of(position="rope")
    embedding_map(model, tokenizer, tmp_path / "embeddings.svg", "a run")
    assert "cosine similarity" not in texts(tmp_path / "embeddings.svg")


def test_a_large_vocabulary_of_another_script(tmp_path):
    """Letters without a glyph in the font give no warning."""
    model, tokenizer = model_of("".join(map(chr, range(0x4E00, 0x4E00 + 300))))
    embedding_map(model, tokenizer, tmp_path / "embeddings.png", "a run")


# ----------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def done(tiny, tmp_path_factory):
    """A run; pictures may be added to it."""
    folder = tmp_path_factory.mktemp("out") / "done"
    tiny(folder)
    return folder


@pytest.mark.parametrize(
    ("argv", "file"),
    [
        (["loss"], "loss.png"),
        (["attention", "--text", "the sea"], "attention.png"),
        (["embeddings"], "embeddings.png"),
    ],
)
def test_a_picture_lies_in_the_runs_folder(done, capsys, argv, file):
    plots.main([argv[0], str(done), *argv[1:]])
    assert capsys.readouterr().out == f"wrote {done / file}\n"
    assert (done / file).read_bytes().startswith(b"\x89PNG")


def test_the_newest_run_and_a_file_of_ones_own(done, tmp_path, monkeypatch):
    """Without a folder the newest under out/ beside the scripts; the ending is the format."""
    monkeypatch.setattr("settings.ROOT", done.parent.parent)
    done.parent.rename(done.parent.parent / "out")
    try:
        plots.main(["attention", "--out", str(tmp_path / "new" / "a.svg")])
    finally:
        (done.parent.parent / "out").rename(done.parent)
    sample = load_checkpoint(done / "best.pt")["history"][-1]["sample"]
    assert plots.visible(sample.lstrip("\n")[0]) in texts(tmp_path / "new" / "a.svg")


def test_losses_of_several_runs_lie_beside_them(done, capsys):
    """Two runs of one name are told apart by their places."""
    plots.main(["loss", str(done), str(done / ".." / "done"), "--log"])
    assert capsys.readouterr().out == f"wrote {done.parent / 'losses.png'}\n"


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ([], "'': expected one of loss, attention, embeddings, next, report"),
        (["los", "out/a"], "'los': expected one of loss"),
        (["loss", "--out", "a.jpeg"], "out = 'a.jpeg': expected a name that ends in .png or .svg"),
        (["report", "--out", "a.png"], "out = 'a.png': expected a name that ends in .html"),
        (["embeddings", "--text", "a"], "text: there is no such setting"),
        (["attention", "nowhere"], "best.pt: no such file"),
        (["attention", "DONE", "--text", "Ж"], "text = 'Ж': not in the vocabulary"),
        (["attention", "DONE", "--text", "a" * 33], "text has 33 characters; at most 32"),
        (["next", "DONE", "--text", "a" * 33], "text has 33 characters; at most 32"),
    ],
)
def test_mistakes_are_told(done, argv, problem):
    argv = [str(done) if word == "DONE" else word for word in argv]
    with pytest.raises(UserError, match=re.escape(problem)):
        plots.main(argv)


def test_help_tells_the_settings_of_each_picture(capsys):
    plots.main(["--help"])
    assert "plots.py embeddings" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        plots.main(["attention", "--help"])
    told = capsys.readouterr().out
    assert all(name in told for name in ("[run]", "--text", "--out"))


def test_the_command_tells_what_to_install(done, no_matplotlib):
    with pytest.raises(UserError, match="pip install matplotlib"):
        plots.main(["embeddings", str(done)])
