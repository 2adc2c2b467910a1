"""Saved latents: the request that made them, and checks before a model continues from them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ltx2_cli.diffusion.geometry import SIZE_KEYS, clip_geometry
from ltx2_cli.diffusion.latents import LatentsFile
from ltx2_cli.errors import UsageError
from ltx2_cli.request.layers import ConfigLayer, read_text
from ltx2_cli.request.profiles import AUTO, merge_layers, validated_spec
from ltx2_cli.request.spec import RunSpec, Streams
from ltx2_cli.request.spelling import option_name, typed
from ltx2_cli.runs.build_request import Layers, build_request
from ltx2_cli.runs.trust import Trust, check_trust
from ltx2_cli.weights.tensors import shape_text

if TYPE_CHECKING:
    from ltx2_cli.plan.resolve import Plan


def latents_request(
    file: LatentsFile, given: Mapping[str, object], layers: Layers, replaced: Mapping[str, object], trust: Trust
) -> RunSpec:
    """The request that made the latents, or for a file without a record one of their size, for the devices found here.
    `replaced` overrides the record, `given` overrides both."""
    settings = layers.settings
    size = dict(zip(SIZE_KEYS, file.size, strict=True))
    if sized := {setting.partition("=")[0] for setting in settings} & size.keys():
        raise UsageError(f"{file.path} has a size of its own", f"leave --set {min(sized)} out")
    files = dict.fromkeys(("initial_noise", "save_latents", "output", "compile_cache"))
    rate = {} if file.fps is None else {"fps": file.fps}
    values = {"sharding": AUTO, "vae_memory_gb": None, **size, **rate, **files, **replaced, **given}
    if record := file.metadata.get("record"):
        if layers.file:
            raise UsageError(
                f"{file.path} has a record of its own", "leave --config out; flags and --set change values"
            )
        page = read_text(record, f"the record in {file.path}")
        asked = merge_layers({**without_references(page), **values}, page, settings)
        return validated_spec(check_trust(asked, page, trust))
    if "model" not in given and layers.file is None:
        raise UsageError(
            f"{file.path} does not say which model made it",
            f"{typed('model', 'NAME')} and, unless it is 24, {typed('fps', 'N')}",
        )
    return build_request({"prompt": "a", "seed": 0, **values}, layers, trust)


def without_references(record: ConfigLayer) -> dict[str, object]:
    """Replacements for a record's values if it has references: only a first stage follows them."""
    shown = record.values.get("conditions")
    if not isinstance(shown, list):
        return {}
    kept = [item for item in shown if not (isinstance(item, dict) and item.get("kind") in ("reference", "mask"))]
    return {} if kept == shown else {"conditions": kept, "reference_strength": 1.0}


def check_source(file: LatentsFile, plan: "Plan", fps: float) -> None:
    """Raise `UsageError` for latents, of a clip of `fps` frames per second, that the plan's model cannot continue."""
    arch, (video, audio) = plan.arch, plan.latent_shapes
    clip = clip_geometry(*file.size, fps, arch.compression, arch.transformer.scales)
    size = clip.frames, clip.height, clip.width
    check_shapes(file, plan, Streams((*video[:2], *size), (*audio[:2], clip.audio_frames, *audio[3:])), fps)
    if (wanted := plan.stages[-1].geometry.generated) and file.keyframes not in (0, wanted):
        sentence = f"{file.path} has {file.keyframes} generated keyframes, and this request {wanted}"
        raise UsageError(sentence, f"{typed('keyframes', 0)} and {typed('keyframe_segments', [])}")


def check_shapes(file: LatentsFile, plan: "Plan", expected: Streams[tuple[int, ...]], fps: float) -> None:
    """Raise `UsageError` for latents of another model, or of other shapes than expected."""
    model_version = file.metadata.get("model_version")
    if model_version not in (None, plan.arch.model_version):
        raise UsageError(
            f"{file.path} was made by {model_version}, and {plan.spec.model} is of {plan.arch.model_version}",
            typed("model", model_version),
        )
    for name, actual, shape in zip(Streams._fields, file.shapes, expected, strict=True):
        if actual != shape:
            raise UsageError(
                f"the {name} latents in {file.path} are {shape_text(actual)}; {plan.spec.model} at {fps:g} frames a"
                f" second has {shape_text(shape)}",
                f"another {option_name('model')}, or the {option_name('fps')} that they were made with",
            )
