"""`ltx2 config show`: the values of a request."""

from dataclasses import dataclass
from typing import Annotated

from ltx2_cli.cli.options import FILES, RequestOptions, option
from ltx2_cli.cli.registry import SET_UP, command


@command("config show", SET_UP)
@dataclass(kw_only=True)
class ConfigShow(RequestOptions):
    """Print every value of a request and its origin, as YAML for --config.

    ltx2 config show --model demo --steps 30
    ltx2 config show --config out/fox.yaml --duration 8s
    """

    as_json: Annotated[bool, option(FILES, "Print JSON: value and origin of each key.", "--json")] = False

    def run(self) -> None:
        """Print the request."""
        from ltx2_cli.cli.values import layers, overrides, prompt_and_seeds
        from ltx2_cli.runs.config import show

        given = overrides(self, **prompt_and_seeds(self.prompt, self.seed, self.words))
        show(given, layers(self), self.as_json)
