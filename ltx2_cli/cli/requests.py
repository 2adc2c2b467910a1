"""From the options of a command to the request that it carries out, which may begin with saved latents."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ltx2_cli.cli.options import KEYS, ConfigOptions, Options
from ltx2_cli.errors import UsageError
from ltx2_cli.files import read_limited
from ltx2_cli.media.video_file import is_video
from ltx2_cli.request.layers import ConfigLayer, read_file, read_text
from ltx2_cli.request.profiles import AUTO, read_spec
from ltx2_cli.request.spec import RunSpec, Streams
from ltx2_cli.request.validation import validate
from ltx2_cli.request.yaml_text import MAX_TEXT, PAGE

if TYPE_CHECKING:
    from ltx2_cli.diffusion.latents import LatentsFile
    from ltx2_cli.plan.resolve import Plan

ABSENT: tuple[object, ...] = (None, [], ())  # what an option is that was not given; the last two if it is repeatable
SEEDS = re.compile(r"\d+(\.\.\d+)?,?")


def overrides(options: Options, **others: object) -> dict[str, object]:
    """The options that were given, by their keys in the `RunSpec`. `others` take their place."""
    values = {**vars(options), **others}
    given = {KEYS[name]: value for name, value in values.items() if name in KEYS and value not in ABSENT}
    if isinstance(blocks := given.get("stg_blocks"), str):
        try:
            given["stg_blocks"] = [int(block) for block in blocks.split(",")]
        except ValueError:
            raise UsageError(
                f"stg_blocks {blocks!r} is not a list of blocks", "for example: --stg-blocks 0,1; no STG: --stg-scale 0"
            ) from None
    return {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}


def prompt_and_seeds(prompt: str | None, seed: str | None, words: Sequence[str]) -> dict[str, str | None]:
    """The values of --prompt and --seed, with the words that follow no option: one text, which is the prompt, and the
    numbers behind `--seed N`. Raises `UsageError` for any other word."""
    numbers = [word for word in words if seed is not None and SEEDS.fullmatch(word)]
    texts = [word for word in words if word not in numbers]
    if len(texts) > 1 or (texts and prompt is not None):
        prompts = [prompt, *texts] if prompt is not None else texts
        joined = " ".join(word for text in prompts for word in text.split())
        shown = f"{joined[:60]}…" if len(joined) > 60 else joined
        raise UsageError(f"one prompt makes a clip, and {len(prompts)} texts are given", f'--prompt "{shown}"')
    return {"prompt": texts[0] if texts else prompt, "seed": seed and " ".join([seed, *numbers])}


def configured_spec(values: Mapping[str, object], options: ConfigOptions) -> RunSpec:
    """The request of these values, over those of --config and under those of --set."""
    return read_spec(values, config=config_page(options.config), dotlist=options.settings or ())


def config_page(path: Path | None) -> ConfigLayer | None:
    """The request in the file that --config names: a page of YAML, or the record of a clip, of latents or in the output
    of `ltx2 info --json` of one file. Raises `UsageError` for anything else."""
    if path is None:
        return None
    if not path.is_file():
        return read_file(path)
    if is_video(path) or looks_like_safetensors(path):
        from ltx2_cli.cli.inspect import ClipInfo, RecordInfo, inspect

        info = inspect(path)
        if not isinstance(info, ClipInfo | RecordInfo) or info.record is None:
            raise UsageError(f"{path} does not say what made it", PAGE)
        return ConfigLayer(f"the record in {path}: ", dict(info.record))
    try:
        match json.loads(read_limited(path, MAX_TEXT, PAGE)):
            case [{"record": dict(record)}]:
                return read_text(json.dumps(record), f"the record in {path}")
    except (ValueError, RecursionError):
        pass  # it is no JSON
    return read_file(path)


def looks_like_safetensors(path: Path) -> bool:
    """Whether it begins with the length of a JSON object, and the object."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def latents_request(
    file: "LatentsFile", given: Mapping[str, object], options: ConfigOptions, replaced: Mapping[str, object]
) -> RunSpec:
    """The request that made the latents, or for a file without a record one of their size; for the devices found here.

    `replaced` takes the place of what the record says, `given` of both.
    """
    settings = options.settings or []
    size = dict(zip(("num_frames", "height", "width"), file.size, strict=True))
    if sized := {setting.partition("=")[0] for setting in settings} & size.keys():
        raise UsageError(f"{file.path} has a size of its own", f"leave --set {min(sized)} out")
    files = dict.fromkeys(("initial_noise", "save_latents", "output", "compile_cache"))
    rate = {} if file.fps is None else {"fps": file.fps}
    values = {"sharding": AUTO, "vae_memory_gb": None, **size, **rate, **files, **replaced, **given}
    if record := file.metadata.get("record"):
        if options.config:
            raise UsageError(
                f"{file.path} has a record of its own", "leave --config out; flags and --set change values"
            )
        return read_spec(values, config=read_text(record, f"the record in {file.path}"), dotlist=settings)
    if "model" not in given and options.config is None:
        raise UsageError(f"{file.path} does not say which model made it", "--model NAME and, unless it is 24, --fps N")
    return configured_spec({"prompt": "a", "seed": 0, **values}, options)


def merged_request(files: "Sequence[LatentsFile]", specs: Sequence[RunSpec]) -> RunSpec:
    """One request for all files, with the seeds of all. Raises `UsageError` where more than seeds differs."""
    first = specs[0]
    for file, spec in zip(files, specs, strict=True):
        if others := sorted(key for key, value in vars(first).items() if key != "seed" and vars(spec)[key] != value):
            raise UsageError(
                f"{file.path} was not made like {files[0].path}: {', '.join(others)}", "go on from them one by one"
            )
    seeds = [spec.seed for spec in specs]
    if len(set(seeds)) < len(seeds):
        raise UsageError("several of these latents have one seed", "upsample them one by one")
    spec = replace(first, seed=tuple(seed for spec in specs for seed in spec.seed or ()))
    validate(spec)
    return spec


def check_source(file: "LatentsFile", plan: "Plan", fps: float) -> None:
    """Raise `UsageError` for latents of a clip of `fps` frames a second that the plan's model cannot begin with."""
    from ltx2_cli.diffusion.geometry import clip_geometry

    arch, (video, audio) = plan.arch, plan.latent_shapes
    clip = clip_geometry(*file.size, fps, arch.compression, arch.transformer.scales)
    size = clip.frames, clip.height, clip.width
    check_shapes(file, plan, Streams((*video[:2], *size), (*audio[:2], clip.audio_frames, *audio[3:])), fps)


def check_shapes(file: "LatentsFile", plan: "Plan", expected: Streams[tuple[int, ...]], fps: float) -> None:
    """Raise `UsageError` for latents of another model, or of other shapes than expected."""
    from ltx2_cli.weights.checkpoint import shape_text

    model_version = file.metadata.get("model_version")
    if model_version not in (None, plan.arch.model_version):
        raise UsageError(
            f"{file.path} was made by {model_version}, and {plan.spec.model} is of {plan.arch.model_version}",
            f"--model {model_version}",
        )
    for name, actual, shape in zip(Streams._fields, file.shapes, expected, strict=True):
        if actual != shape:
            raise UsageError(
                f"the {name} latents in {file.path} are {shape_text(actual)}; {plan.spec.model} at {fps:g} frames a"
                f" second has {shape_text(shape)}",
                "another --model, or the --fps that they were made with",
            )
