"""Build a request from its layers: values, the environment, a file or record, settings, sizes in other words."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ltx2_cli.core.report import Report
from ltx2_cli.errors import UsageError
from ltx2_cli.media.probe import is_video, is_wav
from ltx2_cli.request.environment import foreign_variables, read_environment, variable_name
from ltx2_cli.request.layers import ConfigLayer, read_content, read_file, read_text
from ltx2_cli.request.profiles import FLAG, RequestLayers, merge_layers, validated_spec
from ltx2_cli.request.size import frames_of, size_of
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.spelling import option_name
from ltx2_cli.request.validation import validate
from ltx2_cli.request.yaml import MAX_TEXT, PAGE
from ltx2_cli.runs.inspect import inspect, looks_like_safetensors
from ltx2_cli.runs.job_lines import STDIN
from ltx2_cli.runs.trust import Trust, check_trust

PLACED_IN_TIME = ("segments", "conditions", "windows")  # keys whose values depend on the length
ANYTHING = "a"  # the prompt of a warm-up; every text encoder knows it


@dataclass(frozen=True)
class Layers:
    """Layers of a request besides its values: a page below them and the environment, settings (`dotted.key=value`)
    above; and its size and length in other words, by the names in `SIZE_SHORTHANDS`."""

    page: ConfigLayer | None = None
    file: Path | None = None  # that the page was read from
    settings: Sequence[str] = ()
    wishes: Mapping[str, str] = field(default_factory=dict)


def collect_layers(values: Mapping[str, object], layers: Layers, trust: Trust | None = None) -> RequestLayers:
    """The layers of the request of these values. `trust` says whether a file may name weights that its reader does not
    know; None: no check."""
    asked = merge_layers(values, layers.page, layers.settings, read_environment(os.environ))
    return check_trust(asked, layers.page, trust) if trust else asked


def build_request(values: Mapping[str, object], layers: Layers, trust: Trust | None = None) -> RunSpec:
    """The checked request of these values and layers."""
    return validated_spec(collect_layers(values, layers, trust))


def build_sized_request(
    values: Mapping[str, object], layers: Layers, report: Report, trust: Trust | None = None
) -> RunSpec:
    """As `build_request`, with sizes in other words; the report is told which environment variables are read."""
    note_environment(report, values, layers.settings)
    return sized_request(values, layers, report, trust)[0]


def note_environment(report: Report, values: Mapping[str, object], settings: Sequence[str]) -> None:
    """Report the environment variables that a request with these options and settings reads, and those with a similar
    name that it does not."""
    typed = merge_layers(values, None, settings).layers[FLAG]
    if variables := [variable_name(key) for key in read_environment(os.environ) if key not in typed]:
        report.defer(f"from the environment: {', '.join(variables)}")
    for sentence in foreign_variables(os.environ):
        report.defer(sentence)


def sized_request(
    values: Mapping[str, object], layers: Layers, report: Report, trust: Trust | None = None
) -> tuple[RunSpec, Mapping[str, Any]]:
    """The checked request of these values and layers, and by key its size and length that --resolution, --aspect and
    --duration ask for; the report is told these. Raises `UsageError` beside a value in pixels or frames."""
    resolution, aspect, duration = map(layers.wishes.get, ("resolution", "aspect", "duration"))
    asked = [text for text in (resolution, aspect, duration) if text is not None]
    placed = PLACED_IN_TIME if duration is not None else ()
    spec, wished = validated_spec(collect_layers(values, layers, trust), placed), dict[str, Any]()
    if not asked:
        return spec, wished
    from ltx2_cli.plan.sizes import legal_lengths

    legal = legal_lengths(spec)
    if aspect is not None or resolution is not None:
        wished |= size_of(spec.width, spec.height, aspect, resolution, legal)
    if duration is not None:
        wished["num_frames"] = frames_of(duration, spec.fps, legal)
    for key in wished.keys() & merge_layers(values, None, layers.settings).layers[FLAG].keys():
        wish = "--duration" if key == "num_frames" else "--aspect or --resolution"
        raise UsageError(f"--{key.replace('_', '-')} is not taken beside {wish}", f"leave out {wish}")
    spec = replace(spec, **wished, asked=tuple(sorted({*spec.asked, *wished})))
    validate(spec)
    length = f"{spec.num_frames} frames, {spec.num_frames / spec.fps:.2f} s"
    report.defer(f"asked: {', '.join(asked)}; got: {spec.width}x{spec.height}, {length}")
    return spec, wished


def check_no_length(values: Mapping[str, object], layers: Layers) -> None:
    """Raise `UsageError` for a number of frames beside --duration."""
    if "num_frames" in merge_layers(values, None, layers.settings).layers[FLAG]:
        raise UsageError(f"{option_name('num_frames')} is not taken beside --duration", "leave out --duration")


def config_page(path: Path | None) -> ConfigLayer | None:
    """The request in the file that --config names, which is opened once: a page of YAML, or the record of a clip, of
    latents or in the output of `ltx2 info --json` of one file. Raises `UsageError` for anything else."""
    if path is None:
        return None
    if str(path) == STDIN:
        raise UsageError("--config reads a file, not stdin", "write it into a file, or name keys: --set KEY=VALUE")
    if not path.is_file():
        return read_file(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT + 1)
        text = b"\0" not in content  # a clip or latents have one in their first bytes
        has_record = not text and (is_video(path) or is_wav(path) or looks_like_safetensors(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check the path") from error
    if has_record:
        if record := inspect(path).get("record"):
            return ConfigLayer(f"the record in {path}: ", record)
        raise UsageError(f"{path} does not say what made it", PAGE)
    if len(content) > MAX_TEXT:
        return read_file(path)  # which refuses it
    try:
        match json.loads(content):
            case [{"record": dict(record)}]:
                return read_text(json.dumps(record), f"the record in {path}")
    except (ValueError, RecursionError):
        pass  # it is no JSON
    return read_content(content, path)
