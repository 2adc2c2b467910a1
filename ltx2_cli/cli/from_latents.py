"""What the verbs that go on from saved latents share: the request that made them, changed by what is asked now."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ltx2_cli.spec import AV, RunSpec, SpecError

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
    from ltx2_cli.profile_layers import read_text
    from ltx2_cli.profiles import AUTO, read_spec

    files = dict.fromkeys(("noise", "save_latents", "output", "compile_cache"))
    size = dict(zip(("num_frames", "height", "width"), file.size, strict=True))
    here = {"sharding": AUTO, "vae_memory": None, **size, **files, **instead, **given}
    if record := file.metadata.get("record"):
        if config:
            raise SpecError(f"{file.path} has a record of its own", "leave --config out; flags and --set change values")
        return read_spec(here, config=read_text(record, f"the record in {file.path}"), dotlist=settings)
    if "model" not in given and config is None:
        raise SpecError(f"{file.path} does not say which model made it", "--model NAME and, unless it is 24, --fps N")
    return read_spec({"prompt": "any", "seed": 0, **here}, config=config, dotlist=settings)


def check_source(file: "LatentsFile", plan: "Plan") -> None:
    """Raise `SpecError` for latents that the plan's model cannot go on from."""
    (_, _, *size), sound, length = file.shapes.video, plan.latent_shapes.audio, file.shapes.audio[2]
    near = abs(length - sound[2]) <= 1  # twice as many frames, but for the first, may end sooner
    audio = (*sound[:2], length if near else sound[2], sound[3])
    check_fit(file, plan, AV((*plan.latent_shapes.video[:2], *size), audio))


def check_fit(file: "LatentsFile", plan: "Plan", wanted: AV[tuple[int, ...]]) -> None:
    """Raise `SpecError` for latents that this model did not make, or that are not of the shapes that it would."""
    made, ours = file.metadata.get("generation"), plan.arch.generation
    if made not in (None, ours):
        raise SpecError(f"{file.path} was made by {made}, and {plan.spec.model} is of {ours}", f"--model {made}")
    for name, found, shape in zip(AV._fields, file.shapes, wanted, strict=True):
        if found != shape:
            raise SpecError(
                f"the {name} latents in {file.path} are {_by(found)}; {plan.spec.model} at {plan.spec.fps:g} frames a"
                f" second has {_by(shape)}",
                "another --model, or the --fps that they were made with",
            )


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
