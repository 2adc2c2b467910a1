"""`ltx2 retake`: regenerate part of a clip."""

from dataclasses import dataclass
from typing import Annotated

from ltx2_cli.cli.options import CONTENT, SIZE, STEPS, Count, EditOptions, Text, option
from ltx2_cli.cli.registry import CONTINUE, command
from ltx2_cli.runs.session import Session


@command("retake", CONTINUE)
@dataclass(kw_only=True)
class Retake(EditOptions):
    """Regenerate part of a clip: video, audio or both. Prints the path of the new clip.

    ltx2 retake fox.mp4 --from 2s --to 3.5s
    ltx2 retake fox.mp4 --from 2s --to 3.5s --prompt "a fox yawns, thunder" --audio
    ltx2 retake fox.mp4 --prompt "a fox yawns, a brook" --audio
    ltx2 retake fox.mp4 --prompt "an oil painting of a fox" --noise-level 0.9
    ltx2 retake street.mov --from 0s --to 1s --model ltx2.3 --prompt "a tram comes round the corner" --seed 0..3
    """

    start: Annotated[
        Text, option(CONTENT, "Start of the new part; default: the clip's.", "--from", metavar="SECONDS")
    ] = None
    stop: Annotated[Text, option(CONTENT, "End of the new part; default: the clip's.", "--to", metavar="SECONDS")] = (
        None
    )
    video_only: Annotated[bool, option(CONTENT, "Regenerate the video alone.", "--video")] = False
    audio_only: Annotated[bool, option(CONTENT, "Regenerate the audio alone.", "--audio")] = False
    both: Annotated[bool, option(CONTENT, "Regenerate both, as by default.")] = False
    height: Annotated[Count, option(SIZE, "Pixels of a clip that is all new; default: the clip's.")] = None
    width: Annotated[Count, option(SIZE, "Pixels of a clip that is all new; default: the clip's.")] = None
    noise_level: Annotated[
        float,
        option(
            STEPS,
            "Noise level at which the new part begins: below 1 it keeps some of the clip.",
            metavar="X",
        ),
    ] = 1.0
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
        retake(session, edit, run_settings(self), (self.start, self.stop), streams, self.num_frames, self.noise_level)
