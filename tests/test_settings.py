"""The rules of settings.py, on a small settings class and on the one that train.py uses."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import settings
from settings import TrainSettings, UserError, resolve, setting


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Randomness"""

    seed: int = setting(1, "start of every stream", "[0, inf)")


@dataclass(frozen=True, kw_only=True)
class Small(Streams):
    """Everything else"""

    start: str = setting("Once", "text to begin with")
    count: int = setting(3, "how many", "[1, 10)")
    rate: float = setting(0.5, "how fast", "(0, 1]")
    limit: float | None = setting(2.5, "the longest", "(0, inf)")
    stop: int | None = setting(None, "when to stop", "[1, inf)")
    folder: str | None = setting(None, "where to write")
    fast: bool = setting(False, "in a hurry")
    mode: str = setting("plain", "which kind", ("plain", "fancy"))
    text: tuple[str, ...] = setting((), "what to read")
    sizes: tuple[int, ...] = setting((1, 2), "how large")
    config: str | None = setting(None, "file of settings")

    def conflicts(self):
        if self.stop is not None and self.stop < self.count:
            yield {"stop", "count"}, f"stop = {self.stop} is under count = {self.count}"


def read(*argv, kind=Small):
    return resolve(kind, list(argv), "about", positional="config")


def assert_changed(argv, expected):
    """The arguments change these settings alone, to values of the right type: 1.0 is not 1."""
    chosen = vars(read(*argv))
    assert {name: repr(value) for name, value in chosen.items()} == {
        name: repr(value) for name, value in (vars(Small()) | expected).items()
    }


def problems(*argv, kind=Small):
    with pytest.raises(UserError) as raised:
        read(*argv, kind=kind)
    return str(raised.value).splitlines()


# ------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", {}),
        ("--count 4", {"count": 4}),
        ("--count=4", {"count": 4}),
        ("--count 5 --count 4", {"count": 4}),
        ("--rate 1", {"rate": 1.0}),
        ("--rate 1e-3", {"rate": 0.001}),
        ("--limit none", {"limit": None}),
        ("--limit None --stop 7", {"limit": None, "stop": 7}),
        ("--folder none", {}),
        ("--start none", {"start": "none"}),  # only an optional setting can be switched off
        ("--fast", {"fast": True}),
        ("--fast --count 4", {"fast": True, "count": 4}),
        ("--fast yes --count 4", {"fast": True, "count": 4}),
        ("--fast=TRUE", {"fast": True}),
        ("--fast false", {}),
        ("--fast --fast no", {}),
        ("--mode fancy", {"mode": "fancy"}),
        ("--text a", {"text": ("a",)}),
        ("--text a b --count 4", {"text": ("a", "b"), "count": 4}),
        ("--text a --count 4 --text b c", {"text": ("a", "b", "c"), "count": 4}),
        ("--sizes 8 16", {"sizes": (8, 16)}),
    ],
)
def test_the_command_line_is_read(argv, expected):
    """Both forms of giving a value, flags, options that can be off, and several values."""
    assert_changed(argv.split(), expected)


@pytest.mark.parametrize(
    "text",
    ["a=b", "123", "True", "-1", "-x", "--foo", "", "two words", "once\n", "童话", "=x"],
)
def test_text_stays_text(text):
    """nanoGPT guesses: there a prompt that looks like a number is one, and a=b cannot be given."""
    assert read("--start", text).start == text
    assert read(f"--start={text}").start == text
    assert read("--text", "x", f"--text={text}").text == ("x", text)


@pytest.mark.parametrize("text", ["-h", "--help", "--count", "--count=4"])
def test_text_that_would_say_something_else_is_given_with_an_equals_sign(text):
    """The rule for the few texts that mean another thing when they stand alone."""
    assert read(f"--start={text}").start == text


def test_a_missing_value_is_not_taken_from_the_next_setting():
    """`--start --count 4` lacks a text; "--count" is not the text."""
    (problem,) = problems("--start", "--count", "4")
    assert "start" in problem and "expected text" in problem


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("--cuont 4", "cuont: there is no such setting; did you mean count?"),
        ("--xyzzy 4", "xyzzy: there is no such setting; see --help for those there are"),
        ("--Count=4", "Count: there is no such setting; did you mean count?"),
        ("--count four", "count = 'four': expected a whole number from 1 below 10"),
        ("--count 4.0", "count = '4.0': expected a whole number from 1 below 10"),
        ("--count", "count = '': expected a whole number from 1 below 10"),
        ("--count 0", "count = '0': expected a whole number from 1 below 10"),
        ("--count 10", "count = '10': expected a whole number from 1 below 10"),
        ("--rate 0", "rate = '0': expected a number above 0 to 1"),
        ("--rate 1.5", "rate = '1.5': expected a number above 0 to 1"),
        ("--rate nan", "rate = 'nan': expected a number above 0 to 1"),
        ("--rate -1", "rate = '-1': expected a number above 0 to 1"),
        ("--limit inf", "limit = 'inf': expected a number above 0 or none"),
        ("--count none", "count = 'none': expected a whole number from 1 below 10"),
        ("--fast=maybe", "fast = 'maybe': expected true or false"),
        ("--mode fanciest", "mode = 'fanciest': expected one of plain, fancy"),
        ("--sizes 8 x", "sizes = ['8', 'x']: expected a whole number, one or more"),
        ("--text", "text = '': expected text, one or more"),
        ("--stop 2", "stop = 2 is under count = 3"),
        ("--", "'--' is one argument too many; settings go as --name value"),
    ],
)
def test_a_problem_names_the_setting_its_value_and_what_would_do(argv, problem):
    """One line for each mistake; the ends of ranges are exact, and nan is in none of them."""
    assert problems(*argv.split()) == [problem]


def test_an_argument_without_a_name_is_the_config_file_and_comes_once(tmp_path):
    """`python train.py config/fairy_tales.py`; a second one has no meaning."""
    (tmp_path / "a.py").write_text("count = 4", "utf-8")
    assert read(str(tmp_path / "a.py")).count == 4
    assert read("--config", str(tmp_path / "a.py")).count == 4
    (problem,) = problems(str(tmp_path / "a.py"), "b.py")
    assert problem == "'b.py' is one argument too many; settings go as --name value"
    with pytest.raises(UserError, match="one argument too many"):
        resolve(Small, ["b.py"], "about")


def test_all_problems_are_reported_together():
    """Who has made three mistakes should not have to run three times."""
    assert problems("--cuont", "4", "--rate", "2", "--mode=x", "--stop", "2") == [
        "cuont: there is no such setting; did you mean count?",
        "rate = '2': expected a number above 0 to 1",
        "mode = 'x': expected one of plain, fancy",
        "stop = 2 is under count = 3",
    ]


def test_a_wrong_setting_is_not_reported_as_a_conflict_too():
    """The conflict would be with the default, of which the user said nothing."""
    assert len(problems("--count", "none", "--stop", "2")) == 1


def test_defaults_of_a_former_run_stand_below_what_is_given():
    """A resumed run keeps its settings but for those that are given anew."""
    chosen = resolve(Small, ["--rate", "1"], "about", defaults={"rate": 0.25, "count": 7})
    assert (chosen.rate, chosen.count, chosen.mode) == (1.0, 7, "plain")


# ------------------------------------------------------------------------------- config file


@pytest.fixture
def config(tmp_path):
    """Writes a config file and gives its path as text."""

    def write(source):
        path = tmp_path / "made.py"
        path.write_bytes(source if isinstance(source, bytes) else source.encode("utf-8"))
        return str(path)

    return write


def test_defaults_then_file_then_command_line(config):
    """The later of them wins, setting by setting."""
    path = config("count = 4\nrate = 0.25")
    chosen = read("--rate", "1", path)
    assert (chosen.mode, chosen.count, chosen.rate) == ("plain", 4, 1.0)
    assert read(config("text = ('a', 'b')"), "--text", "c").text == ("c",)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("# nothing yet\n", {}),
        ("count = 4  # why\r\nrate = 1\r\n", {"count": 4, "rate": 1.0}),
        ("# 童话的设置\nstart = '从前'\n", {"start": "从前"}),
        ("\ufeff# with a byte order mark\ncount = 4\n", {"count": 4}),
        ("limit = None\nstop = 9\n", {"limit": None, "stop": 9}),
        ("fast = True\n", {"fast": True}),
        ("text = ['a', 'b']\nsizes = (8,)\n", {"text": ("a", "b"), "sizes": (8,)}),
        ("import math\n\ndef f():\n    return 4\n\n_x = [f()]\ncount = _x[0]\n", {"count": 4}),
        ("count = len(__file__) and __name__.count('main') + 4\n", {"count": 4}),
        ("for _i in range(3):\n    count = _i + 2\n", {"count": 4}),
        ("def f():\n    return g()\n\ndef g():\n    return 4\n\ncount = f()\n", {"count": 4}),
    ],
)
def test_a_config_file_is_plain_python(config, source, expected):
    """Its public plain values are settings; imports, functions and _names are its own affair."""
    path = config(source)
    assert_changed([path], expected | {"config": path})


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("cuont = 4", "cuont ({}): there is no such setting; did you mean count?"),
        ("count = 'four'", "count = 'four' ({}): expected a whole number from 1 below 10"),
        ("count = 4.0", "count = 4.0 ({}): expected a whole number from 1 below 10"),
        ("count = True", "count = True ({}): expected a whole number from 1 below 10"),
        ("count = None", "count = None ({}): expected a whole number from 1 below 10"),
        ("count = {4}", "count = {{4}} ({}): expected a whole number from 1 below 10"),
        ("rate = '1'", "rate = '1' ({}): expected a number above 0 to 1"),
        ("rate = float('nan')", "rate = nan ({}): expected a number above 0 to 1"),
        ("fast = 1", "fast = 1 ({}): expected true or false"),
        ("start = 4", "start = 4 ({}): expected text"),
        ("text = 'a'", "text = 'a' ({}): expected text, one or more"),
        ("sizes = (8, 'x')", "sizes = (8, 'x') ({}): expected a whole number, one or more"),
        (
            "xyzzy = [1, 2]",
            "xyzzy ({}): there is no such setting; see --help for those there are",
        ),
        ("stop = 2", "stop = 2 is under count = 3"),
    ],
)
def test_a_problem_in_a_config_file_names_the_file(config, source, problem):
    """A misspelt name in a file must not pass in silence."""
    path = config(source)
    assert problems(path) == [problem.format(path)]


def test_a_path_in_a_config_file_is_not_passed_over(config):
    """It is no plain value, but it was meant for a setting."""
    (problem,) = problems(config("from pathlib import Path\nfolder = Path('out')\n"))
    assert "folder" in problem and "expected text or none" in problem


def test_problems_of_file_and_command_line_come_together(config):
    """And a setting that the command line mends in one of them is still wrong in the other."""
    path = config("cuont = 4\nrate = 2")
    found = problems(path, "--mdoe", "plain", "--rate", "1")
    assert len(found) == 3
    assert all(any(name in line for line in found) for name in ("cuont", "mdoe", "rate = 2"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("count = 4\nrate = = 1\n", "line 2: SyntaxError: invalid syntax"),
        ("\n1 / 0\n", "line 2: ZeroDivisionError: division by zero"),
        ("def f():\n    return 1 / 0\n\ncount = f()\n", "line 2: ZeroDivisionError"),
        ("import no_such_module\n", "line 1: ModuleNotFoundError: No module named"),
        ("\n\nopen('missing.txt')\n", "line 3: FileNotFoundError"),
        ("import json\n\njson.loads('\\n\\n\\n\\n{')\n", "line 3: JSONDecodeError"),
        ("raise SystemExit(3)\n", "line 1: SystemExit: 3"),
        (b"count = 4\nstart = '\xe9'\n", "line 2: SyntaxError: (unicode error) 'utf-8'"),
    ],
)
def test_a_config_file_that_fails_is_named_with_the_line(config, source, message):
    """The line of the config file, not of the library that it called."""
    path = config(source)
    (problem,) = problems(path)
    assert problem.startswith(f"{path}, {message}")
    assert "did you mean" not in problem and problem.count("made.py") == 1


def test_a_config_file_that_is_not_there(config):
    """With the nearest there is."""
    path = Path(config("count = 4"))
    (problem,) = problems(str(path.with_name("mode.py")), "--count", "4")
    assert problem.startswith(f"{path.with_name('mode.py')}: No such file")
    assert problem.endswith(f"did you mean {path}?")
    (problem,) = problems(str(path.parent / "nowhere" / "made.py"))
    assert "No such file" in problem and "did you mean" not in problem
    assert "directory" in problems(str(path.parent))[0]


def test_a_config_file_cannot_reach_into_settings(config):
    """It runs in a namespace of its own, with nothing of ours in it."""
    (problem,) = problems(config("\nsetting = Field\n"))
    assert "line 2: NameError" in problem


# ------------------------------------------------------------------------------- TrainSettings


def test_a_misspelt_setting_of_train_py(config):
    """The example of the README."""
    assert problems("--n_haed", "4", kind=TrainSettings) == [
        "n_haed: there is no such setting; did you mean n_head?"
    ]
    path = config("lerning_rate = 0.1")
    assert problems(path, kind=TrainSettings) == [
        f"lerning_rate ({path}): there is no such setting; did you mean learning_rate?"
    ]


def test_every_rule_between_settings_that_is_broken_is_reported():
    """Before any data is read; each with what would do."""
    argv = "--n_embd 32 --n_head 3 --eval_interval 0 --warmup_iters 20 --max_iters 10 --dropout 1.5"
    found = problems(*argv.split(), "--batch_size=0", "--min_lr=1", kind=TrainSettings)
    expected = [
        "eval_interval = '0': expected a whole number from 1",
        "dropout = '1.5': expected a number from 0 below 1",
        "batch_size = '0': expected a whole number from 1",
        "n_head = 3 does not divide n_embd = 32; these would: 1, 2, 4",
        "warmup_iters = 20 is over max_iters = 10; warm up for fewer updates",
        "min_lr = 1.0 is over learning_rate = 0.001; lower it",
    ]
    assert found == expected


def test_resume_and_overwrite_exclude_each_other():
    """One would be the end of what the other wants to go on with."""
    assert "exclude each other" in problems("--resume", "--overwrite", kind=TrainSettings)[0]


def test_every_default_is_valid():
    """A default out of its own range would be an error as soon as it is written down."""
    for field, hint in settings.hinted(TrainSettings):
        assert settings.Field(field, hint).accepts(field.default), field.name


def test_the_record_leaves_out_what_was_to_be_done():
    """Two runs that differ in --show or --resume are made from the same settings."""
    record = read("--resume", "--n_head", "4", kind=TrainSettings).record()
    assert record["n_head"] == 4
    assert not {"config", "resume", "overwrite", "show"} & record.keys()
    assert TrainSettings(**record).record() == record


def test_a_listing_is_a_config_file(config):
    """`--show > config/mine.py` gives a file that says the same."""
    chosen = read("--show", "--n_head=4", "--grad_clip=1", "--dataset=童话", kind=TrainSettings)
    again = read(config(settings.listing(chosen)), kind=TrainSettings)
    assert again.record() == chosen.record()
    assert not again.show


# ------------------------------------------------------------------------------- help


@pytest.mark.parametrize("kind", [Small, TrainSettings])
def test_help_lists_every_setting_with_its_default_and_range(kind, capsys):
    """In a class of its own or inherited; and nothing is done."""
    with pytest.raises(SystemExit) as stopped:
        read("--cuont", "--help", kind=kind)
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("about\n")
    for field, hint in settings.hinted(kind):
        name = f"[{field.name}]" if field.name == "config" else f"--{field.name}"
        lines = shown[shown.index(f"  {name} ") :].splitlines()
        assert lines[0].split(maxsplit=1) == [name, field.metadata["meaning"]]
        expected = settings.Field(field, hint).expected()
        assert lines[1].strip() == f"{expected}; default {settings.show(field.default)}"
    assert shown.count("  --seed ") == 1


def test_help_groups_the_settings(capsys):
    """By the classes they are inherited from."""
    with pytest.raises(SystemExit):
        read("-h", kind=TrainSettings)
    shown = capsys.readouterr().out
    headings = ["Data:", "Model:", "Optimizer and schedule:", "Run:", "What to do:"]
    assert [line for line in shown.splitlines() if line in headings] == headings


# ------------------------------------------------------------------------------- run


SCRIPT = """
import sys
from pathlib import Path
from settings import DataSettings, UserError, resolve, run

def main(argv):
    if argv[0] == "wrong":
        raise UserError(f"{argv[1]}: there is none; make one\\nsecond: 2; mend it")
    if argv[0] == "count":
        print(*range(100_000), sep="\\n")
    if argv[0] == "read":
        print(argv[1], sys.stdin.read() + Path(argv[1]).read_text("utf-8"))
    if argv[0] == "interrupt":
        raise KeyboardInterrupt
    if argv[0] == "--help":
        resolve(DataSettings, argv, "about")
    if argv[0] == "bug":
        raise RuntimeError("a bug")
    print("done")
    return int(argv[0]) if argv[0].isdigit() else None

if __name__ == "__main__":
    run(main)
"""
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture
def script(tmp_path):
    """Runs a small script to its end; its output is bytes."""
    (tmp_path / "script.py").write_text(SCRIPT, "utf-8")
    command = [sys.executable, "-W", "error", "script.py"]
    python = {"PYTHONPATH": str(Path(settings.__file__).parent), "PYTHONUNBUFFERED": ""}

    def start(*argv, before=(), env=None, **options):
        env = os.environ | python | (env or {})
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        return subprocess.run(
            [*before, *command, *argv], cwd=tmp_path, env=env, timeout=60, **options
        )

    return start


@pytest.fixture
def broken_pipe():
    """The end of a pipe that is written to, when nobody reads the other end."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.mark.parametrize(("argument", "code"), [("0", 0), ("7", 7), ("none", 0)])
def test_the_exit_code_is_what_main_returns(script, argument, code):
    """None is 0, as for any command."""
    ended = script(argument)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, b"done\n", b"")


@pytest.mark.parametrize("env", [None, C_LOCALE], ids=["utf8", "C"])
@pytest.mark.parametrize("name", ["童话", os.fsdecode(b"\xff")])
def test_a_user_error_is_one_line_for_each_problem_and_2(script, env, name):
    """No traceback, also when the file named in it has a name that is no text."""
    ended = script("wrong", name, env=env)
    shown = name.encode("utf-8", "backslashreplace")
    assert ended.stderr == (
        b"script.py: %b: there is none; make one\nscript.py: second: 2; mend it\n" % shown
    )
    assert (ended.returncode, ended.stdout) == (2, b"")


def test_a_bug_keeps_its_traceback(script):
    """Only what the user can mend is told in a line."""
    ended = script("bug")
    assert ended.returncode == 1
    assert ended.stderr.startswith(b"Traceback") and b"a bug" in ended.stderr


def test_an_interrupt_is_quiet(script):
    """As the shell has it: 128 and the number of the signal."""
    ended = script("interrupt")
    assert (ended.returncode, ended.stderr) == (130, b"")


@pytest.mark.parametrize("argument", ["count", "0", "--help"])
def test_a_reader_that_goes_away_is_no_error(script, broken_pipe, argument):
    """As in `python sample.py | head -1`: at a write, at the last flush, or after the help."""
    ended = script(argument, stdout=broken_pipe)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("closing", ["<&-", ">&-"])
def test_a_stream_may_be_closed(script, closing):
    """Some services start their programs so; Python then has None in its place."""
    ended = script("0", before=["sh", "-c", f'"$@" {closing}', "sh"])
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("env", [None, C_LOCALE], ids=["utf8", "C"])
def test_text_is_utf8_whatever_the_locale(script, tmp_path, env):
    """Arguments, file names, input and output, where Python would take the C locale for ASCII."""
    (tmp_path / "童话.txt").write_text("很久以前", "utf-8")
    ended = script("read", "童话.txt", env=env, input="从前\n".encode())
    assert ended.stderr == b""
    assert ended.stdout == "童话.txt 从前\n很久以前\ndone\n".encode()
