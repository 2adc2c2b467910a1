"""Rules of a sharding profile: the logical axes that they may name, and their contradictions."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from itertools import combinations

from ltx2_cli.request.spec import ShardingSpec

WEIGHT_AXES = ("layers", "embed", "heads", "mlp", "vocab", "conv_in", "conv_out")
ACTIVATION_AXES = ("rows", "tokens", "audio_tokens", "heads")


def rule_mistakes(spec: ShardingSpec) -> Iterator[tuple[str, str]]:
    """Each contradiction among the rules and the axes of the mesh, with a hint; no devices are needed."""
    rules_of = {"weights": (spec.weights, WEIGHT_AXES), "activations": (spec.activations, ACTIVATION_AXES)}
    for kind, (rules, known) in rules_of.items():
        for axis in (axis for axis in rules if axis not in known):
            yield f"{kind} have no axis `{axis}`{_closest(axis, known)}", f"{kind} have {_quoted(known)}"
    named = {*spec.weights.values(), *spec.activations.values()}
    for axis in sorted(named - set(spec.mesh)):
        hint = f"the mesh has {_quoted(spec.mesh) or 'none'}"
        yield f"its mesh has no axis `{axis}`{_closest(axis, spec.mesh)}", hint
    for axis in (axis for axis, size in spec.mesh.items() if size != 1 and axis not in named):
        hint = f"leave out {axis}: its devices do the same work"
        yield f"no rule names mesh axis `{axis}`{_closest(axis, named)}", hint
    for (first, axis), (second, other_axis) in combinations(sorted(spec.activations.items()), 2):
        if axis == other_axis and {first, second} != {"tokens", "audio_tokens"}:
            yield (
                f"{first} and {second} of activations both lie along mesh axis `{axis}`",
                "give each an axis of its own",
            )
    tokens, audio_tokens = (spec.activations.get(name) for name in ("tokens", "audio_tokens"))
    if audio_tokens not in (None, tokens):  # attention between the streams would exchange along the wrong axis
        yield (
            "tokens and audio_tokens of activations lie along different mesh axes",
            "one axis for both, or no audio_tokens",
        )


def _closest(name: str, known: Iterable[str]) -> str:
    return "".join(f"; closest: `{match}`" for match in get_close_matches(name, known, 1))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
