"""`ltx2 config schema`: the JSON schema of settings files."""

from dataclasses import dataclass

from ltx2_cli.cli.options import Options
from ltx2_cli.cli.registry import SET_UP, command


@command("config schema", SET_UP)
@dataclass(kw_only=True)
class ConfigSchema(Options):
    """Print the JSON schema of settings files, for editors that complete and check YAML.

    ltx2 config schema > ltx2.schema.json
    """

    def run(self) -> None:
        """Print the schema."""
        from ltx2_cli.runs.config import schema

        schema()
