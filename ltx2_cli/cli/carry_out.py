"""What the verbs that make clips share: the files as they are finished, what is wrong with them, and how to go on."""

from typing import TYPE_CHECKING

from ltx2_cli.cli.flaws import noted
from ltx2_cli.console import print_out
from ltx2_cli.interrupts import stopping
from ltx2_cli.spec import AbortedError, NotFiniteError, RunError

if TYPE_CHECKING:
    from ltx2_cli.core.components import Components
    from ltx2_cli.core.journal import Journal
    from ltx2_cli.core.progress import Progress


def carry_out(journal: "Journal", components: "Components", start: "Progress | None" = None) -> list[str]:
    """Carry out the journal's plan, from `start` where it is not the beginning, and print the path of each file that
    is finished; the flaws found. Raises `StoppedError` or `AbortedError` where the run was interrupted and can be
    gone on with."""
    from ltx2_cli.core.run import BEGINNING, write

    flaws, on, finished = list[str](), f"`ltx2 resume {journal.path}` goes on", 0
    try:
        with stopping(journal.stop):
            for path, findings in write(
                journal.plan, components, journal.report, journal.errand.ends, start or BEGINNING, journal
            ):
                print_out(str(path))
                finished += 1
                flaws += noted(path, findings, journal.report)
    except KeyboardInterrupt:
        if journal.kept:
            raise AbortedError("interrupted", on) from None
        if finished:
            raise AbortedError("interrupted", f"{finished} of {len(journal.plan.spec.seeds)} are finished") from None
        raise
    except NotFiniteError:
        raise  # it would come again
    except RunError as error:
        if journal.kept:
            raise RunError(str(error), f"{error.hint}; then {on}") from error
        raise
    journal.end()
    return flaws
