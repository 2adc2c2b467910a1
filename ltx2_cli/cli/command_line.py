"""The command to type for a request that fits."""

import json
import re
import shlex
import sys
from typing import TYPE_CHECKING

from ltx2_cli.cli.names import ALIASES
from ltx2_cli.cli.registry import COMMANDS, typed_command
from ltx2_cli.parallel.devices import fraction_variable
from ltx2_cli.request.size import SIZE_SHORTHANDS

if TYPE_CHECKING:  # importing jax takes long
    from ltx2_cli.estimate.alternatives import Alternative

SETTING = "--set"


def command_line(alternative: "Alternative") -> str:
    """The typed command line with the values of an alternative, ready to be copied."""
    verbs, command = typed_command()
    assert command  # which is running
    words = sys.argv[1 + len(verbs) :]
    if verbs == ["batch"]:  # whose lines have values of their own
        return in_json(alternative, "line")
    variable = _variables(alternative)
    if alternative.standalone and verbs != ["sweep"]:
        words = [] if verbs == ["serve"] else ["--prompt", alternative.values["prompt"]]
        if command.requires_words:  # a clip or latents, of which it knows nothing
            verbs, command = ["generate"], COMMANDS["generate"]
    options = command.parameters.keys()
    typed = "".join(f"\0{word}" for word in words)  # no word has a NUL in it
    for key, value in alternative.options.items():
        flag = f"--{key.replace('_', '-')}"
        wishes = [f"--{wish}" for wish, keys in SIZE_SHORTHANDS.items() if key in keys]
        flags = "|".join(map(re.escape, [flag, *wishes, *ALIASES.get(flag, ())]))
        given_before = rf"\0({SETTING}[=\0]{re.escape(key)}=|({flags})[=\0])[^\0]*"
        added = f"\0{flag}\0{value}" if key in options else f"\0{SETTING}\0{key}={value}"
        typed = re.sub(given_before, "", typed) + added
    return " ".join([*variable, shlex.join(["ltx2", *verbs, *typed.split("\0")[1:]])])


def in_json(alternative: "Alternative", place: str) -> str:
    """The values of an alternative as JSON in a place: a line, or a request."""
    values = ", ".join(f'"{key}": {_in_json(value)}' for key, value in alternative.options.items())
    return " and ".join([*_variables(alternative), *([f"{values} in the {place}"] if values else [])])


def _variables(alternative: "Alternative") -> list[str]:
    from ltx2_cli.estimate.alternatives import FRACTION

    return [f"{fraction_variable()}={FRACTION}"] if alternative.most_memory else []


def _in_json(value: str) -> str:
    """A value as it is typed, in JSON: a text has quotes."""
    try:
        json.loads(value)
    except ValueError:
        return json.dumps(value)
    return value
