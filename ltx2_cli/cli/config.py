"""`ltx2 config`: the values of a request and where they come from, as YAML, JSON or a command line; checks of settings
files; their JSON schema."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import typer
import yaml

from ltx2_cli.artifacts.files import read_limited
from ltx2_cli.cli import ltx2_command
from ltx2_cli.cli.commands import Locate, Schema, Show, Validate
from ltx2_cli.cli.generate import ANYTHING, asked_for, config_page, overrides, prompt_and_seeds, sized
from ltx2_cli.cli.options import RequestOptions
from ltx2_cli.console import columns, print_json, print_out, reporter
from ltx2_cli.errors import UsageError
from ltx2_cli.request.check_file import file_findings, with_lines
from ltx2_cli.request.environment import variable_name
from ltx2_cli.request.layers import ASKED, MAX_TEXT, PAGE, ConfigLayer, flow, key_lines, spec_values
from ltx2_cli.request.profiles import (
    AUTO,
    ENVIRONMENT,
    FILE,
    PROFILE_KEYS,
    RECIPE_KEYS,
    Asked,
    checked_spec,
    configs,
    origins,
    program_cache,
    read_asked,
    user_cache,
)
from ltx2_cli.request.schema import settings_schema
from ltx2_cli.request.size import most_frames
from ltx2_cli.request.spec import AudioSpec, ConditionSpec, RunSpec
from ltx2_cli.request.spelling import NAMES, option
from ltx2_cli.request.validation import STEERING

COLUMN = 44  # where origins begin, behind values that are not longer


def show(options: Show) -> None:
    """Print the request."""
    typed = overrides(options, **prompt_and_seeds(options))
    anything = {} if asked_for(typed, options).values.get("prompt") else {"prompt": ANYTHING}
    report = reporter()
    values = sized({**typed, **anything}, options, report)
    asked = asked_for({key: value for key, value in values.items() if key not in anything}, options)
    spec = checked_spec(asked_for(values, options))
    report.tell()
    if anything:
        spec = replace(spec, prompt="")
    if options.as_command:
        print_out(" ".join(map(_quoted, ["ltx2", "generate", *command_words(spec)])))
        return
    complete, sources = with_origins(asked, spec, options.config)
    if options.as_json:
        values = spec_values(complete)
        facts = {key: {"value": plain(values[key]), "origin": sources[key]} for key in values}
        print_json(facts)
    else:
        single = {"seed": complete.seed[0]} if complete.seed and len(complete.seed) == 1 else {}
        nested = {key: value for key, value in {**asdict(complete), **single}.items() if key != ASKED}
        print_out("\n".join(_page(nested, sources)))


def with_origins(asked: Asked, spec: RunSpec, config: Path | None) -> tuple[RunSpec, dict[str, str]]:
    """The request, completed as far as names tell of its checkpoint, and the origin of each value by dotted key."""
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
    """Lines of YAML, the origin of each value behind it: its own, or that of its section, `above`."""
    indent = "  " * section.count(".")
    for name, value in values.items():
        key = f"{section}{name}"
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            yield from _page(value, sources, f"{key}.", sources.get(key, above))
            continue
        yield f"{indent}{name}: {flow(value)}".ljust(COLUMN) + f"  # {sources.get(key, above)}"


def command_words(spec: RunSpec) -> list[str]:
    """What to type behind `ltx2 generate` for a request: the profiles that it names, and each value that they do not
    give, by its option where that can say it, else by `--set`. Files that the clip is given are named, as in a shell,
    without the hashes of a record."""
    values = spec_values(_without_hashes(spec))
    base = {PROFILE_KEYS[kind]: values[PROFILE_KEYS[kind]] for kind in PROFILE_KEYS}
    ground = spec_values(checked_spec(read_asked({"prompt": ANYTHING, **base})))
    names = {key: value for key, value in base.items() if _usual_names()[key] != value}
    different = {key: value for key, value in values.items() if ground.get(key, ...) != value and key != "prompt"}
    if {key for key in ground if key.startswith("sharding.")} - values.keys():  # an axis that the profile has
        different |= {key: value for key, value in values.items() if key.startswith("sharding.")}
    flags = _flags()
    words = _as_option("--prompt", values["prompt"]) if values["prompt"] else []
    for key, value in {**names, **different}.items():
        typed = _words(key, value, flags)
        words += typed if typed and _means(typed, key, value) else ["--set", f"{key}={flow(plain(value))}"]
    return words


def _quoted(word: str) -> str:
    """A word as a shell reads it; one that would steer a terminal as bash and zsh read escapes."""
    if not STEERING.search(word.replace("\n", "")):
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + STEERING.sub(lambda match: f"\\u{ord(match[0]):04x}", escaped) + "'"


def _without_hashes(spec: RunSpec) -> RunSpec:
    """The request for the files of these names, and of a video as many frames as without a word."""
    conditions = []
    for condition in spec.conditions:
        usual = condition.kind == "video" and condition.num_frames == most_frames(spec, condition)
        count = None if usual else condition.num_frames
        conditions.append(replace(condition, sha256=None, num_frames=count))
    audio = spec.audio and replace(spec.audio, sha256=None)
    return replace(spec, conditions=tuple(conditions), audio=audio)


def plain(value: Any) -> Any:
    """A value of a request as YAML and JSON have it."""
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):  # of a list; what is left out is as it is by default
        return {field.name: given for field in fields(value) if (given := vars(value)[field.name]) != field.default}
    return value


def _usual_names() -> dict[str, object]:
    """The names of the profiles where nobody asks for others."""
    values = spec_values(checked_spec(read_asked({"prompt": ANYTHING})))
    return {key: values[key] for key in PROFILE_KEYS.values()}


@cache
def _generate() -> Any:
    """The command `ltx2 generate`, of a class that typer does not export."""
    return ltx2_command().commands["generate"]


def _flags() -> dict[str, str]:
    """The option of `ltx2 generate` for each dotted key that has one."""
    parameters = [parameter for parameter in _generate().params if parameter.name in NAMES]
    options = {NAMES[parameter.name]: parameter.opts[0] for parameter in parameters}
    options[PROFILE_KEYS["sharding"]] = options.pop("sharding")
    return {key: option for key, option in options.items() if option.startswith("--")}


def _words(key: str, value: Any, flags: Mapping[str, str]) -> list[str]:
    """What to type for a value; nothing where no option says it."""
    if key == "conditions":
        return [word for condition in value for word in _condition_words(condition)]
    if key == "streams":
        return ["--no-video" if value == "audio" else "--no-audio"]
    return _typed(flags[key], value) if key in flags else []


def _typed(flag: str, value: object) -> list[str]:
    if flag == "--seed" and isinstance(value, tuple):
        return _as_option(flag, ",".join(_ranges(value)))
    if flag == "--stg-blocks" and isinstance(value, tuple):
        return _as_option(flag, ",".join(map(str, value)))
    if isinstance(value, AudioSpec):
        return _as_option(flag, value.path)
    items = value if isinstance(value, tuple) else [value]
    return [word for item in items for word in _as_option(flag, f"{item}".removesuffix(".0"))]


def _condition_words(condition: ConditionSpec) -> list[str]:
    """As the option of its kind says it."""
    strength = "" if condition.strength == 1 else f":{condition.strength}"
    follows = condition.kind in ("reference", "mask")
    place = "" if follows or not (condition.frame or strength) else f"@{condition.frame}"
    return _as_option(option(f"conditions/{condition.kind}"), f"{condition.path}{place}{strength}")


def _as_option(flag: str, text: str) -> list[str]:
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]


def _ranges(seeds: Sequence[int]) -> Iterator[str]:
    """Runs of seeds as `FIRST..LAST`."""
    for _, group in groupby(enumerate(seeds), lambda place: place[1] - place[0]):
        first, *others = (seed for _, seed in group)
        yield f"{first}..{others[-1]}" if others else str(first)


def _means(words: list[str], key: str, value: object) -> bool:
    """Whether these words ask `ltx2 generate` for this value alone."""
    try:
        options = RequestOptions(**_generate().make_context("generate", list(words)).params)
        read = read_asked(overrides(options, **prompt_and_seeds(options))).values
    except (UsageError, typer.TyperException):
        return False
    return {name: found for name, found in read.items() if found is not None} == {key: value}


def validate(options: Validate) -> None:
    """Print every mistake of the files. Raises `UsageError` afterwards if there is one."""
    mistakes = 0
    for path in options.files:
        try:
            values, problems = file_findings(config_page(path) or ConfigLayer("", {}))
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


def locate(options: Locate) -> None:
    """Print the places."""
    from huggingface_hub import constants

    places = {
        "settings": configs() / "default.yaml",
        "profiles": configs(),
        "cache": user_cache(),
        "compiled programs": program_cache(),
        "downloads": Path(constants.HF_HUB_CACHE),
    }
    if options.as_json:
        print_out(json.dumps({name: str(path) for name, path in places.items()}, indent=2))
    else:
        print_out("\n".join(columns([(name, str(path)) for name, path in places.items()])))


def schema(options: Schema) -> None:
    """Print the schema."""
    print_out(json.dumps(settings_schema(), indent=2, ensure_ascii=False))
