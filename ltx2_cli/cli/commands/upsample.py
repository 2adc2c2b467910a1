"""`ltx2 upsample`: a second stage for saved latents."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.cli.options import (
    CONTENT,
    FILES,
    STEPS,
    Count,
    KeepOptions,
    LatentsOptions,
    LoraOption,
    OutputFile,
    RecipeOption,
    SaveLatents,
    Text,
    Upsampler,
    argument,
    option,
)
from ltx2_cli.cli.registry import CONTINUE, command
from ltx2_cli.runs.session import Session, synchronized


@command("upsample", CONTINUE)
@dataclass(kw_only=True)
class UpsampleCommand(LatentsOptions, KeepOptions):
    """Upsample saved latents and refine them at the new size. Prints the path of the video or latents.

    ltx2 generate --recipe two_stage --prompt "a fox" --draft --save-latents fox.safetensors
    ltx2 upsample fox.safetensors -o fox.mp4
    ltx2 upsample drafts-s3.safetensors drafts-s7.safetensors
    ltx2 upsample fox.safetensors --no-refine --latents-only --save-latents large.safetensors
    ltx2 upsample fox.safetensors --recipe dfr_temporal
    ltx2 upsample fox.safetensors --recipe dfr_spatial
    """

    latents: Annotated[list[Path], argument("LATENTS", "Safetensors files of --save-latents.")]
    prompt: Annotated[Text, option(CONTENT, "Text prompt; default: as the file says.")] = None
    no_refine: Annotated[bool, option(STEPS, "Upsample without denoising.")] = False
    temporal_upsample: Annotated[
        Literal["fps", "duration"] | None,
        option(STEPS, "Quantity that a temporal upsampler doubles; duration stretches the audio."),
    ] = None
    seed: Annotated[Count, option(STEPS, "Seed of the noise; default: as the file says.")] = None
    recipe: RecipeOption = None
    upsampler: Upsampler = None
    lora: LoraOption = None
    output: OutputFile = None
    save_latents: SaveLatents = None
    latents_only: Annotated[bool, option(FILES, "Write no video.")] = False

    def run(self, session: Session) -> None:
        """Make the clips, or only their latents."""
        from ltx2_cli.cli.values import layers, overrides, run_settings
        from ltx2_cli.runs.upsample import upsample_clips

        with synchronized(session.hosts):
            given, above, settings = overrides(self), layers(self), run_settings(self)
        product = Product.latents if self.latents_only else Product.clips
        upsample_clips(session, self.latents, given, above, settings, product=product, refine=not self.no_refine)
