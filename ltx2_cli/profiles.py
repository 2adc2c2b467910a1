"""From profiles, files and flags to a `RunSpec`: which layers there are, in which order, and what a record means."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cache
from os.path import abspath, expanduser
from pathlib import Path
from typing import Any

from ltx2_cli.profile_layers import Layer, extend, merge, read_file, read_flags, read_setting, unknown
from ltx2_cli.spec import RunSpec, ShardingSpec, SpecError
from ltx2_cli.validation import validate
from ltx2_cli.yaml_text import Values, dump

KINDS = ("model", "recipe", "reference", "sharding")  # in the order in which their profiles are stacked
GENERATIONS = ("ltx2", "ltx2.3")  # the model profiles that also serve checkpoints which have no profile
AUTO = "auto"  # the recipe and the sharding that are chosen when the checkpoint and the devices are known
EITHER = {"num_inference_steps", "sigmas"}  # of two layers, the higher says both
# what the checkpoint's recipe fills in
LEFT_OPEN = ("num_inference_steps", "sigmas", "guidance", "stg_blocks", "refinement")
BY_RECIPE = "by_recipe"  # in a model profile: values that it has with a recipe of this name
CACHE = "compile_cache"  # never taken from a file, which may be a stranger's: programs are code
PLACES = ("output", "save_latents", "base_output_directory")  # where a clip was written is no part of what it is
MADE_WITH = "made_with"  # what a record says besides the request, ignored where that is read
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*(/[\w./-]+\.safetensors)?(@[^@\s]+)?")
SINGLE_FILE = ".safetensors"
PUBLISHED_LAYERS = 48  # blocks of every release: the model profiles count the one that STG disturbs among so many
GEMMA = "Lightricks/gemma-3-12b-it-qat-q4_0-unquantized"  # the text encoder of every release, under no gate


def read_spec(
    overrides: Mapping[str, object] | None = None,
    *,
    config: str | Path | Layer | None = None,
    dotlist: Sequence[str] = (),
    **keys: object,
) -> RunSpec:
    """The request that all layers make together. Later wins: defaults, the profiles of model, recipe, reference and
    sharding, the file or layer `config`, `overrides` and `keys`, `dotlist` (`["dotted.key=value"]`).

    `read_spec(prompt="rain", model="demo")`; dotted names go into `overrides`: `{"guidance.video.stg_scale": 0.0}`.
    What a recipe decides and nobody asks for is None until the checkpoint is open.
    Raises `SpecError` for an unknown name or key, a wrong type, a broken file, and for all that `validate` finds.
    """
    above = [read_flags({**(overrides or {}), **keys}), *map(read_setting, dotlist)]
    page = read_file(Path(config)) if isinstance(config, str | Path) else config
    file = [] if page is None else [_under(above, page)]
    spec = merge(_stack([*_alone(file), *_alone(above)], without=LEFT_OPEN))
    _find_model(spec.model)
    validate(spec)
    return spec if spec.sigmas is None else replace(spec, num_inference_steps=len(spec.sigmas) - 1)


def read_pages(spec: RunSpec, recipe: str, generation: str | None = None, layers: int = PUBLISHED_LAYERS) -> RunSpec:
    """What a request would be that named no more than `spec` names and `recipe`, for a model that is like
    `generation` where it has no profile of its own, with so many blocks."""
    return _read_pages(spec.model, recipe, spec.reference, generation, layers)


@cache
def _read_pages(model: str, recipe: str, reference: str, generation: str | None, layers: int) -> RunSpec:
    """The same by names: shipped files, which every plan of a search asks for."""
    named = {"model": model, "recipe": recipe, "reference": reference, "sharding": {"profile": AUTO}}
    return merge(_stack([Layer("", named)], [_generation(generation, layers)] if generation else []))


def read_sharding(name: str, beside: ShardingSpec | None = None) -> ShardingSpec:
    """The sharding profile of this name, or in this YAML file, under what was asked for `beside` the profile `auto`."""
    below, neutral = _no_sharding()
    asked = {key: value for key, value in asdict(beside).items() if value != neutral[key]} if beside else {}
    top = Layer("", {"sharding": {**asked, "profile": name}})
    return merge([below, _profile("sharding", name), top]).sharding


@cache
def _no_sharding() -> tuple[Layer, Values]:
    """A request without a sharding profile, and what it says of sharding."""
    below = extend(read_file(configs() / "default.yaml"), _page("model", "ltx2"))
    return below, asdict(merge([below]).sharding)


def profile_names(kind: str) -> list[str]:
    """The profiles of one kind that come with the package: the files of `configs/<kind>`."""
    return sorted(path.stem for path in (configs() / kind).glob("*.yaml"))


def configs() -> Path:
    """The folder of shipped YAML: inside an installed package, at the root of a checkout."""
    package = Path(__file__).parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def user_cache() -> Path:
    """The folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ltx2"


def to_yaml(spec: RunSpec, made_with: Mapping[str, Any] | None = None) -> str:
    """`spec` as YAML that `read_spec(config=...)` turns into an equal one; `made_with` comes last."""
    made = {MADE_WITH: made_with} if made_with else {}
    seed = {"seed": spec.seed[0]} if spec.seed and len(spec.seed) == 1 else {}
    return dump({**asdict(spec), CACHE: None, **seed, **made})


def spread(sigmas: tuple[float, ...], steps: int) -> tuple[float, ...]:
    """The noise levels at `steps` equal steps along the given ones; for as many steps, those themselves."""
    levels = []
    for step in range(steps + 1):
        below, part = divmod(step * (len(sigmas) - 1), steps)
        level, after = sigmas[below], sigmas[min(below + 1, len(sigmas) - 1)]
        levels.append(level + (after - level) * part / steps)
    return tuple(levels)


def _stack(above: Sequence[Layer], below: Sequence[Layer] = (), without: Sequence[str] = ()) -> list[Layer]:
    """All layers, lowest first: the defaults, `below`, each profile that the highest layer names but for the keys
    `without`, `above`."""
    stack, by_recipe = [read_file(configs() / "default.yaml"), *below], dict[str, Values]()
    for kind in KINDS:
        named = [(name, layer) for layer in [*stack, *above] if (name := _name(layer, kind)) is not None]
        name, layer = named[-1]
        if not (kind == "sharding" and _is_whole(layer.values["sharding"])):
            page = _profile(kind, name)
            by_recipe |= page.values.get(BY_RECIPE, {})
            skipped = {*without, BY_RECIPE}
            stack.append(replace(page, values={key: page.values[key] for key in page.values if key not in skipped}))
            if kind == "recipe":
                stack.append(Layer("", by_recipe.get(name, {})))
    return [*stack, *above]


def _name(layer: Layer, kind: str) -> str | None:
    """The profile of this kind that `layer` names, if it names one."""
    value = layer.values.get(kind)
    if kind == "sharding":
        value = value.get("profile") if isinstance(value, Mapping) else None
    if value is not None and not isinstance(value, str):
        raise SpecError(
            f"{layer.source}`{kind}` is {value!r}; expected the name of a profile",
            f"known: {', '.join(profile_names(kind))}",
        )
    return value


def _is_whole(sharding: Values) -> bool:
    """Whether every field of a sharding profile is said in place, as in a record: then no page is looked up."""
    return sharding["profile"] != AUTO and {field.name for field in fields(ShardingSpec)} <= set(sharding)


def _profile(kind: str, name: str) -> Layer:
    """The layer of one profile; a model may also be a folder or a repository, a sharding profile a file."""
    if kind == "model" and name not in profile_names("model"):
        return _checkpoint(name)
    if kind in ("recipe", "sharding") and name == AUTO:
        return Layer("", {})
    if kind != "sharding":
        return _page(kind, name)
    is_file = "/" in name or name.endswith((".yaml", ".yml"))
    page = _extended(kind, read_file(Path(expanduser(name)))) if is_file else _page(kind, name)
    return replace(page, values={"sharding": {**page.values, "profile": name}})


def _page(kind: str, name: str) -> Layer:
    """A shipped profile, with what it extends."""
    known = profile_names(kind)
    if name not in known:
        also = {"recipe": f", `{AUTO}`", "sharding": f", `{AUTO}`, or a YAML file"}
        raise unknown("sharding profile" if kind == "sharding" else kind, name, known, also.get(kind, ""))
    return _extended(kind, read_file(configs() / kind / f"{name}.yaml"))


def _extended(kind: str, layer: Layer) -> Layer:
    own = {key: value for key, value in layer.values.items() if key != "extends"}
    parent = layer.values.get("extends")
    return extend(_page(kind, str(parent)), replace(layer, values=own)) if parent else layer


def _checkpoint(model: str) -> Layer:
    """A folder, a single file or a repository. Which generation it is of is known when it is opened."""
    path = expanduser(model)
    name = checkpoint_path(path)[-1]
    values = {"checkpoint": path, "model_name": name.removesuffix(SINGLE_FILE)}
    return Layer("", {**values, "text_encoder": GEMMA} if name.endswith(SINGLE_FILE) else values)


def checkpoint_path(checkpoint: str) -> list[str]:
    """What a checkpoint is called: the last element of a path that exists, or every element of REPO[/FILE]."""
    path = Path(expanduser(checkpoint))
    # A link keeps its own name: those in the hub's cache lead to files that are named by a checksum.
    return [Path(abspath(path)).name] if path.exists() else checkpoint.split("@")[0].split("/")


def _generation(name: str, layers: int) -> Layer:
    """The page of a generation for a model with so many blocks: STG disturbs those at the published depth."""
    page = _page("model", name)
    blocks = [min(round(block * layers / PUBLISHED_LAYERS), layers - 1) for block in page.values["stg_blocks"]]
    return replace(page, values={**page.values, "stg_blocks": blocks})


def _find_model(model: str) -> None:
    """Refuse a model that is no profile, no folder, and not written like a repository."""
    known = profile_names("model")
    path = Path(expanduser(model))
    if (
        model in known
        or path.is_dir()
        or REPOSITORY.fullmatch(model)
        or (path.is_file() and path.suffix == SINGLE_FILE)
    ):
        return
    if "/" in model:
        what = f"`{model}` is no .safetensors file" if path.exists() else f"there is no folder or file `{model}`"
        raise SpecError(what, "a model is a profile, a folder, a .safetensors file, or a repository REPO[/FILE][@REV]")
    raise unknown("model", model, known, ", a folder, a .safetensors file, or a repository REPO[/FILE][@REV]")


def _alone(layers: Sequence[Layer]) -> list[Layer]:
    """`layers`; if they say either how many steps or which noise levels, then without the other from below."""
    said = {key for key in EITHER for layer in layers if layer.values.get(key) is not None}
    return [*([Layer("", dict.fromkeys(EITHER - said))] if len(said) == 1 else []), *layers]


def _under(above: Sequence[Layer], file: Layer) -> Layer:
    """`file` without its versions and what is never shared, of a record without where the clip was written, and
    without what it only repeats from profiles that `above` replaces by others.

    A record holds every value. Were all of them kept, `--config clip.yaml --model demo` would load the old weights.
    """
    is_record = MADE_WITH in file.values
    if not is_record and file.values.get(CACHE) is not None:
        raise SpecError(f"{file.source}`{CACHE}` is not taken from a file: programs are code", "--compile-cache FOLDER")
    others = {MADE_WITH, CACHE, *(PLACES if is_record else ())}
    ours = {key: value for key, value in file.values.items() if key not in others}
    plain = replace(file, values=ours)
    named = {kind: plain.values[kind] for kind in KINDS if _name(plain, kind) is not None}
    renamed = {kind for kind in named for layer in above if _name(layer, kind) not in (None, _name(plain, kind))}
    if not renamed:
        return plain
    gone = renamed | (_chosen(plain) if is_record and "model" in renamed else set())
    kept = {**_without_repeats(plain, named), **named}
    return replace(plain, values={key: value for key, value in kept.items() if key not in gone})


def _chosen(record: Layer) -> set[str]:
    """What in a record may have been chosen for its checkpoint, and would not be the same for another."""
    is_profile = record.values.get("model") in profile_names("model")
    return {"recipe"} if is_profile else {"recipe", "stg_blocks"}  # blocks, for a depth that only the model knows


def _without_repeats(file: Layer, named: Values) -> Values:
    """The values of `file` that are not those of the profiles which it names, whichever generation its model is of."""
    values, said = file.values, asdict(merge(_stack([file])))
    for below in ([], *([_page("model", generation)] for generation in GENERATIONS)):
        repeated = asdict(merge(_stack([Layer("", named)], below)))
        if repeated["sigmas"] and said["num_inference_steps"]:
            repeated["sigmas"] = spread(repeated["sigmas"], said["num_inference_steps"])
        values = _differing(values, said, repeated)
    return values


def _differing(values: Mapping[str, Any], said: Values, repeated: Values) -> Values:
    """The `values` whose typed form in `said` is not the one in `repeated`."""
    kept = {key: value for key, value in values.items() if key not in repeated or said[key] != repeated[key]}
    return {
        key: _differing(value, said[key], repeated[key]) if key in repeated and isinstance(value, Mapping) else value
        for key, value in kept.items()
    }
