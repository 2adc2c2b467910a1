"""The command line, a file a verb. This one joins them, and turns what went wrong into a sentence and an exit code."""

import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer
from typer.main import get_command, get_group

from ltx2_cli import __version__
from ltx2_cli.cli.decode import DECODE_EXAMPLES, decode
from ltx2_cli.cli.generate import EXAMPLES, generate
from ltx2_cli.cli.info import INFO_EXAMPLES, info
from ltx2_cli.cli.lora import lora
from ltx2_cli.cli.models import models
from ltx2_cli.cli.options import KEYS
from ltx2_cli.cli.plan import PLAN_EXAMPLES, plan
from ltx2_cli.cli.replay import REPLAY_EXAMPLES, replay
from ltx2_cli.cli.resume import RESUME_EXAMPLES, resume
from ltx2_cli.cli.together import FAILED, FLAWED, REFUSED, TOO_LARGE, leave, of_system, part
from ltx2_cli.cli.upsample import UPSAMPLE_EXAMPLES, upsample
from ltx2_cli.console import complain
from ltx2_cli.interrupts import INTERRUPTED, before_forced_end, ignore_signals, raise_again
from ltx2_cli.spec import AbortedError, FitError, FlawError, RunError, SpecError, StoppedError
from ltx2_cli.writing import leave_folders

OPTION = re.compile(r"--(?P<name>[a-z][a-z-]+)(?: (?P<value>-?\d[\d.]*))?")
EXPECTED = (SpecError, FitError, FlawError, StoppedError, AbortedError, RunError)
EXIT_CODES = (
    "Exit codes: 0 done, 1 the run failed, 2 the request cannot be met, 3 it does not fit into memory, 4 the clip has"
    " flaws (--strict), 130 interrupted."
)
VERBS: dict[Callable[..., None], str] = {
    generate: EXAMPLES,
    upsample: UPSAMPLE_EXAMPLES,
    resume: RESUME_EXAMPLES,
    decode: DECODE_EXAMPLES,
    replay: REPLAY_EXAMPLES,
    plan: PLAN_EXAMPLES,
    info: INFO_EXAMPLES,
    models: "[bold]Examples[/bold]\n\nltx2 models",
}
ONE_OF_EACH = [
    next(line for line in examples.splitlines() if line.startswith(f"ltx2 {verb.__name__}"))
    for verb, examples in VERBS.items()
]
HELP = "\n".join([*ONE_OF_EACH, "ltx2 lora inspect lora.safetensors"])

app = typer.Typer(
    rich_markup_mode="rich",
    help=f"Video with sound from text: LTX-2 in JAX.\n\n[bold]Examples[/bold]\n\n{HELP}",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb, examples in VERBS.items():
    app.command(help=f"{verb.__doc__}\n\n{examples}", short_help=verb.__doc__, epilog=EXIT_CODES)(verb)
app.add_typer(lora, name="lora")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ltx2 {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True, epilog=EXIT_CODES)
def overview(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Say the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """What `ltx2` does without a verb: show its help."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line and exit. Tracebacks are shown with `--debug` alone."""
    if sys.stderr is None:  # closed; nothing that is opened later may get its number
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    debug = "--debug" in sys.argv
    sys.excepthook = _unforeseen
    sys.unraisablehook = raise_again
    before_forced_end(leave_folders)
    sentence, hint = "interrupted", ""  # typer's own exit code is 130
    try:
        code = get_command(app)(prog_name="ltx2", standalone_mode=False) or 0
    except (
        SpecError,
        FitError,
        FlawError,
        StoppedError,
        AbortedError,
        RunError,
        OSError,
        typer.TyperException,
    ) as error:
        if debug:
            traceback.print_exc()
        sentence, hint, code = _explain(error)
        if part(error):
            sys.exit(code)
    ignore_signals()
    if code:
        complain(of_verb(sentence), of_verb(hint), "" if code == INTERRUPTED else "error: ")
    leave(code)


def _explain(error: Exception) -> tuple[str, str, int]:
    """The sentence, the hint and the exit code of an expected error."""
    match error:
        case SpecError():
            return str(error), error.hint or _options(), REFUSED
        case FitError():
            return str(error), error.hint, TOO_LARGE
        case FlawError():
            return str(error), error.hint, FLAWED
        case StoppedError() | AbortedError():
            return str(error), error.hint, INTERRUPTED
        case RunError():
            return str(error), error.hint, FAILED
        case typer.TyperException():
            return error.format_message(), _options(), error.exit_code
        case OSError():
            return _explain(of_system(error))
        case _:
            raise error


def of_verb(text: str) -> str:
    """A text with options as the verb has them that was typed: what it has no option for is set by its key."""
    command = get_group(app).commands.get(sys.argv[1] if len(sys.argv) > 1 else "")
    flags = {flag for parameter in command.params for flag in parameter.opts} if command else set()

    def settled(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"] or "N"
        key = "num_inference_steps" if name == "steps" else KEYS.get(name.replace("-", "_"))
        return found[0] if key is None or f"--{name}" in flags else f"--set {key}={value}"

    return OPTION.sub(settled, text) if "--set" in flags else text


def _options() -> str:
    """Where the options are listed of the verb that was typed, if there is such a verb."""
    verbs = [word for word in sys.argv[1:2] if word in get_group(app).commands]
    return f"`{' '.join(['ltx2', *verbs])} --help` lists what there is"


def _unforeseen(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What Python calls for any other exception, before it ends with exit code 1."""
    if "--debug" in sys.argv:
        sys.__excepthook__(kind, error, trace)
    else:
        first_line = (str(error).splitlines() or [""])[0]
        file = _written("".join(traceback.format_exception(kind, error, trace)))
        hint = f"{file} shows where it happened" if file else "--debug shows where it happened"
        complain(f"{kind.__name__}: {first_line}", f"this was not foreseen; {hint}")
    leave(FAILED)


def _written(trace: str) -> Path | None:
    """The file that a traceback was written to: in the user's cache, else in the current folder; None: in neither."""
    from ltx2_cli.profiles import user_cache

    name = f"error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (user_cache, Path):
        with suppress(OSError, RuntimeError):  # the latter where there is no home
            file = folder() / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(
                f"ltx2 {__version__}: {shlex.join(sys.argv)}\n\n{trace}", encoding="utf-8", errors="replace"
            )
            return file
    return None
