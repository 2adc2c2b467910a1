"""Values of a request in environment variables."""

from collections.abc import Mapping

import yaml

from ltx2_cli.errors import UsageError
from ltx2_cli.request.layers import ConfigLayer, Values, flatten, parse, type_of
from ltx2_cli.request.spelling import NAMES

PREFIX = "LTX2_"  # begins the variables


def read_environment(variables: Mapping[str, str]) -> Values:
    """The values of the variables `LTX2_KEY`, with `__` for the dots of the key: text as it is, anything else YAML.
    Raises `UsageError` as `flatten` does, also for a variable of no key."""
    values: Values = {}
    for variable in sorted(name for name in variables if name.startswith(PREFIX)):
        name, text = variable.removeprefix(PREFIX).lower().replace("__", "."), variables[variable]
        key = NAMES.get(name, name)
        try:
            value = text if type_of(key) in (str, str | None) else parse(text)
        except yaml.YAMLError:
            raise UsageError(f"{variable}: the value is not YAML", "quote text that has brackets or colons") from None
        values |= flatten(ConfigLayer(f"{variable}: ", {key: value}))
    return values


def variable_name(key: str) -> str:
    """The environment variable of a dotted key."""
    return PREFIX + key.replace(".", "__").upper()
