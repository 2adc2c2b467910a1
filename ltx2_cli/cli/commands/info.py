"""`ltx2 info`: describe files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ltx2_cli.cli.options import Json, Options, argument
from ltx2_cli.cli.registry import INSPECT, command


@command("info", INSPECT)
@dataclass(kw_only=True)
class Info(Options):
    """Describe latents, videos, records, checkpoints, LoRAs and upsamplers. Reads only the headers of weights.

    ltx2 info out/fox.mp4 out/fox.safetensors
    ltx2 info --json out/fox.mp4
    ltx2 info ~/LTX-2 ltx-2.3-22b-dev.safetensors
    """

    files: Annotated[list[Path], argument("FILE", "Files or folders.")]
    as_json: Json = False

    def run(self) -> None:
        """Print a page, or an item of a JSON list, for each file."""
        from ltx2_cli.runs.info import info

        info(self.files, self.as_json)
