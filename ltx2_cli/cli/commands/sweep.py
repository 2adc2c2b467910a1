"""`ltx2 sweep`: one prompt with varied settings."""

from dataclasses import dataclass
from typing import Annotated

from ltx2_cli.cli.options import FILES, STEPS, BatchOptions, File, Texts, argument, option
from ltx2_cli.cli.registry import MAKE, command
from ltx2_cli.runs.session import Session


@command("sweep", MAKE)
@dataclass(kw_only=True)
class Sweep(BatchOptions):
    """Make a clip for each combination of settings, and a contact sheet. Rerun the same command to resume; finished
    clips are skipped.

    ltx2 sweep "a fox yawns at dawn" --vary guidance_scale=2,3,4 --vary steps=10,20 --seed 7
    ltx2 sweep "waves at night" --seed 0..7 --sheet waves.png
    ltx2 sweep "a choir" --vary audio_guidance_scale=3,7 --vary resolution=512p,720p
    """

    words: Annotated[Texts, argument("PROMPT", "Text prompt, as --prompt; -: from stdin.")] = None
    vary: Annotated[Texts, option(STEPS, "Values of an option or key; repeatable.", metavar="KEY=VALUE,VALUE...")] = (
        None
    )
    sheet: Annotated[File, option(FILES, "Contact sheet (PNG); default: named after the prompt.")] = None

    def run(self, session: Session) -> None:
        """Make the clips and the sheet, or list the jobs."""
        from ltx2_cli.cli.values import batch_settings, overrides, prompt_and_seeds
        from ltx2_cli.runs.sweep import sweep

        given = overrides(self, **prompt_and_seeds(self.prompt, self.seed, self.words), output=None)
        sweep(session, batch_settings(self, given), self.vary or (), self.sheet)
