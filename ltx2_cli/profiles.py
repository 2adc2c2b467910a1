"""From profiles, files and flags to a `RunSpec`: which layers there are, in which order, and what a record means."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from os.path import expanduser
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ltx2_cli.profile_layers import Layer, Values, extend, literal, merge, read_file, read_flags, read_setting, unknown
from ltx2_cli.spec import RunSpec, ShardingSpec, SpecError, validate

KINDS = ("model", "recipe", "reference", "sharding")  # in the order in which their profiles are stacked
AUTO = "auto"  # the sharding profile that is chosen when the devices are known
MADE_WITH = "made_with"  # a record's versions: for people, ignored when it is read
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*(/[\w./-]+\.safetensors)?(@[^@\s]+)?")
SINGLE_FILE = ".safetensors"
GEMMA = "Lightricks/gemma-3-12b-it-qat-q4_0-unquantized"  # the text encoder of every release, under no gate


def read_spec(
    overrides: Mapping[str, object] | None = None,
    *,
    config: str | Path | None = None,
    dotlist: Sequence[str] = (),
    **keys: object,
) -> RunSpec:
    """The request that all layers make together. Later wins: defaults, the profiles of model, recipe, reference and
    sharding, the file `config`, `overrides` and `keys`, `dotlist` (`["dotted.key=value"]`).

    `read_spec(prompt="rain", model="demo")`; dotted names go into `overrides`: `{"guidance.video.stg_scale": 0.0}`.
    Raises `SpecError` for an unknown name or key, a wrong type, a broken file, and for all that `validate` finds.
    """
    above = [read_flags({**(overrides or {}), **keys}), *map(read_setting, dotlist)]
    file = [] if config is None else [_without_repeats(_without_versions(read_file(Path(config))), above)]
    spec = merge(_stack([*file, *above]))
    _find_model(spec.model)
    validate(spec)
    return spec


def read_sharding(name: str, beside: ShardingSpec | None = None) -> ShardingSpec:
    """The sharding profile of this name, or in this YAML file, under what was asked for `beside` the profile `auto`."""
    below = [read_file(configs() / "default.yaml"), _page("model", "ltx2")]
    neutral = asdict(merge(below).sharding)
    asked = {key: value for key, value in asdict(beside).items() if value != neutral[key]} if beside else {}
    top = Layer("", {"sharding": {**asked, "profile": name}})
    return merge([*below, _profile("sharding", name), top]).sharding


def profile_names(kind: str) -> list[str]:
    """The profiles of one kind that come with the package: the files of `configs/<kind>`."""
    return sorted(path.stem for path in (configs() / kind).glob("*.yaml"))


def configs() -> Path:
    """The folder of shipped YAML: inside an installed package, at the root of a checkout."""
    package = Path(__file__).parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def to_yaml(spec: RunSpec, made_with: Mapping[str, str] | None = None) -> str:
    """`spec` as YAML that `read_spec(config=...)` turns into an equal one; versions in `made_with` come first."""
    versions = {MADE_WITH: dict(made_with)} if made_with else {}
    return OmegaConf.to_yaml(OmegaConf.create({**versions, **literal(asdict(spec))}))


def _stack(above: Sequence[Layer]) -> list[Layer]:
    """All layers, lowest first: the defaults, each profile that the highest layer names, `above`."""
    stack = [read_file(configs() / "default.yaml")]
    for kind in KINDS:
        named = [(name, layer) for layer in [*stack, *above] if (name := _name(layer, kind)) is not None]
        name, layer = named[-1]
        if not (kind == "sharding" and _is_whole(layer.values["sharding"])):
            stack.append(_profile(kind, name))
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
    if kind != "sharding":
        return _page(kind, name)
    if name == AUTO:
        return Layer("", {})
    is_file = "/" in name or name.endswith((".yaml", ".yml"))
    page = _extended(kind, read_file(Path(expanduser(name)))) if is_file else _page(kind, name)
    return replace(page, values={"sharding": {**page.values, "profile": name}})


def _page(kind: str, name: str) -> Layer:
    """A shipped profile, with what it extends."""
    known = profile_names(kind)
    if name not in known:
        what, also = ("sharding profile", f", `{AUTO}`, or a YAML file") if kind == "sharding" else (kind, "")
        raise unknown(what, name, known, also)
    return _extended(kind, read_file(configs() / kind / f"{name}.yaml"))


def _extended(kind: str, layer: Layer) -> Layer:
    own = {key: value for key, value in layer.values.items() if key != "extends"}
    parent = layer.values.get("extends")
    return extend(_page(kind, str(parent)), replace(layer, values=own)) if parent else layer


def _checkpoint(model: str) -> Layer:
    """A folder, a single file or a repository: like `ltx2`, but for what only the published folder is known to have."""
    path = expanduser(model)
    name = Path(path).resolve().name if Path(path).exists() else model.split("@")[0].split("/")[-1]
    values = {"checkpoint": path, "model_name": name.removesuffix(SINGLE_FILE), "stg_blocks": None}
    if name.endswith(SINGLE_FILE):
        values["text_encoder"] = GEMMA
    page = _page("model", "ltx2")
    return replace(page, values={**page.values, **values})


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
        raise SpecError(
            f"there is no folder or file `{model}`",
            "a model is a profile, a folder, a .safetensors file, or a repository REPO[/FILE][@REV]",
        )
    raise unknown("model", model, known, ", a folder, a .safetensors file, or a repository REPO[/FILE][@REV]")


def _without_versions(file: Layer) -> Layer:
    return replace(file, values={key: value for key, value in file.values.items() if key != MADE_WITH})


def _without_repeats(file: Layer, above: Sequence[Layer]) -> Layer:
    """`file` without what it only repeats from profiles that `above` replaces by others.

    A record holds every value. Were all of them kept, `--config clip.yaml --model demo` would load the old weights.
    """
    named = {kind: file.values[kind] for kind in KINDS if _name(file, kind) is not None}
    renamed = {kind for kind in named for layer in above if _name(layer, kind) not in (None, _name(file, kind))}
    if not renamed:
        return file
    said, repeated = asdict(merge(_stack([file]))), asdict(merge(_stack([Layer("", named)])))
    kept = {**_differing(file.values, said, repeated), **named}
    return replace(file, values={key: value for key, value in kept.items() if key not in renamed})


def _differing(values: Mapping[str, Any], said: Values, repeated: Values) -> Values:
    """The `values` whose typed form in `said` is not the one in `repeated`."""
    kept = {key: value for key, value in values.items() if key not in repeated or said[key] != repeated[key]}
    return {
        key: _differing(value, said[key], repeated[key]) if key in repeated and isinstance(value, Mapping) else value
        for key, value in kept.items()
    }
