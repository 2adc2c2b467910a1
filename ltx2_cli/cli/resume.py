"""`ltx2 resume`: an unfinished run, from where it was kept to its end."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ltx2_cli.cli.carry_out import carry_out
from ltx2_cli.cli.flaws import Strict, refuse_flaws
from ltx2_cli.cli.interrupts import postponed
from ltx2_cli.cli.options import FILES, KEEP_EVERY, Debug, KeepEvery, Sharding, option
from ltx2_cli.console import reporter
from ltx2_cli.spec import SpecError

RESUME_EXAMPLES = r"""[bold]Examples[/bold]

ltx2 generate --prompt "a fox yawns" -o out/fox.mp4 --resumable    # Ctrl-C, or the machine is taken away
ltx2 resume out/fox.run"""


def resume(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The .run file beside the clip it makes.", show_default=False)
    ],
    force: Annotated[bool, option(FILES, "Also with other versions or devices than before.", "--force")] = False,
    sharding: Sharding = None,
    strict: Strict = False,
    keep_every: KeepEvery = KEEP_EVERY,
    debug: Debug = False,
) -> None:
    """Go on with an unfinished run; it ends with the bytes of one that was never interrupted."""
    with postponed():
        from ltx2_cli.core.compiling import counted, keep_programs
        from ltx2_cli.core.journal import Journal, open_unfinished
        from ltx2_cli.core.progress import Ends
        from ltx2_cli.core.run import load
        from ltx2_cli.plan import first_stage, resolve
        from ltx2_cli.profile_layers import read_text
        from ltx2_cli.profiles import read_spec

    kept = open_unfinished(run.expanduser().absolute())
    report = reporter()
    if os.path.isdir(kept.folder) and not os.path.samefile(kept.folder, "."):
        report.note(f"in {kept.folder}, where it was begun")
        os.chdir(kept.folder)
    other = {"sharding": sharding} if sharding else {}
    spec = read_spec(other, config=read_text(kept.record, f"the record in {run}"))
    with counted() as count:
        keep_programs(spec.compile_cache)
        plan = resolve(spec, kept.errand.source)
        if kept.errand.ends is Ends.drafts:
            plan = first_stage(plan)
        if (changes := kept.changes(plan)) and not force:
            raise SpecError(
                f"{run} was kept elsewhere: {'; '.join(changes)}",
                "--force goes on; the clip may differ in its last bits",
            )
        journal = Journal(kept.path, plan, kept.errand, report, True, keep_every)
        flaws = carry_out(journal, load(plan), kept.progress(plan))
    report.note(str(count))
    refuse_flaws(flaws, strict)
