"""YAML as plain data, bounded in size: no interpolation, tags or anchors; written so that it reads back unchanged.
Types are those of YAML 1.1, but times, `1:30`, `0100`, `yes` and `off` are text."""

import json
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

import yaml

from ltx2_cli.errors import UsageError
from ltx2_cli.request.spelling import NAMES
from ltx2_cli.request.validation import STEERING, SURROGATE

Values = dict[str, Any]

PAGE = "a page of `key: value` lines is expected"
MAX_TEXT = 1_000_000  # characters, and bytes of a file; a record has about 5,000
MAX_NODES = 10_000  # keys and values; a record has about 100
MAX_DEPTH = 32
FLOAT, INT, TIME, BOOL = (f"tag:yaml.org,2002:{name}" for name in ("float", "int", "timestamp", "bool"))
NUMBERS = {
    INT: re.compile(r"[-+]?(0|[1-9]\d*)$"),
    FLOAT: re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"),
}


class _Loader(yaml.CSafeLoader):
    """Rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        values = super().construct_mapping(node, deep)
        seen = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"found duplicate key {name}", key.start_mark)
            seen.add(name)
        return values


class _Dumper(yaml.CSafeDumper):
    """Writes repeated values in full, without anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_multi_representer(StrEnum, lambda dumper, value: dumper.represent_str(value.value))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (FLOAT, INT, TIME, BOOL)]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
for _kind in (_Loader, _Dumper):
    for _tag, _pattern in NUMBERS.items():
        _kind.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))
_Loader.add_implicit_resolver(BOOL, re.compile("(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def parse(text: str) -> Any:
    """Parse a YAML document into plain data. Raises `yaml.YAMLError`."""
    if len(text) > MAX_TEXT:
        raise yaml.YAMLError(f"it has more than {MAX_TEXT:,} characters")
    if SURROGATE.search(text):
        raise yaml.YAMLError("it is not text in UTF-8")
    _check_events(text)
    try:
        return yaml.load(text, Loader=_Loader)
    except ValueError as error:  # `0x_`, or thousands of digits
        raise yaml.YAMLError("a number in it cannot be read") from error


def parse_page(text: str, source: str) -> Values:
    """Parse a YAML mapping. `source` names it in errors. Raises `UsageError` for anything else."""
    try:
        values = parse(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"{source}, line {line}: this is not plain YAML: {error.problem}", "mend that line") from None
    except yaml.reader.ReaderError:
        raise UsageError(f"{source} is not YAML text", PAGE) from None
    except yaml.YAMLError as error:
        raise UsageError(f"{source} is not YAML text: {error}", PAGE) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"{source} holds no keys", PAGE)
    return {key if isinstance(key, str) else json.dumps(key, default=str): value for key, value in values.items()}


def dump(values: Mapping[str, Any]) -> str:
    """Write values as YAML that `parse` reads back equal, in the same order."""
    return yaml.dump(values, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


def flow(value: object) -> str:
    """A value as YAML in a single line; a text of several lines keeps them."""
    style = {"default_flow_style": True, "sort_keys": False, "width": MAX_TEXT}
    text = str(yaml.dump([value], Dumper=_Dumper, allow_unicode=True, **style)).rstrip("\n")
    if STEERING.search(text.replace("\n", "")):
        text = str(yaml.dump([value], Dumper=_Dumper, **style)).rstrip("\n")
    return text[1:-1]


def key_lines(text: str) -> dict[str, int]:
    """The line, from 1, of each dotted key in a YAML mapping that `parse` reads."""
    return dict(_key_lines(yaml.compose(text, Loader=_Loader), ""))


def _key_lines(node: yaml.Node | None, section: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{section}{key.value}"
            name = NAMES.get(name, name)
            yield name, key.start_mark.line + 1
            yield from _key_lines(value, f"{name}.")


def _check_events(text: str) -> None:
    """Raise `yaml.YAMLError` for anchors, tags, and too many or too deep values, before any is built."""
    depth = nodes = 0
    for event in yaml.parse(text, Loader=_Loader):
        nodes += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            raise _refused("anchors and aliases are not read; write the values out", event)
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            raise _refused(f"the tag {event.tag} is not read; write a plain value", event)
        if nodes > MAX_NODES:
            raise _refused(f"it has more than {MAX_NODES:,} keys and values", event)
        if depth > MAX_DEPTH:
            raise _refused(f"its values are nested more than {MAX_DEPTH} deep", event)


def _refused(problem: str, event: yaml.Event) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
