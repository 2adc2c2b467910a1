"""`ltx2 retake`: regenerate part of a clip."""

from dataclasses import dataclass
from typing import Annotated

from ltx2_cli.cli.options import CONTENT, SIZE, Count, EditOptions, option
from ltx2_cli.cli.registry import CONTINUE, command
from ltx2_cli.runs.session import Session


@command("retake", CONTINUE)
@dataclass(kw_only=True)
class Retake(EditOptions):
    """Regenerate part of a clip: video, audio or both. Prints the path of the new clip.

    ltx2 retake fox.mp4 --from 2s --to 3.5s
    ltx2 retake fox.mp4 --from 2s --to 3.5s --prompt "a fox yawns, thunder" --audio
    ltx2 retake street.mov --from 0s --to 1s --model ltx2.3 --prompt "a tram comes round the corner" --seed 0..3
    """

    start: Annotated[str, option(CONTENT, "Start of the new part.", "--from", metavar="SECONDS")]
    stop: Annotated[str, option(CONTENT, "End of the new part.", "--to", metavar="SECONDS")]
    video_only: Annotated[bool, option(CONTENT, "Regenerate the video alone.", "--video")] = False
    audio_only: Annotated[bool, option(CONTENT, "Regenerate the audio alone.", "--audio")] = False
    both: Annotated[bool, option(CONTENT, "Regenerate both, as by default.")] = False
    num_frames: Annotated[
        Count, option(SIZE, "Frames of context around the new part: a multiple of 8, plus 1; default: at most 20 s.")
    ] = None

    def run(self, session: Session) -> None:
        """Make the clips, or print the plan."""
        from ltx2_cli.cli.values import overrides, run_settings
        from ltx2_cli.runs.edit import EditRequest, retake

        alone = "video" if self.video_only else "audio"
        streams = "both" if self.both or self.video_only == self.audio_only else alone
        edit = EditRequest(self.clip, overrides(self), self.settings or ())
        retake(session, edit, run_settings(self), (self.start, self.stop), streams, self.num_frames)
