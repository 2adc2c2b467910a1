"""The command line: imports each command only when it runs, and turns errors into sentences and exit codes."""

import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature, cleandoc, get_annotations
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from ltx2_cli import __version__
from ltx2_cli.artifacts.files import remove_locks
from ltx2_cli.cli import commands
from ltx2_cli.cli.names import ALIASES
from ltx2_cli.cli.options import METAVARS, PANELS, BatchOptions, Options, SessionOptions, spelling_of
from ltx2_cli.cli.session import FINISHED, exit_now, leave_quietly, open_session, system_error
from ltx2_cli.console import print_error, print_out
from ltx2_cli.errors import CommandError, RunError, UsageError
from ltx2_cli.interrupts import INTERRUPTED, ignore_signals, on_forced_exit, resend_interrupt
from ltx2_cli.request.spelling import spelled_for

MEANINGS = {  # of exit codes
    0: "done",
    1: "the run failed",
    2: "the request cannot be met",
    3: "it does not fit into memory",
    4: "the clip has flaws (--strict)",
    5: "a batch is done in part",
    130: "interrupted",
}
EXIT_CODES = f"Exit codes: {', '.join(f'{code} {meaning}' for code, meaning in MEANINGS.items())}."
PROGRAM_OPTIONS = {"help": "--help", "version": "--version", "-v": "--version", "-V": "--version"}
HELP = "{}\n\n[bold]Examples[/bold]\n\n{}"
OVERVIEW = HELP.format("Video with sound from text: LTX-2 in JAX.", "{}") + "\n\n[bold]Exit codes[/bold]\n\n{}"

VERBS: dict[type[Options], str] = {  # each with the module that carries it out
    commands.Generate: "generate",
    commands.Retake: "edit",
    commands.Extend: "edit",
    commands.Batch: "batch",
    commands.Sweep: "sweep",
    commands.Upsample: "latents",
    commands.Resume: "execute",
    commands.Decode: "latents",
    commands.Replay: "replay",
    commands.Plan: "generate",
    commands.Info: "inspect",
    commands.Gallery: "gallery",
    commands.Models: "models",
    commands.Doctor: "doctor",
}
GROUPS: dict[str, tuple[str, dict[str, type[Options]], str]] = {  # help, commands, the module of all
    "lora": ("Look into LoRA files.", {"inspect": commands.Lora}, "inspect"),
    "bench": ("Measure, and compare what was measured.", {"run": commands.Run, "compare": commands.Compare}, "bench"),
    "config": (
        "See and check settings.",
        {"show": commands.Show, "validate": commands.Validate, "path": commands.Locate, "schema": commands.Schema},
        "config",
    ),
}


class Verb(TyperCommand):
    """A command that knows the `ALIASES` of its options, and refuses a second value of one that takes one; typer drops
    the first. `ctx` is of a class that typer does not export."""

    def make_parser(self, ctx: Any, action: str = "store") -> Any:
        """A parser that does with options of one value as `action` says."""
        parser = super().make_parser(ctx)
        for option in self.params:
            if isinstance(option, TyperOption) and not option.is_flag:
                names = [*option.opts, *ALIASES.get(option.opts[0], ())]
                parser.add_option(option, names, option.name, "append" if option.multiple else action)
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises `UsageError` with both values."""
        options = [parameter for parameter in self.params if isinstance(parameter, TyperOption)]
        single = [option for option in options if not (option.is_flag or option.multiple)]
        parser = self.make_parser(ctx, "append")
        values_by_name, _, _ = parser.parse_args(list(args))
        for option in single:
            flag, given = option.opts[0], values_by_name.get(option.name, [])
            if len(given) > 1 and not ctx.resilient_parsing:  # as for completion
                several = flag == "--seed" and option.type_descriptor.annotation is str  # 7, or 1,2,3
                value = ",".join(given) if several else given[-1]
                raise UsageError(f"{flag} is given {len(given)} times: {', '.join(given)}", shlex.join([flag, value]))
        return super().parse_args(ctx, args)


def as_function(verb: type[Options], module: str) -> Callable[..., None]:
    """The command as typer reads it: a function of its options. It imports the `module` that carries the command
    out."""
    types = {name: kind for part in verb.__mro__ for name, kind in get_annotations(part).items()}
    form = Parameter.KEYWORD_ONLY
    parameters = [Parameter(name, form, default=getattr(verb, name), annotation=types[name]) for name in types]
    for option in parameters:
        option.default.metavar = option.default.metavar or METAVARS.get(option.annotation)
    parameters.sort(key=lambda parameter: PANELS.index(parameter.default.rich_help_panel))

    def run(**values: object) -> None:
        options = verb(**values)
        hosts = open_session(options) if isinstance(options, SessionOptions) else nullcontext()
        with spelled_for(spelling_of(verb)), hosts as session:
            function = getattr(import_module(f"ltx2_cli.cli.{module}"), verb.__name__.lower())
            function(options, session) if session else function(options)

    run.__dict__["__signature__"], run.__annotations__ = Signature(parameters), types
    return run


def add_command(place: typer.Typer, typed: str, verb: type[Options], module: str) -> None:
    """Add a command that is `typed` so, behind the name of its group if it has one."""
    sentences, _, examples = cleandoc(verb.__doc__ or "").partition("\n\n")
    text = HELP.format(sentences, examples)
    function = as_function(verb, module)
    place.command(typed.split()[-1], cls=Verb, help=text, short_help=sentences, epilog=EXIT_CODES)(function)
    if len(typed.split()) == 1 or not place.registered_commands[1:]:  # of a group its first command
        first_examples.append(next(line for line in examples.splitlines() if line.startswith(f"ltx2 {typed}")))


first_examples = list[str]()
app = typer.Typer(rich_markup_mode="rich", context_settings={"help_option_names": ["-h", "--help"]})
for verb, module in VERBS.items():
    add_command(app, verb.__name__.lower(), verb, module)


def show_help(context: typer.Context) -> None:
    """What happens without a verb."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for name, (help_text, verbs, module) in GROUPS.items():
    group = typer.Typer()
    for command, verb in verbs.items():
        add_command(group, f"{name} {command}", verb, module)
    group.callback(invoke_without_command=True, help=help_text)(show_help)
    app.add_typer(group, name=name)


@app.callback(
    invoke_without_command=True,
    help=OVERVIEW.format("\n".join(first_examples), "\n".join(f"{code:>4}  {MEANINGS[code]}" for code in MEANINGS)),
)
def overview(context: typer.Context, version: bool = typer.Option(False, "--version", help="Say the version.")) -> None:
    """What happens without a verb."""
    if version:
        typer.echo(f"ltx2 {__version__}")
        raise typer.Exit
    show_help(context)


@cache
def ltx2_command() -> Any:
    """`ltx2` with all its commands, of a class that typer does not export."""
    return get_command(app)


def main() -> None:
    """Run the command line and exit. Tracebacks are shown with `--debug` alone."""
    if sys.stderr is None:  # closed; nothing that is opened later may get its number
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.excepthook = _unexpected
    sys.unraisablehook = resend_interrupt
    on_forced_exit(remove_locks)
    sentence, hint = "interrupted", ""  # typer's own exit code is 130
    try:
        code = ltx2_command()(prog_name="ltx2", standalone_mode=False) or 0
    except (CommandError, OSError, typer.TyperException) as caught:
        if "--debug" in sys.argv:
            traceback.print_exc()
        error = system_error(caught) if isinstance(caught, OSError) else caught
        sentence, code = str(error), error.exit_code
        if isinstance(error, typer.TyperException):
            sentence, hint = refusal(error)
        else:
            hint = error.hint
        if leave_quietly(error):
            sys.exit(code)
    ignore_signals()
    if code:
        print_error(sentence, hint, "" if code == INTERRUPTED else "error: ")
        print_json_error(sentence, hint, code)
    exit_now(code)


def refusal(error: typer.TyperException) -> tuple[str, str]:
    """What typer does not understand, and what helps."""
    words, command = typed_command()
    hint = f"`{' '.join(['ltx2', *words])} --help` lists what there is"
    if isinstance(error, typer.BadParameter) and isinstance(error.__cause__, ValueError):
        parameter, cause = cast(Any, error.param), cast(Any, error.__cause__)  # of pydantic, which typer brings
        given = cause.errors()[0]["input"]
        return f"{parameter.opts[0]} {given!r} is not {_wanted(parameter)}", hint
    unknown = "".join(sys.argv[1 + len(words) :][:1])
    if isinstance(command, TyperGroup) and not words and unknown in PROGRAM_OPTIONS:
        return error.format_message(), f"`ltx2 {PROGRAM_OPTIONS[unknown]}`"
    if isinstance(command, TyperGroup) and (near := _near(unknown, [*command.commands])):
        return error.format_message(), f"closest: `{' '.join(['ltx2', *words, near])}`"
    return error.format_message(), hint


def _near(word: str, names: Sequence[str]) -> str:
    """The name that a word begins, or is closest to; empty: none."""
    begun = [name for name in names if word and name.startswith(word)]
    return (begun or get_close_matches(word, names, 1) or [""])[0]


def _wanted(parameter: Any) -> str:
    """What an option takes."""
    kind, info = parameter.type_descriptor.annotation, parameter.type_descriptor.parameter_info
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    limits = {"at least": info.min, "at most": info.max}
    said = [f" of {word} {limit:.7g}" for word, limit in limits.items() if limit is not None]
    return {int: "an integer", float: "a number"}.get(kind, "what it takes") + " and".join(said)


def print_json_error(sentence: str, hint: str, code: int) -> None:
    """Where a result in JSON was asked for and none was printed: the error in its place, on stdout."""
    name = (typed_command()[0] or [""])[0]
    verb = next((verb for verb in VERBS if verb.__name__.lower() == name), Options)
    has_result = issubclass(verb, SessionOptions | commands.Gallery) and not issubclass(verb, BatchOptions)
    if "--json" in sys.argv and has_result and code not in FINISHED:
        with suppress(RunError):  # stdout takes no more
            print_out(json.dumps({"error": sentence, "hint": hint, "exit_code": code}, ensure_ascii=False))


def typed_command() -> tuple[list[str], Any]:
    """The words of the command that was typed, as far as they name one, and that command or group. Its class is one
    that typer does not export."""
    words = list[str]()
    command = ltx2_command()
    for word in sys.argv[1:]:
        if not isinstance(command, TyperGroup) or word not in command.commands:
            break
        command = command.commands[word]
        words.append(word)
    return words, command


def _unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's hook for other exceptions. Writes the traceback into the user's cache, else into the current folder."""
    if "--debug" in sys.argv:
        sys.__excepthook__(kind, error, trace)
        exit_now(RunError.exit_code)
    from ltx2_cli.request.profiles import user_cache

    place, lines = "--debug", traceback.format_exception(kind, error, trace)
    for folder in (user_cache, Path):
        with suppress(OSError):
            file = folder() / f"error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            text = f"ltx2 {__version__}: {shlex.join(sys.argv)}\n\n{''.join(lines)}"
            file.write_text(text, encoding="utf-8", errors="replace")
            place = str(file)
            break
    first_line = (str(error).splitlines() or [""])[0]
    sentence, hint = f"{kind.__name__}: {first_line}", f"this was not foreseen; {place} shows where it happened"
    print_error(sentence, hint)
    print_json_error(sentence, hint, RunError.exit_code)
    exit_now(RunError.exit_code)
