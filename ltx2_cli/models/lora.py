"""LoRAs and the networks: which tensors a file adds to, under all the names that files have for them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flax import nnx

from ltx2_cli.diffusion.geometry import ReferenceScale
from ltx2_cli.errors import UnknownNetworkError, UsageError
from ltx2_cli.models.config import LAYOUTS, RENAMINGS
from ltx2_cli.models.networks import Networks
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.request.spelling import typed
from ltx2_cli.weights.checkpoint import TensorFiles, count_and_list, raise_all
from ltx2_cli.weights.declare import declared
from ltx2_cli.weights.lora import LEAVE_OUT, LoraDelta, LoraFile, LoraPair, model_version, version_of
from ltx2_cli.weights.published import CATALOG, LORA_KIND
from ltx2_cli.weights.quantized_files import DENOISER_PREFIX
from ltx2_cli.weights.tensors import shape_text

TARGETED = ("transformer", "connectors")
PEFT = "base_model.model."
MODEL_NAMES = {"ltx2": "LTX-2", "ltx2.3": "LTX-2.3", "ltx2.5": "LTX-2.5"}
WEIGHT = ".weight"
REFERENCE_KEYS = ("reference_downscale_factor", "reference_temporal_scale_factor")  # in a file's metadata
HDR_KEYS = ("hdr_transform", "use_hdr_transform")  # of those that make HDR
IN_CONTEXT = "ic-lora"  # in the names of those that say nothing of it in their metadata
DISTILLING = re.compile(r"distilled-lora-(\d+)")  # in the names of published LoRAs, with their rank


@dataclass(frozen=True)
class Target:
    """A linear layer: its network, the declared name of its weight, that weight's shape on disk."""

    network: str
    tensor: str
    shape: tuple[int, ...]  # (out, in)


def find_adapters(loras: Sequence[tuple[LoraFile, float]], networks: Networks) -> dict[str, dict[str, LoraDelta]]:
    """The sums that files, each with a strength, add to tensors: by network, then by declared name. Raises one
    `UsageError` for all targets of all files that are no linear layer of the transformer or the connectors, or have
    another shape."""
    terms: dict[Target, list[tuple[LoraFile, str, float]]] = {}
    problems: list[UsageError] = []
    targets = dict(_aliases(networks)) if loras else {}
    for lora, strength in loras:
        matching, mismatches = _match(lora, targets)
        problems += _problems(lora, len(matching), mismatches, targets)
        for target, name in matching.items():
            terms.setdefault(target, []).append((lora, name, strength))
    raise_all(problems)
    deltas: dict[str, dict[str, LoraDelta]] = {network: {} for network in TARGETED}
    for target, summands in terms.items():
        deltas[target.network][target.tensor] = LoraDelta(tuple(summands))
    return deltas


def reference_scale(lora: LoraFile) -> ReferenceScale | None:
    """The scale of references of an in-context LoRA, by its metadata; None for any other LoRA. Raises `UsageError` for
    what is no whole number."""
    metadata = lora.files.metadata
    if IN_CONTEXT not in lora.path.name.lower() and not any(key in metadata for key in REFERENCE_KEYS):
        return None
    for key in REFERENCE_KEYS:
        if not re.fullmatch(r"[1-9]\d?", text := metadata.get(key, "1")):
            raise UsageError(f"{lora.path} says that its {key} is {text!r}, no whole number", LEAVE_OUT)
    return ReferenceScale(*(int(metadata.get(key, "1")) for key in REFERENCE_KEYS))


def makes_hdr(lora: LoraFile) -> bool:
    """Whether a clip of a LoRA is in LogC3: by its metadata, or by the name of an in-context one."""
    stated = [text.lower() for key, text in lora.files.metadata.items() if key in HDR_KEYS]
    name = lora.path.name.lower()
    return not {"false", "none", "0", ""}.issuperset(stated) or (not stated and IN_CONTEXT in name and "hdr" in name)


def linears(module: nnx.Module) -> dict[str, tuple[int, ...]]:
    """The shape on disk (out, in) of each linear layer's weight, by its declared name."""
    return {name: shape for name, shape in declared(module).items() if name.endswith(WEIGHT) and len(shape) == 2}


def _aliases(networks: Networks) -> Iterator[tuple[str, Target]]:
    """Every name that a file may have for each target."""
    for network in TARGETED:
        shapes = linears(networks.present()[network])
        for tensor, native in RENAMINGS[network].originals(shapes).items():
            own, original = tensor.removesuffix(WEIGHT), native.removesuffix(WEIGHT).removeprefix(DENOISER_PREFIX)
            for name in (
                own,
                original,
                f"{network}.{own}",
                f"diffusion_model.{original}",
                f"{DENOISER_PREFIX}{original}",
            ):
                yield name, Target(network, tensor, shapes[tensor])


def _match(lora: LoraFile, targets: Mapping[str, Target]) -> tuple[dict[Target, str], dict[str, list[str]]]:
    """The targets of a file that match the networks, and the names of the others, by reason."""
    matching: dict[Target, str] = {}
    mismatches: dict[str, list[str]] = {"not in it": [], "of another shape": [], "there twice": []}
    for name, pair in lora.pairs.items():
        target = targets.get(name.removeprefix(PEFT))
        if target is None:
            mismatches["not in it"].append(name)
        elif target in matching:
            mismatches["there twice"].append(f"{name}, also called {matching[target]}")
        elif target.shape != pair.shape:
            shapes = f"{shape_text(pair.shape)}, not {shape_text(target.shape)}"
            mismatches["of another shape"].append(f"{name} is {shapes}")
        else:
            matching[target] = name
    return matching, mismatches


def _problems(
    lora: LoraFile, matching: int, mismatches: Mapping[str, list[str]], targets: Mapping[str, Target]
) -> Iterator[UsageError]:
    """The problem of one file, if any, and its cure."""
    listed = count_and_list(mismatches)
    wanted_version = version_of({target.tensor.removesuffix(WEIGHT): target.shape for target in targets.values()})
    model, version = MODEL_NAMES.get(wanted_version or "", "LTX-2"), model_version(lora)
    other = version is not None and LAYOUTS.get(version, version) != wanted_version
    if not listed and not other:
        return
    count = f"{matching} of {len(lora.pairs)} targets (each a pair of keys, A and B) match this {model} model"
    made_for = f"; it was made for {MODEL_NAMES[version]}" if other and version else ""
    hint = f"{typed('model', version)}, or leave out {lora.path}" if other else f"leave out {lora.path}"
    yield UsageError(f"{lora.path}: {count}{made_for}. {'. '.join(listed)}", hint)


def preset_lora(name: str, transformer: Transformer) -> LoraFile:
    """A published LoRA that distills: factors for every linear layer of the denoiser, as large as the rank or the
    layer allows; of an in-context one, whose rank is not known, as large as those of any. It has no tensors. Raises
    `UsageError` for one that is not known here."""
    listed = [(entry.name, DISTILLING.search(entry.name)) for entry in CATALOG if entry.kind == LORA_KIND]
    known = {name: int(found[1]) for name, found in listed if found}
    largest = max(known.values()) if IN_CONTEXT in name.lower() else None
    if (rank := known.get(name.partition("@")[0], largest)) is None:
        raise UnknownNetworkError(
            f"{name} is not on this machine, and what it adds to stands in its file alone",
            f"{typed('second_stage.lora', ['FILE'])} that is here, or one of: {', '.join(known)}",
        )
    pairs = {
        tensor.removesuffix(WEIGHT): LoraPair("", "", None, (out, into), min(rank, out, into), ("BF16", "BF16"))
        for tensor, (out, into) in linears(transformer).items()
    }
    return LoraFile(Path(name), TensorFiles(), pairs)
