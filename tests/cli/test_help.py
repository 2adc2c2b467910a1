"""Help, usage errors and completion answer at once, since nothing heavy is imported for them."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_group

from ltx2_cli.cli.app import EXIT_CODES, MEANINGS, app, ltx2_command
from ltx2_cli.cli.defaults import default_texts
from ltx2_cli.cli.names import ALIASES
from ltx2_cli.cli.registry import COMMANDS
from ltx2_cli.errors import CommandError, UsageError
from ltx2_cli.request.spec import Guidance
from program import run_program

# Each argument is a command: of each, its exit code and what is imported by then that takes long.
PROGRAM = """
import os, shlex, sys
from ltx2_cli.__main__ import main
os._exit = sys.exit
heavy = ("jax", "jaxlib", "flax", "torch", "torchax", "transformers", "huggingface_hub", "numpy", "omegaconf")
for command in sys.argv[1:]:
    sys.argv = ["ltx2", *shlex.split(command)]
    try:
        main()
    except SystemExit as end:
        imported = [name for name in heavy if name in sys.modules]
        print("exit", end.code or 0, "imported", imported, file=sys.stderr)
"""

OPTIONS = """
    --prompt --negative-prompt --model --height --width --num-frames --fps --num-inference-steps --steps --seed
    --num-videos --stg-blocks --dtype --text-encoder-dtype --sharding --init-noise --save-latents --output --force
    --config --set --debug --recipe --lora --text-encoder --dry-run --image --image-crf --video --audio
    --strict --compile-cache --no-compile --warmup --perf-dump --profile
"""


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ltx2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`ltx2` on a wide terminal: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    return lambda *arguments: (run_program(monkeypatch, *arguments), *capsys.readouterr())


def anew(*commands: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Commands, one after the other, in a process that begins with nothing imported."""
    command = [sys.executable, "-c", PROGRAM, *commands]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def test_help_imports_no_heavy_library():
    codes = {
        "": 0,
        "--help": 0,
        "--version": 0,
        "generate --help": 0,
        "plan --help": 0,
        "info --help": 0,
        "replay --help": 0,
        "generat": 2,
        "generate --hieght 3": 2,
        "generate --height tall": 2,
        "generate --dtype float8": 2,
    }
    ends = [line for line in anew(*codes).stderr.splitlines() if line.startswith("exit ")]
    yaml = "'omegaconf'"  # reads the profiles, whose defaults are in the help of commands
    assert [end.replace(yaml, "") for end in ends] == [f"exit {code} imported []" for code in codes.values()]
    assert [yaml in end for end in ends[:3]] == [False] * 3


def test_completion_knows_options_and_profiles_and_imports_no_jax():
    line = {"_LTX2_COMPLETE": "complete_bash", "COMP_CWORD": "3"}
    assert "ironwood" in anew("", COMP_WORDS="ltx2 generate --sharding iron", **line).stdout
    done = anew("", COMP_WORDS="ltx2 generate --model d", **line)
    assert done.stdout.split() == ["demo"]
    assert "imported" in done.stderr
    assert "jax" not in done.stderr
    keys = anew("", COMP_WORDS="ltx2 generate --set second_stage.t", **line).stdout.split()
    assert keys == ["second_stage.temporal_tiles=", "second_stage.temporal_upsample="]


@pytest.mark.parametrize("place", [0, -1])
def test_names_of_other_programs_are_taken_and_not_shown(place: int, ltx2: Run):
    command = get_group(app).commands["generate"]
    names = {parameter.opts[0]: parameter.name for parameter in command.params}
    values = {name: {"--stg-blocks": "1,2", "--num-videos": "3"}.get(name, "0.5") for name in ALIASES}
    given = command.make_context(
        "generate", [word for name in ALIASES for word in (ALIASES[name][place], values[name])]
    )
    assert {name: str(given.params[names[name]]).strip("[']") for name in ALIASES} == values
    with pytest.raises(UsageError, match=r"--fps is given 2 times: 24, 25"):
        command.make_context("generate", ["--fps", "24", "--frame-rate=25"])
    aliases = [alias for others in ALIASES.values() for alias in others]
    _, shown, _ = ltx2("generate", "--help")
    page = (Path(__file__).parents[2] / "docs/files.md").read_text(encoding="utf-8")
    assert [alias for alias in aliases if alias in shown or f"`{alias}`" not in page] == []


def test_help_shows_every_option_and_examples(ltx2: Run):
    _, shown, _ = ltx2("generate", "--help")
    scales = Guidance.__dataclass_fields__
    options = [f"--{prefix}{name}".replace("_", "-") for prefix in ("", "audio-") for name in scales]
    assert [option for option in [*options, *OPTIONS.split()] if option not in shown] == []
    assert "-o " in shown
    assert "REPO[@REV]" in shown
    examples = re.compile(r"^ *ltx2 generate [-\"]", re.MULTILINE)
    assert len(examples.findall(shown)) == 11


def test_help_has_an_example_of_every_verb_and_all_exit_codes(ltx2: Run):
    _, shown, _ = ltx2("-h")
    names = {name.split()[0] for name in COMMANDS}
    assert [name for name in names if not re.search(rf"^ *ltx2 {name}", shown, re.MULTILINE)] == []
    table = re.findall(r"^ +(\d+)  ([a-z].*?)$", shown.partition("Exit codes")[2], re.MULTILINE)
    assert {int(code): meaning for code, meaning in table} == MEANINGS


def test_every_error_has_an_exit_code_of_the_table():
    def below(kind: type[CommandError]) -> Iterator[type[CommandError]]:
        yield kind
        for other in kind.__subclasses__():
            yield from below(other)

    assert list(MEANINGS) == [0, 1, 2, 3, 4, 5, 130]
    assert {kind.exit_code for kind in below(CommandError)} <= MEANINGS.keys() - {0}


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_of_every_verb_has_its_defaults_examples_and_all_exit_codes(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run_program(monkeypatch, *verb.split(), "-h") == 0
    shown = capsys.readouterr().out
    command: Any = ltx2_command()
    for word in verb.split():
        command = command.commands[word]
    texts = default_texts()
    assert [each.name for each in command.params if each.name in texts and "default: " not in each.help] == []
    assert re.search(rf"^ *ltx2 {verb}\b", shown, re.MULTILINE)
    assert " ".join(shown.split()).endswith(EXIT_CODES)


def test_a_narrow_terminal_shows_the_short_names(ltx2: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "60")
    _, shown, _ = ltx2("generate", "-h")
    assert "--steps" in shown
    assert "─ Several hosts ─" in shown


def test_help_of_plan_shows_its_own_options_and_examples(ltx2: Run):
    _, shown, _ = ltx2("plan", "--help")
    own = ("--topology", "--search", "--all", "--dump-hlo", "--json", "--model", "--sharding", "--height", "--set")
    assert [option for option in own if option not in shown] == []
    assert shown.count("ltx2 plan --") == 6
    assert "3 it does not fit" in shown


def test_the_version_is_that_of_the_package(ltx2: Run):
    from ltx2_cli import __version__

    assert ltx2("--version")[1] == f"ltx2 {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "verb"),
    [
        (("generate", "--novelty"), " generate"),
        (("models", "more"), " models"),
        (("config", "show", "--height", "tall"), " config show"),
        (("novelty",), ""),
        (("--novelty",), ""),
    ],
)
def test_option_errors_name_the_help_of_the_verb(ltx2: Run, arguments: tuple[str, ...], verb: str) -> None:
    code, out, err = ltx2(*arguments)
    assert (code, out) == (2, "")
    assert f"hint: `ltx2{verb} --help` lists" in err
