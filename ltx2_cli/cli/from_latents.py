"""What the verbs that go on from saved latents share: the request that made them, changed by what is asked now."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ltx2_cli.cli.describe import config_page
from ltx2_cli.spec import AV, RunSpec, SpecError
from ltx2_cli.validation import validate

if TYPE_CHECKING:
    from ltx2_cli.diffusion.latents import LatentsFile
    from ltx2_cli.plan import Plan


def request(
    file: "LatentsFile",
    given: Mapping[str, object],
    config: Path | None,
    settings: list[str],
    instead: Mapping[str, object],
) -> RunSpec:
    """The request that made the latents, or for arrays alone one of their size; devices are those found here.

    `instead` replaces what it says, `given` both.
    """
    from ltx2_cli.diffusion.latents import SIZE
    from ltx2_cli.profile_layers import read_text
    from ltx2_cli.profiles import AUTO, read_spec

    if sized := {setting.partition("=")[0] for setting in settings} & set(SIZE):
        raise SpecError(f"{file.path} has a size of its own", f"leave --set {min(sized)} out")
    files = dict.fromkeys(("noise", "save_latents", "output", "compile_cache"))
    rate = {} if file.fps is None else {"fps": file.fps}
    size = dict(zip(SIZE, file.size, strict=True))
    here = {"sharding": AUTO, "vae_memory": None, **size, **rate, **files, **instead, **given}
    if record := file.metadata.get("record"):
        if config:
            raise SpecError(f"{file.path} has a record of its own", "leave --config out; flags and --set change values")
        return read_spec(here, config=read_text(record, f"the record in {file.path}"), dotlist=settings)
    if "model" not in given and config is None:
        raise SpecError(f"{file.path} does not say which model made it", "--model NAME and, unless it is 24, --fps N")
    return read_spec({"prompt": "a", "seed": 0, **here}, config=config_page(config), dotlist=settings)


def together(files: "Sequence[LatentsFile]", specs: Sequence[RunSpec]) -> RunSpec:
    """The request for all files at once, each with its own seed. Raises `SpecError` where more than seeds differs."""
    first = specs[0]
    for file, spec in zip(files, specs, strict=True):
        if others := sorted(key for key, value in vars(first).items() if key != "seed" and vars(spec)[key] != value):
            raise SpecError(
                f"{file.path} was not made like {files[0].path}: {', '.join(others)}", "go on from them one by one"
            )
    seeds = [spec.seed for spec in specs]
    if len(set(seeds)) < len(seeds):
        raise SpecError("several of these latents have one seed", "upsample them one by one")
    spec = replace(first, seed=tuple(seed for each in specs for seed in each.seed or ()))
    validate(spec)
    return spec


def check_source(file: "LatentsFile", plan: "Plan", fps: float) -> None:
    """Raise `SpecError` for latents of a clip of `fps` frames a second that the plan's model cannot go on from."""
    from ltx2_cli.diffusion.geometry import clip_geometry

    arch, (video, audio) = plan.arch, plan.latent_shapes
    clip = clip_geometry(*file.size, fps, arch.compression, arch.transformer.scales)
    size = clip.frames, clip.height, clip.width
    check_fit(file, plan, AV((*video[:2], *size), (*audio[:2], clip.audio_frames, *audio[3:])), fps)


def check_fit(file: "LatentsFile", plan: "Plan", wanted: AV[tuple[int, ...]], fps: float) -> None:
    """Raise `SpecError` for latents that this model did not make, or that are not of the shapes that it would."""
    made, ours = file.metadata.get("generation"), plan.arch.generation
    if made not in (None, ours):
        raise SpecError(f"{file.path} was made by {made}, and {plan.spec.model} is of {ours}", f"--model {made}")
    for name, found, shape in zip(AV._fields, file.shapes, wanted, strict=True):
        if found != shape:
            raise SpecError(
                f"the {name} latents in {file.path} are {_by(found)}; {plan.spec.model} at {fps:g} frames a"
                f" second has {_by(shape)}",
                "another --model, or the --fps that they were made with",
            )


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
