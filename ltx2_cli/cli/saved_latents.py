"""Requests that begin with saved latents: the record in the file, changed by what is asked now."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ltx2_cli.cli.inspect import config_page
from ltx2_cli.cli.options import ConfigOptions
from ltx2_cli.errors import UsageError
from ltx2_cli.request.spec import RunSpec, Streams
from ltx2_cli.request.validation import validate

if TYPE_CHECKING:
    from ltx2_cli.diffusion.latents import LatentsFile
    from ltx2_cli.plan.resolve import Plan


def latents_request(
    file: "LatentsFile",
    given: Mapping[str, object],
    page: ConfigOptions,
    replaced: Mapping[str, object],
) -> RunSpec:
    """The request that made the latents, or for a file without a record one of their size; for the devices found here.

    `replaced` takes the place of what the record says, `given` of both.
    """
    from ltx2_cli.diffusion.latents import SIZE
    from ltx2_cli.request.layers import read_text
    from ltx2_cli.request.profiles import AUTO, read_spec

    config, settings = page.config, page.settings or []
    if sized := {setting.partition("=")[0] for setting in settings} & set(SIZE):
        raise UsageError(f"{file.path} has a size of its own", f"leave --set {min(sized)} out")
    files = dict.fromkeys(("initial_noise", "save_latents", "output", "compile_cache"))
    rate = {} if file.fps is None else {"fps": file.fps}
    size = dict(zip(SIZE, file.size, strict=True))
    values = {"sharding": AUTO, "vae_memory_gb": None, **size, **rate, **files, **replaced, **given}
    if record := file.metadata.get("record"):
        if config:
            raise UsageError(
                f"{file.path} has a record of its own", "leave --config out; flags and --set change values"
            )
        return read_spec(values, config=read_text(record, f"the record in {file.path}"), dotlist=settings)
    if "model" not in given and config is None:
        raise UsageError(f"{file.path} does not say which model made it", "--model NAME and, unless it is 24, --fps N")
    return read_spec({"prompt": "a", "seed": 0, **values}, config=config_page(config), dotlist=settings)


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
