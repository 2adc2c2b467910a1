"""Requests that do not fit into the devices' memory: refused, with the command to type instead."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from typer.main import get_group

from ltx2_cli.spec import SpecError

if TYPE_CHECKING:
    from ltx2_cli.forecast.requests import Alternative, Request
    from ltx2_cli.plan import Plan

# What a command cannot change, by dotted key: what saved latents decide, a clip's record, an unfinished run.
OF_LATENTS = frozenset({"height", "width", "num_frames", "num_videos", "model", "recipe"}).__contains__
OF_RECORD = frozenset({"num_videos", "model"}).__contains__
OF_RUN = "sharding".__ne__
SETTING = "--set"


def check_published(request: "Request") -> None:
    """Raise `FitError` for a published model that is not on this machine and does not fit its devices.

    What is not known before it is downloaded is let through.
    """
    from ltx2_cli.forecast.fit import check_fit
    from ltx2_cli.weights.hub import here
    from ltx2_cli.weights.published import FOLDER_FILES

    with suppress(SpecError):
        if here(request.spec.checkpoint, FOLDER_FILES) is None:
            check_fit(request, request.plan(), command_line)


def fitting_plan(request: "Request") -> "Plan":
    """The plan of a request, whose files are downloaded if they are not here. Raises `FitError` where it does not fit:
    of a published model before anything is downloaded."""
    from ltx2_cli.forecast.fit import check_fit

    check_published(request)
    plan = request.resolved()
    check_fit(request, plan, command_line)
    return plan


def command_line(alternative: "Alternative") -> str:
    """The command line that was typed, with what an alternative asks otherwise, ready to be copied."""
    from ltx2_cli.cli import app
    from ltx2_cli.device_memory import fraction_variable
    from ltx2_cli.forecast.remedies import FRACTION

    verb, *words = sys.argv[1:]
    options = {parameter.name for parameter in get_group(app).commands[verb].params}
    if alternative.anew:
        words = ["--prompt", alternative.values["prompt"]]
    for key, value in alternative.options.items():
        flag = f"--{key.replace('_', '-')}" if key in options else None
        words = [*_without(words, flag, key), *([flag, value] if flag else [SETTING, f"{key}={value}"])]
    variable = [f"{fraction_variable()}={FRACTION}"] if alternative.most_memory else []
    return " ".join([*variable, shlex.join(["ltx2", verb, *words])])


def _without(words: Sequence[str], flag: str | None, key: str) -> Iterator[str]:
    """A command's words without those that give `key` a value."""
    rest = iter(words)
    for word in rest:
        option, joined, value = word.partition("=")
        if option == SETTING:
            setting = value if joined else next(rest, "")
            if setting.partition("=")[0] != key:
                yield from (SETTING, setting)
        elif flag is None or option != flag:
            yield word
        elif not joined:
            next(rest, None)
