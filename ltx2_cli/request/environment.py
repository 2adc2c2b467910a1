"""Values of a request in environment variables."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

import yaml

from ltx2_cli.errors import UsageError
from ltx2_cli.request.layers import ConfigLayer, flatten, keys, type_of
from ltx2_cli.request.spelling import NAMES
from ltx2_cli.request.yaml import Values, parse

VARIABLE_PREFIX = "LTX2_"  # begins the variables
CLOSE = 0.8  # all variables begin alike


def read_environment(variables: Mapping[str, str]) -> Values:
    """Values of the variables `LTX2_KEY`, with `__` for the dots of the key: texts verbatim, other values as YAML.
    Variables of other programs are left out. Raises `UsageError` as `flatten`."""
    values: Values = {}
    for variable in sorted(name for name in variables if name.startswith(VARIABLE_PREFIX)):
        key, text = _key(variable), variables[variable]
        if type_of(key) is None:
            continue
        try:
            value = text if type_of(key) in (str, str | None) else parse(text)
        except yaml.YAMLError:
            raise UsageError(f"{variable}: the value is not YAML", "quote text that has brackets or colons") from None
        values |= flatten(ConfigLayer(f"{variable}: ", {key: value}))
    return values


def foreign_variables(variables: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each variable `LTX2_...` without a key, with the nearest variable that has one."""
    known = [variable_name(key) for key in (*keys(), *NAMES)]
    for variable in sorted(name for name in variables if name.startswith(VARIABLE_PREFIX)):
        if type_of(_key(variable)) is None:
            closest = get_close_matches(variable, known, 1, CLOSE)
            nearest = f"; closest: {closest[0]}" if closest else ""
            yield f"{variable} is not read: it is of no key of a request{nearest}"


def _key(variable: str) -> str:
    name = variable.removeprefix(VARIABLE_PREFIX).lower().replace("__", ".")
    return NAMES.get(name, name)


def variable_name(key: str) -> str:
    """The environment variable of a dotted key."""
    return VARIABLE_PREFIX + key.replace(".", "__").upper()
