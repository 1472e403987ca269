"""Continues a text with a trained model, or measures how well the model knows a text.

usage: python sample.py --start "Once upon a time" [--setting value ...]

The text goes to standard output, and what is said about it to standard error. It appears as it is
written where one text goes to a terminal; otherwise whole, with a line of --- between two texts.
"""

import contextlib
import dataclasses
import importlib
import itertools
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import settings
from checkpoint import load_model, newest_run
from device import choose_device, memory_advice
from generate import Sampling, default_start, generate, score
from model import Transformer
from settings import UserError, resolve, run, setting
from tokenizer import CharTokenizer

ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """Which model"""

    out_dir: str | None = setting(None, "a run's folder; none: the newest under out/")
    checkpoint: str | None = setting(None, "a checkpoint file; none: the run's best.pt")
    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps; auto takes the fastest there is")


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """Which text; give one of the first five"""

    start: str = setting("", "the text to continue; empty: a new line; -: standard input")
    start_file: str | None = setting(None, "file of the text to continue, less a final newline")
    prompts: str | None = setting(None, "file of texts to continue side by side, one a line")
    interactive: bool = setting(False, "ask for a text, continue it, ask again; Ctrl-D ends it")
    score: str | None = setting(None, "file to measure: nats and bits for each of its characters")
    escapes: bool = setting(False, r"\n \t \\ \uXXXX, where typed or in prompts, are one character")
    unknown: str = setting(
        "error", "characters the model never saw: an error, or skip them", ("error", "skip")
    )


@dataclass(frozen=True, kw_only=True)
class WritingSettings:
    """How to write"""

    num_samples: int = setting(1, "texts for each start, written side by side", "[1, inf)")
    max_new_tokens: int = setting(500, "characters to write, at most", "[1, inf)")
    stop: tuple[str, ...] = setting((), "where to stop writing; is not printed itself")
    seed: int = setting(
        1337,
        "same seed, same text; further samples take the next seeds",
        "[0, 9223372036854775807]",
    )
    repetition_penalty: float = setting(
        1.0, "above 1 avoids the characters in the context, below 1 favours them", "(0, inf)"
    )
    temperature: float = setting(
        1.0, "lower is plainer, higher is wilder; 0: always the likeliest character", "[0, inf)"
    )
    top_k: int = setting(
        0, "draw from so many of the likeliest: fewer is plainer; 0: from all", "[0, inf)"
    )
    top_p: float = setting(
        1.0, "draw from the likeliest with this probability in all: lower is plainer", "(0, 1]"
    )
    min_p: float = setting(
        0.0, "leave out what is below this share of the likeliest: higher is plainer", "[0, 1]"
    )
    exact: bool = setting(False, "past block_size, read the whole context for each character: slow")
    json: bool = setting(False, "print an object a line: text, seed, mean log-probability, ...")


@dataclass(frozen=True, kw_only=True)
class SampleSettings(SourceSettings, TextSettings, WritingSettings):
    """Everything `sample.py` can be told."""

    def conflicts(self) -> Iterator[tuple[set[str], str]]:
        """Every rule between settings that is broken, with the names it is about."""
        for names in (("start", "start_file", "prompts", "interactive", "score"),
                      ("out_dir", "checkpoint")):  # fmt: skip
            given = [name for name in names if getattr(self, name)]
            if len(given) > 1:
                yield set(given), f"{' and '.join(given)} exclude each other; give one"
        if "" in self.stop:
            yield {"stop"}, "stop = '': nothing would be written; give the text to stop at"

    def typed(self, text: str) -> str:
        """What is meant by a text that was typed."""
        return unescaped(text) if self.escapes else text


def main(argv: list[str]) -> None:
    """Does what the arguments say."""
    options = resolve(SampleSettings, argv, __doc__)
    texts = given_texts(options)
    path = checkpoint_path(options)
    model, tokenizer, checkpoint = load_model(path, choose_device(options.device))
    note(f"{path}: step {checkpoint['step']}, validation loss {checkpoint['val_loss']:.4f}")
    writer = Writer(model, tokenizer, options)
    if options.score:
        writer.measure(texts[0])
    elif options.interactive:
        interact(writer)
    else:
        with memory_advice("lower num_samples"):
            writer.write(texts, options.seed)


def checkpoint_path(options: SampleSettings) -> Path:
    """The file that the options name, or else best.pt of the newest run."""
    if options.checkpoint:
        return Path(options.checkpoint)
    return Path(options.out_dir or newest_run(settings.runs_folder())) / "best.pt"


# ---------------------------------------------------------------------------------- what goes in


def given_texts(options: SampleSettings) -> list[str]:
    """The texts to continue, or the one to measure. Raises UserError for a file or an escape."""
    if options.score:
        return [read_text(options.score)]
    if options.start_file or options.start == "-":
        return [read_text(options.start_file or "-").removesuffix("\n")]
    if options.prompts:
        return list(map(options.typed, read_text(options.prompts).removesuffix("\n").split("\n")))
    return [options.typed(options.start)]


def read_text(path: str) -> str:
    """What a UTF-8 file holds; "-" is standard input."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a text file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8") from error


def unescaped(text: str) -> str:
    r"""Text with \n, \t, \\ and \uXXXX made the characters they stand for."""

    def character(match: re.Match[str]) -> str:
        code = match[1]
        if len(code) == 5:
            return chr(int(code[1:], 16))
        if code not in ESCAPES:
            raise UserError(rf"{text!r}: \{code} is no escape; there are \n, \t, \\ and \uXXXX")
        return ESCAPES[code]

    return re.sub(r"\\(u[0-9a-fA-F]{4}|.|\Z)", character, text, flags=re.DOTALL)


def note(message: str) -> None:
    """Says something about the text, apart from it."""
    print(message, file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------- what comes out


class Writer:
    """A model with its tokenizer, and how it is to write."""

    def __init__(
        self, model: Transformer, tokenizer: CharTokenizer, options: SampleSettings
    ) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options
        names = [field.name for field in dataclasses.fields(Sampling)]
        self.sampling = Sampling(**{name: getattr(options, name) for name in names})
        self.stops = tuple(map(options.typed, options.stop))

    def write(self, prompts: list[str], seed: int) -> None:
        """Prints each prompt with its continuations."""
        seeds = range(seed, seed + self.options.num_samples)
        samples = [Sample(text, seed, self.stops) for text in self.known(prompts) for seed in seeds]
        live = len(samples) == 1 and sys.stdout.isatty() and not self.options.json
        for piece in itertools.chain([samples[0].prompt], self.pieces(samples)):
            if live:
                print(piece, end="", flush=True)
        if live:
            print()
        elif self.options.json:
            print(*map(self.record, samples), sep="\n")
        else:
            print(*(sample.prompt + sample.text for sample in samples), sep="\n---\n")

    def known(self, texts: list[str]) -> list[str]:
        """The texts without the characters that the model lacks; UserError if these are errors."""
        try:
            self.tokenizer.encode("".join(texts))
        except ValueError as error:
            if self.options.unknown == "error":
                raise UserError(f"{error}; leave them out, or give --unknown skip") from error
            note(f"skipped: {error}")
        unknown = set(self.tokenizer.unknown("".join(texts)))
        return ["".join(c for c in text if c not in unknown) for text in texts]

    def pieces(self, samples: list["Sample"]) -> Iterator[str]:
        """Writes the samples side by side; gives what may be shown of any, as soon as it may be."""
        start, began = default_start(self.tokenizer), time.perf_counter()
        prompts = [self.tokenizer.encode(sample.prompt or start) for sample in samples]
        longest, room = max(map(len, prompts)), self.model.config.block_size
        if longest > room:
            note(f"a start of {longest} characters: the model sees the last {room}")
        seeds, finished = [sample.seed for sample in samples], set()
        length, exact = self.options.max_new_tokens, self.options.exact
        steps = generate(self.model, prompts, seeds, length, self.sampling, exact, finished)
        for row, token, log_probability in itertools.chain.from_iterable(steps):
            sample = samples[row]
            yield sample.add(self.tokenizer.decode([token]), log_probability)
            sample.seconds = time.perf_counter() - began
            if sample.stopped:
                finished.add(row)
        yield from (sample.show() for sample in samples)

    def record(self, sample: "Sample") -> str:
        """The line that --json prints for a sample."""
        tokens = len(sample.log_probabilities)
        fields = dataclasses.fields(WritingSettings)
        record = {
            "prompt": sample.prompt,
            "text": sample.text,
            "seed": sample.seed,
            "tokens": tokens,
            "seconds": round(sample.seconds, 3),
            "mean_log_probability": sum(sample.log_probabilities) / tokens,
            "settings": {field.name: getattr(self.options, field.name) for field in fields},
        }
        return json.dumps(record, ensure_ascii=False)

    def measure(self, text: str) -> None:
        """Prints the model's loss on a text."""
        [text] = self.known([text])
        count = len(text)
        if count < 2:
            raise UserError(f"{self.options.score}: {count} characters; give a text of two or more")
        nats = score(self.model, self.tokenizer.encode(text))
        bits = nats / math.log(2)
        if self.options.json:
            print(json.dumps({"characters": count, "nats": nats, "bits": bits}))
        else:
            print(f"{nats:.4f} nats, {bits:.4f} bits a character; {count} characters")


@dataclass
class Sample:
    """What one row writes: its text as far as a stop string, and how much of it was shown."""

    prompt: str
    seed: int
    stops: tuple[str, ...]
    text: str = ""
    shown: int = 0
    stopped: bool = False
    log_probabilities: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def add(self, piece: str, log_probability: float) -> str:
        """Takes a token's text; gives what can no longer be part of a stop string."""
        self.text += piece
        self.log_probabilities.append(log_probability)
        places = [self.text.find(stop, self.shown) for stop in self.stops]
        if found := [place for place in places if place >= 0]:
            self.stopped, self.text = True, self.text[: min(found)]
            return self.show()
        beginnings = (stop[:n] for stop in self.stops for n in range(1, len(stop)))
        held = (len(text) for text in beginnings if self.text.endswith(text, self.shown))
        return self.show(max(held, default=0))

    def show(self, held: int = 0) -> str:
        """What was not shown yet, but for the last characters, held back."""
        start, self.shown = self.shown, len(self.text) - held
        return self.text[start : self.shown]


def interact(writer: Writer) -> None:
    """Continues each line that is typed; ends at end of file or Ctrl-C."""
    with contextlib.suppress(ImportError):  # Windows has none
        importlib.import_module("readline")  # gives input() a history
    options = writer.options
    mark = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        for seed in itertools.count(options.seed, options.num_samples):  # asked again: other texts
            line = input(mark)
            try:
                writer.write([options.typed(line)], seed)
            except UserError as error:
                note(str(error))
    print(end="\n" if mark else "")  # for the shell's next line


if __name__ == "__main__":
    run(main)
