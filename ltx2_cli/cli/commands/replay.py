"""`ltx2 replay`: make a clip again by its record."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ltx2_cli.cli.options import (
    FILES,
    MODEL,
    STEPS,
    ClipOptions,
    Count,
    File,
    InitNoise,
    OutputFile,
    SaveLatents,
    SessionOptions,
    Settings,
    Text,
    argument,
    option,
)
from ltx2_cli.cli.registry import CONTINUE, command
from ltx2_cli.runs.session import Session


@command("replay", CONTINUE)
@dataclass(kw_only=True)
class Replay(ClipOptions, SessionOptions):
    """Make a clip again by its record. Prints its path; with --verify, whether it is identical.

    ltx2 replay out/fox.mp4
    ltx2 replay --verify out/fox.mp4
    ltx2 replay out/fox.mp4 --seed 8 --steps 20 -o out/fox8.mp4
    """

    clip: Annotated[Path, argument("FILE", "An mp4 or WAV, its record (.yaml) or latents.")]
    seed: Annotated[Count, option(STEPS, "Seed, 0 to 4294967295; default: as the record says.")] = None
    sharding: Annotated[
        Text,
        option(
            MODEL, "Sharding profile: NAME or FILE; default: as recorded, or by other devices.", profiles="sharding"
        ),
    ] = None
    any_weights: Annotated[bool, option(MODEL, "Accept weights that have changed since.")] = False
    verify: Annotated[
        bool, option(FILES, "Compare with FILE: exit code 1 if it differs. Without -o no file is kept.")
    ] = False
    output: OutputFile = None
    init_noise: InitNoise = None
    latents: Annotated[File, option(FILES, "Present place of the latents that `ltx2 upsample` began with.")] = None
    save_latents: SaveLatents = None
    settings: Settings = None

    def run(self, session: Session) -> None:
        """Make the clip, or compare it."""
        from ltx2_cli.cli.values import overrides
        from ltx2_cli.runs.replay import replay

        given, settings = overrides(self), self.settings or []
        replay(
            session,
            self.clip,
            given,
            settings,
            latents=self.latents,
            any_weights=self.any_weights,
            verify=self.verify,
        )
