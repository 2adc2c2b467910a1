"""`ltx2 config validate`: mistakes in settings files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ltx2_cli.cli.options import Options, argument
from ltx2_cli.cli.registry import SET_UP, command


@command("config validate", SET_UP)
@dataclass(kw_only=True)
class ConfigValidate(Options):
    """Check settings files or records. Prints every mistake with its line; exit code 2 if there is one.

    ltx2 config validate fox.yaml
    """

    files: Annotated[list[Path], argument("FILE", "Files for --config.")]

    def run(self) -> None:
        """Print the mistakes."""
        from ltx2_cli.runs.config import validate_files

        validate_files(self.files)
