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
from ltx2_cli.cli.info import INFO_EXAMPLES, info, lora
from ltx2_cli.cli.models import models
from ltx2_cli.cli.multihost import exit_now, leave_quietly, system_error
from ltx2_cli.cli.options import KEYS, Verb
from ltx2_cli.cli.plan import PLAN_EXAMPLES, plan
from ltx2_cli.cli.replay import REPLAY_EXAMPLES, replay
from ltx2_cli.cli.resume import RESUME_EXAMPLES, resume
from ltx2_cli.cli.upsample import UPSAMPLE_EXAMPLES, upsample
from ltx2_cli.console import print_error
from ltx2_cli.errors import CommandError, RunError, UsageError
from ltx2_cli.files import remove_locks
from ltx2_cli.interrupts import INTERRUPTED, ignore_signals, on_forced_exit, resend_interrupt

OPTION = re.compile(r"--(?P<name>[a-z][a-z-]+)(?: (?P<value>-?\d[\d.]*))?")
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
    app.command(cls=Verb, help=f"{verb.__doc__}\n\n{examples}", short_help=verb.__doc__, epilog=EXIT_CODES)(verb)
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
    sys.excepthook = _unexpected
    sys.unraisablehook = resend_interrupt
    on_forced_exit(remove_locks)
    sentence, hint = "interrupted", ""  # typer's own exit code is 130
    try:
        code = get_command(app)(prog_name="ltx2", standalone_mode=False) or 0
    except (CommandError, OSError, typer.TyperException) as caught:
        if "--debug" in sys.argv:
            traceback.print_exc()
        error = system_error(caught) if isinstance(caught, OSError) else caught
        sentence, hint, code = str(error), _options(), error.exit_code
        if isinstance(error, typer.TyperException):
            sentence = error.format_message()
        elif error.hint or not isinstance(error, UsageError):
            hint = error.hint
        if leave_quietly(error):
            sys.exit(code)
    ignore_signals()
    if code:
        print_error(of_verb(sentence), of_verb(hint), "" if code == INTERRUPTED else "error: ")
    exit_now(code)


def of_verb(text: str) -> str:
    """`text`, where each option that the typed verb does not have becomes a `--set` of its key."""
    command = get_group(app).commands.get(sys.argv[1] if len(sys.argv) > 1 else "")
    flags = {flag for parameter in command.params for flag in parameter.opts} if command else set()

    def replacement(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"] or "N"
        key = "num_inference_steps" if name == "steps" else KEYS.get(name.replace("-", "_"))
        return found[0] if key is None or f"--{name}" in flags else f"--set {key}={value}"

    return OPTION.sub(replacement, text) if "--set" in flags else text


def _options() -> str:
    """The hint that names the help of the typed verb, if there is such a verb."""
    verbs = [word for word in sys.argv[1:2] if word in get_group(app).commands]
    return f"`{' '.join(['ltx2', *verbs])} --help` lists what there is"


def _unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's hook for any other exception."""
    if "--debug" in sys.argv:
        sys.__excepthook__(kind, error, trace)
    else:
        first_line = (str(error).splitlines() or [""])[0]
        file = _save_traceback("".join(traceback.format_exception(kind, error, trace)))
        hint = f"{file} shows where it happened" if file else "--debug shows where it happened"
        print_error(f"{kind.__name__}: {first_line}", f"this was not foreseen; {hint}")
    exit_now(RunError.exit_code)


def _save_traceback(trace: str) -> Path | None:
    """Write a traceback into the user's cache, else into the current folder. Returns the file; None where neither
    takes it."""
    from ltx2_cli.request.profiles import user_cache

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
