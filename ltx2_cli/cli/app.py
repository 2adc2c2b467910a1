"""`ltx2`: builds the command line from the registered commands, runs it, and turns errors into exit codes."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import Signature
from typing import Annotated, Any

import typer
from typer.main import get_command

import ltx2_cli.cli.commands  # noqa: F401  # registers them
from ltx2_cli import __version__
from ltx2_cli.artifacts.files import remove_locks
from ltx2_cli.cli.command_line import command_line
from ltx2_cli.cli.options import KeepOptions, SessionOptions
from ltx2_cli.cli.refusals import print_json_error, print_unexpected, refusal
from ltx2_cli.cli.registry import COMMAND_GROUPS, Command, all_commands, spelling_of
from ltx2_cli.cli.typer_commands import PlainGroup, StrictCommand
from ltx2_cli.console import print_error, reporter
from ltx2_cli.core.report import Report
from ltx2_cli.errors import CommandError, UsageError
from ltx2_cli.interrupts import INTERRUPTED, ignore_signals, interrupt_soon, on_forced_exit, resend_interrupt
from ltx2_cli.request.spelling import spelled_for
from ltx2_cli.runs.session import STARTED, Session, exit_now, leave_quietly, open_session, system_error
from ltx2_cli.runs.settings import SAVE_EVERY

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
OPTIONS = "--version, --help, --install-completion, --show-completion"


class Overview(PlainGroup):
    """`ltx2` itself."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the commands first, examples last."""
        for parameter in self.get_params(ctx):
            parameter.hidden = True  # type: ignore[attr-defined]  # they are among the last lines
        super().format_help(ctx, formatter)
        codes = [f"{code:>4}  {meaning}" for code, meaning in MEANINGS.items()]
        firsts = {one.name.split()[0]: one.first_example for one in reversed(all_commands())}
        for heading, lines in {
            "Options": [OPTIONS],
            "Exit codes": codes,
            "Examples": reversed(firsts.values()),
        }.items():
            typer.echo("\n".join([f" {heading}", *(f"   {line}" for line in lines), ""]))


@contextmanager
def command_session(options: SessionOptions) -> Iterator[Session]:
    """Meet the other hosts, if there are any. The first one reports, as --verbose and --quiet say."""
    from ltx2_cli.parallel.hosts import end_others, end_with_others, init_distributed

    hosts = init_distributed(
        options.coordinator_address, options.num_processes, options.process_id, options.initialization_timeout
    )
    if hosts.count > 1:
        # Libraries that connect CPUs talk on stdout, which is for results: they are heard on stderr.
        sys.stdout = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        on_forced_exit(end_others)
        end_with_others(interrupt_soon)
    if options.verbose and options.quiet:
        raise UsageError("--verbose and --quiet contradict each other", "leave one of them out")
    report = reporter(options.verbose) if hosts.first and not options.quiet else Report()
    if isinstance(options, KeepOptions) and options.save_run is False and options.save_run_every != SAVE_EVERY:
        report.defer("--save-run-every changes nothing, --no-save-run keeps nothing")
    settings = {name: vars(options)[name] for name in ("force", "trust", "dry_run", "strict", "as_json")}
    with open_session(hosts, report, command_line, began=STARTED, **settings) as session:
        yield session


def as_function(command: Command) -> Callable[..., None]:
    """The command as typer reads it: a function of its options."""

    def run(**values: object) -> None:
        options = command.options(**values)
        with spelled_for(spelling_of(command.options)):
            if isinstance(options, SessionOptions):
                with command_session(options) as session:
                    command.options.run(options, session)
            else:
                options.run()

    parameters = command.parameters.values()
    run.__dict__["__signature__"] = Signature([*parameters])
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def add_command(place: typer.Typer, command: Command) -> None:
    """Add a command to the program, or to its group."""
    *group, name = command.name.split()
    add = place.command(
        name,
        cls=StrictCommand,
        help="\n\n".join([command.help, "[bold]Examples[/bold]", "\n".join(command.examples)]),
        short_help=command.help.split(". ")[0].rstrip(".") + ".",
        epilog=EXIT_CODES,
        rich_help_panel=None if group else command.panel,
    )
    add(as_function(command))


def show_help(context: typer.Context) -> None:
    """Print the help where no command is typed."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def overview(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Print the version, or the help where no command is typed."""
    if version:
        typer.echo(f"ltx2 {__version__}")
        raise typer.Exit
    show_help(context)


def build_app() -> typer.Typer:
    """The program with all registered commands."""
    program = typer.Typer(rich_markup_mode="rich", context_settings={"help_option_names": ["-h", "--help"]})
    groups = dict[str, typer.Typer]()
    for command in all_commands():
        name = command.name.split()[0]
        if name in COMMAND_GROUPS and name not in groups:
            groups[name] = typer.Typer(cls=PlainGroup)
            groups[name].callback(invoke_without_command=True, help=COMMAND_GROUPS[name])(show_help)
            program.add_typer(groups[name], name=name, rich_help_panel=command.panel)
        add_command(groups.get(name, program), command)
    text = "Video with audio from a prompt: LTX-2 in JAX."
    program.callback(cls=Overview, invoke_without_command=True, help=text)(overview)
    return program


app = build_app()


@cache
def ltx2_command() -> Any:
    """`ltx2` with all its commands, of a class that typer does not export."""
    return get_command(app)


def main() -> None:
    """Run the command line and exit. Tracebacks are shown with `--debug` alone."""
    if sys.stderr is None:  # closed; nothing that is opened later may get its number
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.excepthook = print_unexpected
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
