"""`ltx2 models`: the published models."""

from dataclasses import dataclass

from ltx2_cli.cli.options import Json, Options
from ltx2_cli.cli.registry import SET_UP, command


@command("models", SET_UP)
@dataclass(kw_only=True)
class Models(Options):
    """List published models, their sizes, and the files in the local cache. Uses no network.

    ltx2 models
    """

    as_json: Json = False

    def run(self) -> None:
        """Print the catalogue."""
        from ltx2_cli.runs.models import models

        models(self.as_json)
