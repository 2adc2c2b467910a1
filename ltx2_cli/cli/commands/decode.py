"""`ltx2 decode`: saved latents to video, frames or audio."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ltx2_cli.cli.options import FILES, LatentsOptions, Texts, argument, option
from ltx2_cli.cli.registry import CONTINUE, command
from ltx2_cli.runs.session import Session, synchronized


@command("decode", CONTINUE)
@dataclass(kw_only=True)
class Decode(LatentsOptions):
    """Decode saved latents to video, frames or audio without denoising. Prints the paths.

    ltx2 decode out/fox.safetensors
    ltx2 decode out/fox.safetensors -o fox.mp4 -o fox.wav -o frames/ -o fox.png
    ltx2 decode out/fox.safetensors -o fox.mov -o plate/%05d.exr --dtype float32
    ltx2 decode out/fox.safetensors --hdr -o fox.mp4 -o plate/%05d.exr --dtype float32
    ltx2 decode latents.safetensors --model ltx2.3 --fps 25 -o clip.mp4
    """

    latents: Annotated[Path, argument("LATENTS", "Safetensors file of --save-latents.")]
    files: Annotated[
        Texts,
        option(
            FILES, "FILE.mp4, .mov, .mkv, .wav, .png (some frames), FOLDER/ (all) or FOLDER/%05d.exr.", "--output", "-o"
        ),
    ] = None
    silent: Annotated[bool, option(FILES, "Write videos without audio.")] = False
    hdr: Annotated[bool, option(FILES, "Latents of an HDR LoRA: videos in HLG, EXR files brighter than white.")] = False

    def run(self, session: Session) -> None:
        """Write the files."""
        from ltx2_cli.cli.values import layers, overrides
        from ltx2_cli.runs.decode import decode_clips

        with synchronized(session.hosts):
            given, above = overrides(self), layers(self)
        names = self.files or ()
        decode_clips(session, self.latents, given, above, names=names, silent=self.silent, hdr=self.hdr)
