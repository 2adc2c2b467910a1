"""What a verb says on stderr: that it begins, and at its end what it wrote, how long it took, what memory it needed."""

import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import typer

from ltx2_cli.console import reporter
from ltx2_cli.core.report import Report, Silent
from ltx2_cli.spec import SpecError

if TYPE_CHECKING:
    from ltx2_cli.core.compiling import Count

BEGAN = monotonic()  # when the program was started
MOST = 4  # files that are named; of more the number is said


def report_for(context: typer.Context, first: bool) -> Report:
    """The report of the `first` host, as --verbose and --quiet ask; the others say nothing."""
    verbose, quiet = context.params["verbose"], context.params["quiet"]
    if verbose and quiet:
        raise SpecError("--verbose and --quiet contradict each other", "leave one of them out")
    return reporter(verbose) if first and not quiet else Silent()


def say_end(report: Report, written: Sequence[Path], count: "Count") -> None:
    """The last line of a command that is done."""
    files = ", ".join(map(str, written)) if len(written) <= MOST else f"{len(written)} files"
    report.note(f"{f'wrote {files}' if written else 'done'} in {monotonic() - BEGAN:.1f} s; {_memory()}; {count}")


def _memory() -> str:
    """The most memory that this process took, and of a device where that says it."""
    import resource

    import jax

    from ltx2_cli.device_memory import peak_memory

    unit = 1 if sys.platform == "darwin" else 1024
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    device = peak_memory(jax.local_devices())
    return f"at most {host / 1e9:.1f} GB of memory" + (f", {device / 1e9:.1f} GB of a device" if device else "")
