"""`ltx2 extend`: continue a clip from its end."""

from dataclasses import dataclass
from typing import Annotated

from ltx2_cli.cli.options import SIZE, Count, EditOptions, option
from ltx2_cli.cli.registry import CONTINUE, command
from ltx2_cli.runs.session import Session


@command("extend", CONTINUE)
@dataclass(kw_only=True)
class Extend(EditOptions):
    """Continue a clip from its end. Prints the path of the whole clip. For more than one clip's length, extend twice.

    ltx2 extend fox.mp4 --seconds 4
    ltx2 extend fox.mp4 --seconds 15 --prompt "the fox trots off into the wood" -o long.mp4
    ltx2 extend rider.mov --seconds 4 --model ltx2.3 --prompt "and rides away into the dusk"
    """

    seconds: Annotated[str, option(SIZE, "Length to add.", metavar="SECONDS")]
    num_frames: Annotated[
        Count, option(SIZE, "Frames to make, with context: a multiple of 8, plus 1; default: as needed.")
    ] = None

    def run(self, session: Session) -> None:
        """Make the clips, or print the plan."""
        from ltx2_cli.cli.values import overrides, run_settings
        from ltx2_cli.runs.edit import EditRequest, extend

        edit = EditRequest(self.clip, overrides(self), self.settings or ())
        extend(session, edit, run_settings(self), self.seconds, self.num_frames)
