"""Settings: defaults, then a Python config file, then the command line, checked as one.

A command declares its settings as a dataclass of `setting(...)` fields; `--help`, the README's
table and every check are made from those lines. `TrainSettings` is here; the other
commands declare theirs beside what they set.
"""

import dataclasses
import difflib
import inspect
import itertools
import os
import sys
import traceback
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent  # data/ and out/ lie beside the scripts, wherever one stands


def runs_folder() -> Path:
    """out/ beside the scripts, as short as it can be told from the working directory."""
    folder = ROOT / "out"
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


class UserError(Exception):
    """What the user can mend: a line for each problem, with the value and what to do."""


def setting(default: object, meaning: str, valid: str | tuple[str, ...] = "") -> typing.Any:
    """A field of a settings dataclass.

    valid: for numbers an interval such as "[0, 1)" (a square bracket includes its end); for text
        the tuple of values allowed; empty where anything of the type will do.
    """
    return dataclasses.field(default=default, metadata={"meaning": meaning, "valid": valid})


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Data"""

    dataset: str = setting("tales", "a name that prepare.py knows or made, or a prepared folder")
    data_dir: str | None = setting(None, "where prepared texts lie; none: data/ beside the scripts")
    offline: bool = setting(False, "use what is on this machine; download nothing")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Model"""

    n_layer: int = setting(4, "blocks, one after another", "[1, inf)")
    n_head: int = setting(3, "attention heads in each block; must divide n_embd", "[1, inf)")
    n_embd: int = setting(192, "width: numbers that stand for one character", "[1, inf)")
    block_size: int = setting(128, "context: characters the model sees at once", "[1, inf)")
    dropout: float = setting(0.4, "share of activations zeroed in training", "[0, 1)")
    position: str = setting("learned", "how order is told", ("learned", "sinusoidal", "rope"))
    norm: str = setting("layernorm", "what comes before each sublayer", ("layernorm", "rmsnorm"))
    feed_forward: str = setting(
        "relu", "the bend between the two layers", ("relu", "gelu", "relu2", "swiglu")
    )
    tied_embeddings: bool = setting(False, "one matrix for reading and for writing characters")
    qk_norm: bool = setting(False, "queries and keys at one length before they meet")
    bias: bool = setting(True, "biases in linear layers and LayerNorm")
    activation_checkpointing: bool = setting(
        False, "keep each block's input only, and compute the rest again: less memory, slower"
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Optimizer and schedule"""

    max_iters: int = setting(10000, "updates of the weights, in all", "[0, inf)")
    batch_size: int = setting(64, "windows in one forward pass of all processes", "[1, inf)")
    gradient_accumulation_steps: int = setting(1, "forward passes that make one update", "[1, inf)")
    optimizer: str = setting("adamw", "muon: Muon for the blocks' matrices", ("adamw", "muon"))
    learning_rate: float = setting(1e-3, "AdamW's step size at its highest", "(0, inf)")
    muon_lr: float = setting(0.02, "Muon's step size at its highest", "(0, inf)")
    min_lr: float = setting(1e-5, "step size at the last update, where the cosine ends", "[0, inf)")
    warmup_iters: int = setting(0, "updates of linear warm-up before the cosine", "[0, inf)")
    weight_decay: float = setting(0.03, "pull of the weights towards 0", "[0, inf)")
    decayed: str = setting("all", "the weights that are pulled", ("all", "matrices"))
    beta1: float = setting(0.9, "AdamW's memory of the gradient", "[0, 1)")
    beta2: float = setting(0.999, "AdamW's memory of the squared gradient", "[0, 1)")
    grad_clip: float | None = setting(None, "longest gradient allowed; none: any", "(0, inf)")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Run"""

    eval_interval: int = setting(200, "updates between evaluations; each saves", "[1, inf)")
    eval_iters: int = setting(10, "batches an evaluation takes of each split", "[1, inf)")
    patience: int | None = setting(
        None, "evaluations without a better validation loss before it stops", "[1, inf)"
    )
    seed: int = setting(1337, "start of every random stream", "[0, 9223372036854775807]")
    device: str = setting("auto", "auto, cpu, cuda, cuda:N or mps; auto takes the fastest there is")
    dtype: str = setting(
        "auto", "arithmetic of forward passes; auto: bfloat16 where CUDA has it",
        ("auto", "float32", "bfloat16", "float16"),
    )  # fmt: skip
    compile: bool = setting(False, "compile the model: slower to start, faster a step on a GPU")
    out_dir: str | None = setting(None, "the run's folder; none: out/<name of the config file>")


@dataclass(frozen=True, kw_only=True)
class Actions:
    """What to do"""

    config: str | None = setting(None, "Python file of settings, such as config/fairy_tales.py")
    resume: bool = setting(False, "go on from the run folder's last.pt, exactly where it stopped")
    overwrite: bool = setting(False, "replace the run that is in the folder")
    show: bool = setting(False, "print the settings as resolved, and stop")
    estimate: bool = setting(False, "print what the run would take in memory and time, and stop")


@dataclass(frozen=True, kw_only=True)
class TrainSettings(DataSettings, ModelSettings, OptimizerSettings, RunSettings, Actions):
    """Everything `train.py` can be told."""

    def conflicts(self) -> Iterator[tuple[set[str], str]]:
        """Every rule between settings that is broken, with the names it is about."""
        if self.n_embd % self.n_head:
            divisors = [n for n in range(1, self.n_embd + 1) if self.n_embd % n == 0]
            near = sorted(sorted(divisors, key=lambda n: abs(n - self.n_head))[:3])
            message = f"n_head = {self.n_head} does not divide n_embd = {self.n_embd}; these would"
            yield {"n_embd", "n_head"}, f"{message}: {', '.join(map(str, near))}"
        elif self.position == "rope" and self.n_embd // self.n_head % 2:
            message = f"position = 'rope' turns pairs, and n_embd = {self.n_embd} by n_head ="
            yield {"n_embd", "n_head", "position"}, f"{message} {self.n_head} gives an odd width"
        if self.warmup_iters > self.max_iters:
            message = f"warmup_iters = {self.warmup_iters} is over max_iters = {self.max_iters}"
            yield {"warmup_iters", "max_iters"}, f"{message}; warm up for fewer updates"
        if self.min_lr > self.learning_rate:
            message = f"min_lr = {self.min_lr} is over learning_rate = {self.learning_rate}"
            yield {"min_lr", "learning_rate"}, f"{message}; lower it"
        if self.resume and self.overwrite:
            yield {"resume", "overwrite"}, "resume and overwrite exclude each other; give one"

    def record(self) -> dict[str, object]:
        """What a run is made from, to be kept with it: every setting but the actions."""
        actions = {field.name for field in dataclasses.fields(Actions)}
        return {name: value for name, value in vars(self).items() if name not in actions}


# ------------------------------------------------------------------------------- reading them

BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def resolve(
    kind: type,
    argv: list[str],
    about: str,
    positional: str = "",
    defaults: dict[str, typing.Any] | None = None,
    field: "Callable[..., Field] | None" = None,
    strict: bool = True,
) -> typing.Any:
    """An instance of the settings dataclass `kind`: defaults < config file < command line.

    about: what `--help` begins with.
    positional: the setting that an argument without a name sets; the one called "config" names a
        Python file of settings.
    defaults: in place of the dataclass's own, as far as they go.
    field: what makes a Field of a dataclass's field and its type; sweep.py's takes lists.
    strict: False passes over every problem, to look where a run lies before its settings are known.
    Raises UserError with every problem found, before anything else is read or written.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text(kind, about, positional), flush=True)
        raise SystemExit(0)
    fields = {made.name: made for made in itertools.starmap(field or Field, hinted(kind))}
    problems: list[str] = []
    given = read_command_line(fields, argv, positional, problems)
    if isinstance(given.get("config"), str):
        given = read_config_file(fields, Path(given["config"]), problems) | given
    bad = {name for name in given if name not in fields or given[name] is ...}
    good = {fields[name].attribute: given[name] for name in given if name not in bad}
    known = {name: value for name, value in (defaults or {}).items() if name in fields}
    chosen = kind(**(known | good))
    if hasattr(chosen, "conflicts"):
        problems += [message for names, message in chosen.conflicts() if not names & bad]
    if problems and strict:
        raise UserError("\n".join(problems))
    return chosen


class Field:
    """One setting: its type taken apart, and the checks made from it."""

    def __init__(self, field: dataclasses.Field, hint: object) -> None:
        self.attribute, self.default = field.name, field.default
        self.name = field.name.rstrip("_")  # from_ is how Python lets one write from
        self.meaning, self.valid = field.metadata["meaning"], field.metadata["valid"]
        parts = typing.get_args(hint) or (hint,)  # int | None: (int, NoneType)
        self.type, self.optional, self.many = parts[0], type(None) in parts, ... in parts

    def parse(self, texts: list[str]) -> object:
        """The value that texts on the command line mean. Raises ValueError or LookupError."""
        if self.many:
            return tuple(map(self.type, texts)) or texts[0]
        if self.optional and texts[0].lower() == "none":
            return None
        return BOOLEANS[texts[0].lower()] if self.type is bool else self.type(texts[0])

    def accepts(self, value: object) -> bool:
        """Whether value is of the type and in the range."""
        if self.many:
            return isinstance(value, tuple) and all(type(item) is self.type for item in value)
        if value is None:
            return self.optional
        if type(value) is not self.type and not (self.type is float and type(value) is int):
            return False
        if isinstance(self.valid, tuple):
            return value in self.valid
        return not self.valid or in_interval(value, self.valid)

    def expected(self) -> str:
        """What would be accepted, in words."""
        if isinstance(self.valid, tuple):
            return "one of " + ", ".join(self.valid)
        words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        kind = " ".join([words[self.type], *interval_words(self.valid)])
        return kind + (" or none" if self.optional else "") + (", one or more" if self.many else "")


def hinted(kind: type) -> list[tuple[dataclasses.Field, object]]:
    """The fields of a settings dataclass, with their types."""
    hints = typing.get_type_hints(kind)
    return [(field, hints[field.name]) for field in dataclasses.fields(kind)]


def in_interval(value: float, interval: str) -> bool:
    """Whether value lies in an interval such as "[0, 1)"; nan lies in none."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    return above and (value <= high if interval[-1] == "]" else value < high)


def interval_words(interval: str) -> list[str]:
    """An interval for people: "[0, 1)" is "from 0 below 1", "(0, inf)" is "above 0"."""
    if not interval:
        return []
    low, high = interval[1:-1].split(", ")
    words = [f"from {low}" if interval[0] == "[" else f"above {low}"]
    return words + ([f"to {high}" if interval[-1] == "]" else f"below {high}"] * (high != "inf"))


def read_command_line(
    fields: dict[str, Field], argv: list[str], positional: str, problems: list[str]
) -> dict[str, typing.Any]:
    """Settings given as `--name value`, `--name=value`, `--flag` or, for the positional one, bare.

    Not argparse: that stops at the first problem, and takes the value in `--start -x` for a flag.
    """
    given: dict[str, typing.Any] = {}
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        named = token if token.startswith("--") else f"--{positional}={token}"
        name, equals, text = named[2:].partition("=")
        if name == "" or (name == positional and name in given and not fields[name].many):
            problems.append(f"{token!r} is one argument too many; settings go as --name value")
            continue
        texts = [text] if equals else take_values(fields, name, tokens)
        value = checked(fields, name, texts, "", problems)
        adds_up = (
            name in given
            and name in fields
            and fields[name].many
            and ... not in (value, given[name])
        )
        given[name] = given[name] + value if adds_up else value
    return given


def take_values(fields: dict[str, Field], name: str, tokens: list[str]) -> list[str]:
    """Takes the values that follow `--name` off the tokens; a prompt may begin with a dash."""
    field = fields.get(name)
    if field and field.type is bool:
        return [tokens.pop(0) if tokens and tokens[0].lower() in BOOLEANS else "true"]
    many = field is None or field.many

    def is_value(token: str) -> bool:
        return not token.startswith("--") or (
            not many and token[2:].partition("=")[0] not in fields
        )

    count = len(tokens) if field and field.many else 1
    texts = list(itertools.takewhile(is_value, tokens[:count]))
    del tokens[: len(texts)]
    return texts


def read_config_file(
    fields: dict[str, Field], path: Path, problems: list[str]
) -> dict[str, typing.Any]:
    """The public plain values that a Python file leaves behind, run in a namespace of its own."""
    namespace: dict[str, typing.Any] = {"__name__": "config", "__file__": str(path)}
    try:
        source = path.read_bytes()
    except OSError as error:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], 1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        problems.append(f"{path}: {error.strerror}{hint}")
        return {}
    try:
        exec(compile(source, str(path), "exec"), namespace)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        inside = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = inside[-1] if inside else getattr(error, "lineno", "?")  # a SyntaxError: never ran
        what = getattr(error, "msg", error)  # a SyntaxError's text tells the file and line again
        problems.append(f"{path}, line {line}: {type(error).__name__}: {what}")
        return {}
    plain = bool | int | float | str | list | tuple | dict | None
    return {
        name: checked(fields, name, value, f" ({path})", problems)
        for name, value in namespace.items()
        if name in fields or (not name.startswith("_") and isinstance(value, plain))
    }


def checked(
    fields: dict[str, Field], name: str, given: object, where: str, problems: list[str]
) -> typing.Any:
    """A setting's value, from the command line's texts or a file; if wrong, ... and a problem."""
    if name not in fields:
        near = difflib.get_close_matches(name, fields, 1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "see --help for those there are"
        problems.append(f"{name}{where}: there is no such setting; {hint}")
        return ...
    field = fields[name]
    try:
        value = given if where else field.parse(given)
        value = tuple(value) if isinstance(value, list) else value  # a file may write either
        if not field.accepts(value):
            raise ValueError
    except (ValueError, LookupError):
        shown = given if where or len(given) > 1 else "".join(given)
        problems.append(f"{name} = {shown!r}{where}: expected {field.expected()}")
        return ...
    return field.type(value) if field.type is float and value is not None else value


# ------------------------------------------------------------------------------- telling of them


def help_text(kind: type, about: str, positional: str) -> str:
    """What `--help` prints, made from the fields."""
    lines = [about.strip()]
    fields = {field.name: Field(field, hint) for field, hint in hinted(kind)}
    for group in (*kind.__bases__, kind):
        own = [fields[name] for name in inspect.get_annotations(group)]
        lines += ["", f"{group.__doc__.strip()}:"] if own else []
        for field in own:
            name = f"[{field.name}]" if field.name == positional else f"--{field.name}"
            lines.append(f"  {name:30} {field.meaning}")
            lines.append(f"  {'':30} {field.expected()}; default {show(field.default)}")
    return "\n".join(lines)


def listing(chosen: object) -> str:
    """Settings as the lines of a config file."""
    return "\n".join(f"{name} = {value!r}" for name, value in chosen.record().items())


def arguments(chosen: object) -> list[str]:
    """The command line that resolves to these settings; what is at its default is left out."""
    defaults = {field.name: field.default for field in dataclasses.fields(chosen)}
    return [
        f"--{name}={show(value)}"
        for name, value in chosen.record().items()
        if value != defaults[name]
    ]


def show(value: object) -> str:
    """A setting's value as one would write it on the command line."""
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    if value == "":
        return '""'
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


# ------------------------------------------------------------------------------- running a command


def run(main: Callable[[list[str]], int | None]) -> typing.NoReturn:
    """Ends the program with what main(arguments) returns; after a UserError, with its lines and 2.

    Text is UTF-8 whatever the locale; a reader that closes the pipe early is no error.
    """
    if sys.getfilesystemencoding() != "utf-8":  # the C locale would mangle arguments and names
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for stream in filter(None, (sys.stdin, sys.stdout, sys.stderr)):  # None: closed from outside
        stream.reconfigure(encoding="utf-8", errors=stream.errors)
    try:
        code = main(sys.argv[1:])
        print(end="", flush=True)
    except UserError as error:
        name = Path(sys.argv[0]).name
        print(*(f"{name}: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        code = 2
    except BrokenPipeError:
        # Python flushes once more at exit, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        if error.filename is None:
            raise
        print(f"{Path(sys.argv[0]).name}: {error.filename}: {error.strerror}", file=sys.stderr)
        code = 2
    sys.exit(code)
