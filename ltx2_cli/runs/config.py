"""`ltx2 config`: the values of a request and their origins; checks of settings files; their JSON schema."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ltx2_cli.artifacts.files import read_limited
from ltx2_cli.console import print_json, print_out, reporter
from ltx2_cli.errors import UsageError
from ltx2_cli.request.check_file import file_problems, with_lines
from ltx2_cli.request.environment import variable_name
from ltx2_cli.request.layers import ASKED, ConfigLayer, spec_values
from ltx2_cli.request.profiles import (
    AUTO,
    ENVIRONMENT,
    FILE,
    PROFILE_KEYS,
    RECIPE_KEYS,
    RequestLayers,
    origins,
)
from ltx2_cli.request.schema import settings_schema
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.yaml import MAX_TEXT, PAGE, flow, key_lines
from ltx2_cli.runs.build_request import ANYTHING, Layers, collect_layers, config_page, sized_request

COLUMN = 44  # where origins begin, behind shorter values


def show(typed: Mapping[str, object], layers: Layers, as_json: bool) -> None:
    """Print the request of these values, by key."""
    anything = {} if collect_layers(typed, layers).values.get("prompt") else {"prompt": ANYTHING}
    report = reporter()
    spec, sizes = sized_request({**typed, **anything}, layers, report)
    asked = collect_layers({**typed, **sizes}, layers)
    report.flush()
    if anything:
        spec = replace(spec, prompt="")
    complete, sources = with_origins(asked, spec, layers.file)
    if as_json:
        values = spec_values(complete)
        facts = {key: {"value": plain(values[key]), "origin": sources[key]} for key in values}
        print_json(facts)
    else:
        single = {"seed": complete.seed[0]} if complete.seed and len(complete.seed) == 1 else {}
        nested = {key: value for key, value in {**asdict(complete), **single}.items() if key != ASKED}
        print_out("\n".join(_page(nested, sources)))


def with_origins(asked: RequestLayers, spec: RunSpec, config: Path | None) -> tuple[RunSpec, dict[str, str]]:
    """The request, completed as far as the names of its checkpoint allow, and the origin of each value by dotted
    key."""
    from ltx2_cli.plan.recipe import guess_model_version, guess_request

    version = guess_model_version(spec)
    known = version is not None or spec.recipe != AUTO
    complete = guess_request(spec) if known else spec
    sources = origins(asked, complete, version)
    if spec.recipe == AUTO:
        sources["recipe"] = "the checkpoint's name" if known else "the checkpoint, when it is open"
    for key, value in spec_values(complete).items():
        origin = sources.setdefault(key, "default")
        if origin == FILE:
            sources[key] = f"file {config}"
        elif origin == ENVIRONMENT:
            sources[key] = f"environment {variable_name(key)}"
        elif value is None and key.split(".")[0] in RECIPE_KEYS and not known:
            sources[key] = "the checkpoint's recipe"
        elif key.startswith("sharding.") and spec.sharding.profile == AUTO and key not in asked.keys:
            sources[key] = "the profile of the devices" if key != PROFILE_KEYS["sharding"] else origin
    return complete, sources


def _page(
    values: Mapping[str, Any], sources: Mapping[str, str], section: str = "", above: str = "default"
) -> Iterator[str]:
    """Lines of YAML, each value with its origin, or that of its section, `above`."""
    indent = "  " * section.count(".")
    for name, value in values.items():
        key = f"{section}{name}"
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            yield from _page(value, sources, f"{key}.", sources.get(key, above))
            continue
        yield f"{indent}{name}: {flow(value)}".ljust(COLUMN) + f"  # {sources.get(key, above)}"


def plain(value: Any) -> Any:
    """A value of a request as YAML and JSON have it."""
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):  # an item of a list, without its defaults
        return {field.name: given for field in fields(value) if (given := vars(value)[field.name]) != field.default}
    return value


def validate_files(files: Iterable[Path]) -> None:
    """Print every mistake of the files. Raises `UsageError` afterwards if there is one."""
    mistakes = 0
    for path in files:
        try:
            values, problems = file_problems(config_page(path) or ConfigLayer("", {}))
            sentences, valid = with_lines(str(path), problems, _lines(path)), f"{path}: {len(values)} values, all valid"
        except UsageError as error:
            sentences, valid = [f"{error}; {error.hint}"], ""
        print_out("\n".join(sentence.replace("\n", "\\n") for sentence in sentences) or valid)
        mistakes += len(sentences)
    if mistakes:
        raise UsageError(f"mistakes: {mistakes}", "`ltx2 config show` lists all keys")


def _lines(path: Path) -> dict[str, int]:
    """The line of each key in a YAML file; of a record within another file, none."""
    try:
        return key_lines(read_limited(path, MAX_TEXT, PAGE).decode("utf-8"))
    except (UsageError, ValueError, yaml.YAMLError):
        return {}


def schema() -> None:
    """Print the schema."""
    print_out(json.dumps(settings_schema(), indent=2, ensure_ascii=False))
