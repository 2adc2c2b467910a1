"""Errors as sentences, with hints: typer's own, and unforeseen ones."""

import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast, get_args, get_origin

import typer

from ltx2_cli import __version__
from ltx2_cli.cli.options import BatchOptions, SessionOptions
from ltx2_cli.cli.registry import names_below, typed_command
from ltx2_cli.cli.removed import check_removed
from ltx2_cli.console import print_error, print_out
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.runs.session import FINISHED, exit_now

PROGRAM_OPTIONS = {"help": "--help", "version": "--version", "-v": "--version", "-V": "--version"}


def refusal(error: typer.TyperException) -> tuple[str, str]:
    """A sentence and a hint for words that typer does not understand."""
    try:
        check_removed(sys.argv[1:])
    except UsageError as removed:
        return str(removed), removed.hint
    words, command = typed_command()
    hint = f"`{' '.join(['ltx2', *words])} --help` lists {'its options' if command else 'the commands'}"
    if isinstance(error, typer.BadParameter) and isinstance(error.__cause__, ValueError):
        parameter, cause = cast(Any, error.param), cast(Any, error.__cause__)  # of pydantic, which typer brings
        return f"{parameter.opts[0]} {cause.errors()[0]['input']!r} is not {_expected(parameter)}", hint
    unknown = "".join(sys.argv[1 + len(words) :][:1])
    if not words and unknown in PROGRAM_OPTIONS:
        return error.format_message(), f"`ltx2 {PROGRAM_OPTIONS[unknown]}`"
    if command is None and (near := _nearest(unknown, [*names_below(words)])):
        return error.format_message(), f"closest: `{' '.join(['ltx2', *words, near])}`"
    return error.format_message(), hint


def _nearest(word: str, names: Sequence[str]) -> str:
    """The name that a word begins, or is closest to; empty: none."""
    begun = [name for name in names if word and name.startswith(word)]
    return (begun or get_close_matches(word, names, 1) or [""])[0]


def _expected(parameter: Any) -> str:
    """The values that an option takes."""
    kind, info = parameter.type_descriptor.annotation, parameter.type_descriptor.parameter_info
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    limits = {"at least": info.min, "at most": info.max}
    ranges = [f" of {word} {limit:.7g}" for word, limit in limits.items() if limit is not None]
    return {int: "an integer", float: "a number"}.get(kind, "a value of this option") + " and".join(ranges)


def print_json_error(sentence: str, hint: str, code: int) -> None:
    """Print the error as JSON on stdout where --json asked for one result and none was printed."""
    _, command = typed_command()
    result = command and issubclass(command.options, SessionOptions) and not issubclass(command.options, BatchOptions)
    if "--json" in sys.argv and command and (result or command.name == "gallery") and code not in FINISHED:
        with suppress(RunError):  # stdout takes no more
            print_out(json.dumps({"error": sentence, "hint": hint, "exit_code": code}, ensure_ascii=False))


def print_unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's hook for exceptions that no code expects. The traceback goes into the user's cache, else into the
    current folder."""
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
    sentence, hint = f"{kind.__name__}: {first_line}", f"internal error; traceback in {place}"
    if place == "--debug":
        hint = "internal error; --debug shows the traceback"
    print_error(sentence, hint)
    print_json_error(sentence, hint, RunError.exit_code)
    exit_now(RunError.exit_code)
