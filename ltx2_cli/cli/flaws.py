"""What is said of a written clip that has flaws, and where it is an error."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from ltx2_cli.cli.options import FILES, option
from ltx2_cli.core.report import Report
from ltx2_cli.spec import FlawError

Strict = Annotated[
    bool, option(FILES, "Exit code 4 if what is written is black, frozen, silent, clipped, …", "--strict")
]


def noted(path: Path, findings: Sequence[str], report: Report) -> list[str]:
    """Say what is wrong with the clip in `path`; the sentences that were said."""
    flaws = [f"{path}: {finding}" for finding in findings]
    for flaw in flaws:
        report.note(flaw)
    return flaws


def refuse_flaws(flaws: Sequence[str], strict: bool) -> None:
    """Raise `FlawError` for flaws, where that is wanted."""
    if flaws and strict:
        raise FlawError(". ".join(flaws), "all files are written; without --strict this is no error")
