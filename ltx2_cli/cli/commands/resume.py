"""`ltx2 resume`: continue an unfinished run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ltx2_cli.cli.options import (
    FILES,
    MODEL,
    WEEK,
    CompileCache,
    OutputFile,
    Real,
    SaveLatents,
    SessionOptions,
    Text,
    argument,
    option,
)
from ltx2_cli.cli.registry import CONTINUE, command
from ltx2_cli.runs.session import Session


@command("resume", CONTINUE)
@dataclass(kw_only=True)
class Resume(SessionOptions):
    """Continue an unfinished run to the same bytes as an uninterrupted one.

    ltx2 generate --prompt "a fox yawns" -o out/fox.mp4 --save-run    # interrupted
    ltx2 resume out/fox.run
    """

    saved: Annotated[Path, argument("RUN", "The .run file next to the clip.")]
    output: OutputFile = None
    save_latents: SaveLatents = None
    allow_changes: Annotated[bool, option(FILES, "Accept other versions or devices than before.")] = False
    save_run_every: Annotated[
        Real,
        option(
            FILES, "Seconds between saves of the .run file; default: as before.", metavar="SECONDS", min=0, max=WEEK
        ),
    ] = None
    sharding: Annotated[
        Text, option(MODEL, "Sharding profile: NAME or FILE; default: as before.", profiles="sharding")
    ] = None
    compile_cache: CompileCache = None

    def run(self, session: Session) -> None:
        """Finish the run."""
        from ltx2_cli.runs.resume import resume

        places = {name: getattr(self, name) for name in ("output", "save_latents", "sharding", "compile_cache")}
        given = {name: str(value) for name, value in places.items() if value}
        resume(session, self.saved, given, self.allow_changes, self.save_run_every)
