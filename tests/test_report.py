"""The rules of report.py: pages that show what they should, whole, whatever the text holds."""

import base64
import html.parser
import json
import re
import shutil
import subprocess

import pytest
import torch
from conftest import TINY

import plots
import train
from checkpoint import load_checkpoint, save_checkpoint
from model import ModelConfig, Transformer
from report import commands, strip
from settings import TrainSettings
from tokenizer import CharTokenizer

EMPTY = {"meta", "img"}  # elements that have no end


class Page(html.parser.HTMLParser):
    """A page taken apart: its text, its pictures, its addresses; AssertionError if badly nested."""

    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.addresses, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.addresses += [attributes[name] for name in ("src", "href") if name in attributes]
        self.images += [attributes] if tag == "img" else []
        self.open += [tag] if tag not in EMPTY else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return "".join(self.words)


@pytest.fixture(scope="module")
def run(prepare_text, tmp_path_factory):
    """A run on a text full of what means something in HTML, in a folder with such a name."""
    text = "<b>&amp; \"a\" 'b'</b> <script>alert(1)</script>\n{x} $y$ %s " * 40
    data_dir = prepare_text(text, "marks")
    folder = tmp_path_factory.mktemp("out") / "a <b> & {run}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "loss_curves", lambda *_: None)
        places = ["--dataset", "marks", "--data_dir", str(data_dir), "--out_dir", str(folder)]
        train.main([*TINY, *places, "--max_iters", "30", "--eval_interval", "10"])
    return folder


@pytest.fixture(scope="module")
def report(run):
    """The report of that run, as a file."""
    plots.main(["report", str(run), "--text", "<b>&amp; <script>"])
    return run / "report.html"


def test_the_report_is_one_whole_file(report):
    """It needs no other file and no network, and its pictures are pictures."""
    found = Page(report.read_text("utf-8"))
    assert len(found.images) == 3 and len(found.addresses) == 3
    for image in found.images:
        kind, data = image["src"].split(",")
        assert kind == "data:image/png;base64" and image["alt"]
        assert base64.b64decode(data, validate=True).startswith(b"\x89PNG")
    assert "url(" not in report.read_text("utf-8") and "@import" not in report.read_text("utf-8")


def test_the_report_tells_the_run(report, run):
    """Settings with their meanings, three samples, the figures, and the text's name."""
    text, last = Page(report.read_text("utf-8")).text, load_checkpoint(run / "last.pt")
    for name, value in last["settings"].items():
        assert name in text and (str(value) in text or str(value).lower() in text)
    for row in (last["history"][i] for i in (0, 2, 3)):
        assert row["sample"].strip() in text
        assert f"Step {row['step']}, validation loss {row['val_loss']:.3f}" in text
    assert f"{last['history'][-1]['whole_val_loss']:.4f} nats" in text
    assert "attention heads in each block" in text and "marks, " in text


def test_nothing_in_the_text_is_taken_for_html(report):
    """Names, samples and characters are escaped; braces are no places to fill in."""
    source = report.read_text("utf-8")
    assert "<script" not in source
    assert "Run a <b> & {run}" in Page(source).text and "Run a <b>" not in source
    assert [place[0] for place in columns(source)][:4] == ["&lt;", "b", "&gt;", "&amp;"]


def test_the_commands_make_the_same_again():
    """They can be pasted into a shell: what the settings hold is quoted."""
    settings = TrainSettings(n_head=4, n_embd=64, out_dir="out/a b", dataset="it's")
    told = Page(commands(settings, "out/a b")).text.splitlines()
    shell = "for word in {}; do printf '%s\\n' \"$word\"; done"
    words = [
        subprocess.run(["sh", "-c", shell.format(line)], capture_output=True, text=True).stdout
        for line in told
    ]
    assert set(words[0].splitlines()) == {
        "python", "train.py", "--n_head=4", "--n_embd=64", "--out_dir=out/a b", "--dataset=it's",
    }  # fmt: skip
    assert words[1].splitlines() == ["python", "sample.py", "--out_dir", "out/a b"]
    assert words[2].splitlines() == ["python", "plots.py", "report", "out/a b"]


# ------------------------------------------------------------------------------------- the strip


def columns(source):
    """The strip's places: character, figure under it, and the alternatives with theirs."""
    items = re.findall(r"<li>(?:<div[^>]*>)?<b>(.*?)</b>(.*?)(?:</div>)?(?:<ol>(.*?)</ol>)?</li>\n",
                       source + "\n")  # fmt: skip
    return [
        (character, figure, re.findall(r"<li>(?:<mark>)?(.*?)(?:</mark>)? +(\S+)</li>", others))
        for character, figure, others in items
    ]


def test_the_strip_tells_the_models_probabilities():
    """Of each character, given those before it; and of five more, the likeliest first."""
    tokenizer = CharTokenizer("abcdefgh")
    torch.manual_seed(3)
    shape = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8}
    model = Transformer(ModelConfig(vocab_size=8, **shape)).eval()
    places = columns(strip(model, tokenizer, torch.tensor(tokenizer.encode("bad"))))
    assert [place[0] for place in places] == ["b", "a", "d", "?"]
    assert (places[0][1], places[-1][1]) == ("given", "next")
    for i, (character, figure, others) in enumerate(places[1:], 1):
        tokens = torch.tensor([tokenizer.encode("bad"[:i])])
        with torch.no_grad():
            after = model(tokens)[0][0, -1].softmax(-1)
        if character != "?":
            assert figure == f"{after[tokenizer.encode(character)[0]].item():.1%}"
        values, ids = after.topk(5)
        assert [other for other, _ in others] == [tokenizer.decode([j]) for j in ids.tolist()]
        assert [value for _, value in others] == [f"{value:.1%}" for value in values.tolist()]


@pytest.mark.parametrize("text", ["a", "aba", " \n"])
def test_a_strip_of_few_characters(text):
    """A vocabulary of fewer than five has fewer alternatives; a text of one character, no past."""
    tokenizer = CharTokenizer(text)
    shape = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8}
    model = Transformer(ModelConfig(vocab_size=tokenizer.vocab_size, **shape)).eval()
    source = strip(model, tokenizer, torch.tensor(tokenizer.encode(text)))
    Page(source)
    places = columns(source)
    assert len(places) == len(text) + 1
    assert all(len(place[2]) == tokenizer.vocab_size for place in places[1:])
    assert [place[0] for place in places[:-1]] == [plots.visible(c) for c in text]


def test_next_writes_a_page(run, capsys):
    plots.main(["next", str(run)])
    assert capsys.readouterr().out == f"wrote {run / 'next.html'}\n"
    found = Page((run / "next.html").read_text("utf-8"))
    assert "What a <b> & {run} expects next" in found.text and found.addresses == []


def test_a_run_that_ended_before_its_time_has_a_report(run, tmp_path):
    """One evaluation, and no loss over the whole split."""
    for name in ("last.pt", "best.pt"):
        saved = load_checkpoint(run / name)
        saved["history"] = [saved["history"][0] | {"whole_val_loss": None}]
        save_checkpoint({k: v for k, v in saved.items() if k != "format"}, tmp_path / name)
    plots.main(["report", str(tmp_path)])
    assert "whole" not in Page((tmp_path / "report.html").read_text("utf-8")).text


# ---------------------------------------------------------------------------------- in a browser


def test_a_browser_shows_it_all(report, tmp_path):
    """Chromium loads the page without an error, and each picture in its size."""
    browser = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if not browser:
        pytest.skip("there is no Chromium")
    probe = """<script>
    window.errors = []; addEventListener("error", event => errors.push(String(event)), true)
    </script>"""
    result = """<script>addEventListener("load", () => {
    const widths = [...document.images].map(image => image.complete ? image.naturalWidth : 0)
    const overflow = document.documentElement.scrollWidth - innerWidth
    document.body.dataset.seen = JSON.stringify([errors.length, widths, overflow])
    })</script>"""
    copy = tmp_path / "report.html"
    copy.write_text(probe + report.read_text("utf-8") + result, "utf-8")
    seen = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", copy.as_uri()],
        capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip
    errors, widths, overflow = json.loads(re.search(r'data-seen="(.*?)"', seen)[1])
    assert errors == 0 and len(widths) == 3 and min(widths) > 300 and overflow <= 0
