"""`ltx2 gallery`: an HTML page of clips."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ltx2_cli.cli.options import FILES, Options, OutputFile, argument, option
from ltx2_cli.cli.registry import INSPECT, command


@command("gallery", INSPECT)
@dataclass(kw_only=True)
class Gallery(Options):
    """Write an HTML page that plays the clips of a folder, filters and compares them. Prints its path.

    ltx2 gallery out
    ltx2 gallery out -o clips.html --embed
    """

    folder: Annotated[Path, argument("FOLDER", "Folder with mp4 videos or WAVs of ltx2, searched recursively.")]
    output: OutputFile = None
    embed: Annotated[bool, option(FILES, "Embed the clips: one file to pass on.")] = False
    force: Annotated[bool, option(FILES, "Overwrite a file that is no gallery.")] = False
    as_json: Annotated[
        bool, option(FILES, "Print JSON: the page, its clips and unreadable ones; or the error.", "--json")
    ] = False

    def run(self) -> None:
        """Write the page."""
        from ltx2_cli.runs.gallery import gallery

        gallery(self.folder, self.output, self.embed, self.force, self.as_json)
