"""Before a run: what is to be downloaded, whether it fits into the devices' memory, and the command to type instead."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING

from typer.main import get_group

from ltx2_cli.console import columns
from ltx2_cli.errors import UsageError
from ltx2_cli.files import Output
from ltx2_cli.outputs import RUN, check_distinct
from ltx2_cli.units import natural

if TYPE_CHECKING:
    from ltx2_cli.estimate.requests import Alternative, Request
    from ltx2_cli.plan.resolve import Plan
    from ltx2_cli.weights.hub import Download

# What a command cannot change, by dotted key: what saved latents decide, a clip's record, an unfinished run.
OF_LATENTS = frozenset({"height", "width", "num_frames", "num_videos", "model", "recipe"}).__contains__
OF_RECORD = frozenset({"num_videos", "model"}).__contains__
OF_RUN = "sharding".__ne__
SETTING = "--set"


def check_published(request: "Request") -> None:
    """Raise `DoesNotFitError` for a published model that is not on this machine and does not fit its devices.

    What is not known before it is downloaded is let through.
    """
    from ltx2_cli.estimate.fit import check_fit
    from ltx2_cli.weights.hub import local_path
    from ltx2_cli.weights.published import FOLDER_FILES

    with suppress(UsageError):
        if local_path(request.spec.checkpoint, FOLDER_FILES) is None:
            check_fit(request, request.plan(), command_line)


def fitting_plan(request: "Request") -> "Plan":
    """The plan of a request, whose files are downloaded if they are not here. Raises `DoesNotFitError` where it does
    not fit: of a published model before anything is downloaded."""
    from ltx2_cli.estimate.fit import check_fit

    check_published(request)
    plan = request.resolved()
    check_fit(request, plan, command_line)
    return plan


def dry_run_lines(request: "Request", random: bool, files: Sequence[Output]) -> Iterator[str]:
    """The lines of `--dry-run`: what would be downloaded, and once nothing is missing, what the run would do.

    `random`: another seed will be drawn. Raises `UsageError` and `DoesNotFitError` where the run would.
    """
    from ltx2_cli.cli.plan_text import request_rows
    from ltx2_cli.core.provenance import input_files
    from ltx2_cli.plan.resolve import missing_downloads
    from ltx2_cli.weights.hub import check_disk_space

    check_published(request)
    if downloads := missing_downloads(request.spec):
        yield from _sizes(downloads)
    check_disk_space(downloads)
    if not downloads:
        plan = fitting_plan(request)
        check_distinct(files, input_files(plan))
        seeds = ", ".join(map(str, plan.spec.seeds))
        rows = [("download", "nothing"), *request_rows(plan)]
        rows += [("seed", f"random, for example {seeds}" if random else seeds)]
        rows += [("write", str(path)) for path, _ in files if path.suffix != RUN]
        yield from columns([*rows, *(("warning", warning) for warning in plan.warnings)])


def download_lines(downloads: "Sequence[Download]") -> Iterator[str]:
    """A line for each repository of which something is to be downloaded."""
    from ltx2_cli.weights.hub import cache_folder

    for repository, files in groupby(downloads, lambda file: file.repository):
        size = natural(sum(file.size for file in files))
        yield f"downloading {size} of {repository} into {cache_folder()}"


def _sizes(downloads: "Sequence[Download]") -> Iterator[str]:
    """What is to be downloaded, by folder, and in all."""
    from ltx2_cli.weights.hub import cache_folder

    sizes: dict[str, int] = {}
    for file in downloads:
        folder = f"{file.repository}/{file.name.split('/')[0]}"
        sizes[folder] = sizes.get(folder, 0) + file.size
    yield f"to download into {cache_folder()}:"
    yield from (f"{natural(sizes[folder]):>9}  {folder}" for folder in sorted(sizes, key=lambda name: -sizes[name]))
    yield f"{natural(sum(sizes.values())):>9}  in all"


def command_line(alternative: "Alternative") -> str:
    """The command line that was typed, with what an alternative asks otherwise, ready to be copied."""
    from ltx2_cli.cli import app
    from ltx2_cli.devices import fraction_variable
    from ltx2_cli.estimate.suggestions import FRACTION

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
