"""LoRAs and the networks: which tensors a file adds to, under all the names that files have for them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flax import nnx

from ltx2_cli.errors import UsageError
from ltx2_cli.models.networks import Networks
from ltx2_cli.weights.checkpoint import Renaming, count_and_list, raise_all, shape_text
from ltx2_cli.weights.declare import declared
from ltx2_cli.weights.lora import LoraDelta, LoraFile, LoraTerm, model_version, version_of

TARGETED = ("transformer", "connectors")
ORIGINAL = "model.diffusion_model."
PEFT = "base_model.model."
NAMES = {"ltx2": "LTX-2", "ltx2.3": "LTX-2.3"}
WEIGHT = ".weight"


@dataclass(frozen=True)
class Target:
    """A linear layer: its network, the declared name of its weight, that weight's shape on disk."""

    network: str
    tensor: str
    shape: tuple[int, ...]  # (out, in)


@dataclass
class _Match:
    """The targets of one file that match the networks, and those that do not, by the reason."""

    placed: dict[Target, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)


def find_adapters(
    loras: Sequence[tuple[LoraFile, float]], networks: Networks, renamings: Mapping[str, Renaming]
) -> dict[str, dict[str, LoraDelta]]:
    """The sums that files, each with a strength, add to tensors: by network, then by declared name.

    `renamings` are those of the published single files. Raises one `UsageError` for all targets of all files that are
    no linear layer of the transformer or the connectors, or have another shape.
    """
    if not loras:
        return {network: {} for network in TARGETED}
    modules = {name: module for name, module in networks._asdict().items() if name in TARGETED}
    targets = dict(_aliases(modules, renamings))
    wanted_version = version_of({target.tensor.removesuffix(WEIGHT): target.shape for target in targets.values()})
    parts: dict[Target, list[LoraTerm]] = {}
    problems: list[UsageError] = []
    for lora, strength in loras:
        match = _match(lora, targets)
        problems += _problems(lora, match, wanted_version)
        for target, name in match.placed.items():
            parts.setdefault(target, []).append(LoraTerm(lora, lora.pairs[name], strength))
    raise_all(problems)
    return {
        network: {
            target.tensor: LoraDelta(tuple(terms)) for target, terms in parts.items() if target.network == network
        }
        for network in TARGETED
    }


def unmet_wishes(lora: LoraFile) -> Iterator[str]:
    """What a LoRA was trained with and does not get here."""
    if any(key.startswith("reference_") for key in lora.files.metadata()):
        yield f"{lora.path.name} was trained to follow a reference video, and none can be given; leave out --lora"


def linears(module: nnx.Module) -> dict[str, tuple[int, ...]]:
    """The shape on disk (out, in) of each linear layer's weight, by its declared name."""
    return {name: shape for name, shape in declared(module).items() if name.endswith(WEIGHT) and len(shape) == 2}


def _aliases(modules: Mapping[str, nnx.Module], renamings: Mapping[str, Renaming]) -> Iterator[tuple[str, Target]]:
    """Every name that a file may have for each target."""
    for network, module in modules.items():
        shapes = linears(module)
        originals = renamings[network].originals(shapes)
        for tensor, shape in shapes.items():
            own = tensor.removesuffix(WEIGHT)
            original = originals[tensor].removesuffix(WEIGHT).removeprefix(ORIGINAL)
            for name in (own, original, f"{network}.{own}", f"diffusion_model.{original}", f"{ORIGINAL}{original}"):
                yield name, Target(network, tensor, shape)


def _match(lora: LoraFile, targets: Mapping[str, Target]) -> _Match:
    match = _Match()
    for name, pair in lora.pairs.items():
        target = targets.get(name.removeprefix(PEFT))
        if target is None:
            match.unknown.append(name)
        elif target in match.placed:
            match.twice.append(f"{name}, also called {match.placed[target]}")
        elif target.shape != pair.shape:
            match.misshapen.append(f"{name} is {shape_text(pair.shape)}, not {shape_text(target.shape)}")
        else:
            match.placed[target] = name
    return match


def _problems(lora: LoraFile, match: _Match, wanted_version: str | None) -> Iterator[UsageError]:
    """What is wrong with one file, if anything, and what to do about it."""
    findings = {"not in it": match.unknown, "of another shape": match.misshapen, "there twice": match.twice}
    listed = [finding for what, names in findings.items() for finding in count_and_list(what, names)]
    model, version = NAMES.get(wanted_version or "", "LTX-2"), model_version(lora)
    other = version is not None and version != wanted_version
    if not listed and not other:
        return
    count = f"{len(match.placed)} of {len(lora.pairs)} targets (each a pair of keys, A and B) match this {model} model"
    made_for = f"; it was made for {NAMES[version]}" if other and version else ""
    hint = f"--model {version}, or leave out --lora {lora.path}" if other else f"leave out --lora {lora.path}"
    yield UsageError(f"{lora.path}: {count}{made_for}. {'. '.join(listed)}", hint)
