"""Merge profiles, files and flags into a `RunSpec`; write a `RunSpec` as a record and read it back."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cache
from os.path import abspath, expanduser
from pathlib import Path
from typing import Any

from ltx2_cli.errors import UsageError
from ltx2_cli.request.layers import (
    ASKED,
    ConfigLayer,
    Values,
    dump,
    leaves,
    merge,
    nested,
    read_file,
    read_setting,
    unknown_name_error,
)
from ltx2_cli.request.spec import RunSpec, ShardingSpec
from ltx2_cli.request.validation import validate

KINDS = ("model", "recipe", "compat", "sharding")  # of profiles, in stacking order
AUTO = "auto"  # chosen by `resolve`, from the checkpoint and the devices
STEPS_OR_SIGMAS = {"num_inference_steps", "sigmas"}  # two spellings of one choice: the higher layer decides both
RECIPE_KEYS = ("num_inference_steps", "sigmas", "guidance", "stg_blocks", "second_stage")  # None: the recipe's
SECTION = "sharding."  # begins the dotted keys of the sharding section
BY_RECIPE = "by_recipe"  # section of a model profile: recipe name -> values
CACHE = "compile_cache"  # never read from a file: compiled programs are code, and the file may be a stranger's
OUTPUT_KEYS = ("output", "save_latents", "base_output_directory")  # not repeated from a record
PROVENANCE = "provenance"  # section of a record that is not part of the request
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*(/[\w./-]+\.safetensors)?(@[^@\s]+)?")
SINGLE_FILE = ".safetensors"
PUBLISHED_LAYERS = 48  # blocks of the published transformers; `stg_blocks` of a profile counts among these
GEMMA = "Lightricks/gemma-3-12b-it-qat-q4_0-unquantized"  # text encoder of every release, in an ungated repository


def read_spec(
    overrides: Mapping[str, object] | None = None,
    *,
    config: str | Path | ConfigLayer | None = None,
    dotlist: Sequence[str] = (),
    **keys: object,
) -> RunSpec:
    """Merge all layers into one request. Later wins: defaults, the profiles of model, recipe, compat and sharding,
    `config` (a YAML file or a layer), `overrides` and `keys`, `dotlist` (`["dotted.key=value"]`).

    Example: `read_spec(prompt="rain", model="demo")`. Dotted keys go into `overrides`:
    `{"guidance.video.stg_scale": 0.0}`. A key of `RECIPE_KEYS` that nobody sets is None; `resolve` fills it.
    Raises `UsageError` for an unknown name or key, a wrong type, a broken file, and everything `validate` finds.
    """
    above = [ConfigLayer("", nested({**(overrides or {}), **keys})), *map(read_setting, dotlist)]
    layer = read_file(Path(config)) if isinstance(config, str | Path) else config
    file, given = _config_values(layer or ConfigLayer("", {}), above)
    spec = merge(_profile_stack([*_drop_alternative([file]), *_drop_alternative(above)], without=RECIPE_KEYS))
    _check_model(spec.model)
    validate(spec)
    asked = tuple(sorted(given.union(*map(leaves, above)).difference(OUTPUT_KEYS, {CACHE})))
    steps = spec.num_inference_steps if spec.sigmas is None else len(spec.sigmas) - 1
    return replace(spec, num_inference_steps=steps, asked=asked)


def recipe_defaults(
    spec: RunSpec, recipe: str, model_version: str | None = None, layers: int = PUBLISHED_LAYERS
) -> RunSpec:
    """The profiles of `spec` with this recipe, and nothing else set. A model without a profile uses that of
    `model_version`, with STG blocks rescaled to `layers`."""
    named = {"model": spec.model, "recipe": recipe, "compat": spec.compat, "sharding": {"profile": AUTO}}
    below = []
    if model_version:
        profile = _shipped_profile("model", model_version)
        blocks = [min(round(block * layers / PUBLISHED_LAYERS), layers - 1) for block in profile.values["stg_blocks"]]
        below = [replace(profile, values={**profile.values, "stg_blocks": blocks})]
    return merge(_profile_stack([ConfigLayer("", named)], below))


def read_sharding(name: str, spec: RunSpec | None = None) -> ShardingSpec:
    """The sharding profile `name` (or YAML file), below what the request `spec` asked for in its sharding section."""
    asked = [key.removeprefix(SECTION) for key in (spec.asked if spec else ()) if key.startswith(SECTION)]
    # A record of another version, or one that was edited, may list other keys.
    values = {key: value for key, value in vars(spec.sharding).items() if key in asked} if spec else {}
    top = ConfigLayer("", {"sharding": {**values, "profile": name}})
    return merge([_defaults(), _profile_layer("sharding", name), top]).sharding


@cache
def _defaults() -> ConfigLayer:
    return read_file(configs() / "default.yaml")


def profile_names(kind: str) -> list[str]:
    """Names of the shipped profiles of one kind: the files in `configs/<kind>`."""
    return sorted(path.stem for path in (configs() / kind).glob("*.yaml"))


def configs() -> Path:
    """The folder of shipped YAML files: inside an installed package, else at the root of the checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def user_cache() -> Path:
    """The user's cache folder of this program."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ltx2"


def to_yaml(spec: RunSpec, provenance: Mapping[str, Any] | None = None) -> str:
    """`spec` as a YAML record: `read_spec(config=...)` gives an equal one. `asked` and `provenance` come last."""
    extra = {ASKED: list(spec.asked), **({PROVENANCE: provenance} if provenance else {})}
    seed = {"seed": spec.seed[0]} if spec.seed and len(spec.seed) == 1 else {}
    return dump({**asdict(spec), CACHE: None, **seed, **extra})


def _profile_stack(
    above: Sequence[ConfigLayer], below: Sequence[ConfigLayer] = (), without: Sequence[str] = ()
) -> list[ConfigLayer]:
    """All layers, lowest first: the defaults, `below`, the profile of each kind without the keys `without`, `above`.
    The highest layer that names a profile of a kind chooses it."""
    stack, by_recipe = [_defaults(), *below], dict[str, Values]()
    section_keys = {field.name for field in fields(ShardingSpec)}
    for kind in KINDS:
        named = [(name, layer) for layer in [*stack, *above] if (name := _profile_name(layer, kind)) is not None]
        name, layer = named[-1]
        complete = name != AUTO and kind == "sharding" and section_keys <= set(layer.values["sharding"])
        if not complete:  # as in a record: then no profile is read
            profile = _profile_layer(kind, name)
            by_recipe |= profile.values.get(BY_RECIPE, {})
            kept = {key: value for key, value in profile.values.items() if key not in {*without, BY_RECIPE}}
            stack.append(replace(profile, values=kept))
            if kind == "recipe":
                stack.append(ConfigLayer("", by_recipe.get(name, {})))
    return [*stack, *above]


def _profile_name(layer: ConfigLayer, kind: str) -> str | None:
    value = layer.values.get(kind)
    if kind == "sharding":
        value = value.get("profile") if isinstance(value, Mapping) else None
    if value is not None and not isinstance(value, str):
        raise UsageError(
            f"{layer.source}`{kind}` is {value!r}; expected the name of a profile",
            f"known: {', '.join(profile_names(kind))}",
        )
    return value


def _profile_layer(kind: str, name: str) -> ConfigLayer:
    """The layer of a profile. A model may also be a folder, file or repository; a sharding profile may be a file."""
    if kind == "model" and name not in profile_names("model"):  # its model version is known once it is open
        path = expanduser(name)
        last = checkpoint_names(path)[-1]
        text = {"text_encoder": GEMMA} if last.endswith(SINGLE_FILE) else {}
        return ConfigLayer("", {"checkpoint": path, "model_name": last.removesuffix(SINGLE_FILE), **text})
    if kind in ("recipe", "sharding") and name == AUTO:
        return ConfigLayer("", {})
    if kind != "sharding":
        return _shipped_profile(kind, name)
    is_file = "/" in name or name.endswith((".yaml", ".yml"))
    profile = _with_parent(kind, read_file(Path(expanduser(name)))) if is_file else _shipped_profile(kind, name)
    return replace(profile, values={"sharding": {**profile.values, "profile": name}})


@cache
def _shipped_profile(kind: str, name: str) -> ConfigLayer:
    known = profile_names(kind)
    if name not in known:
        also = {"recipe": f", `{AUTO}`", "sharding": f", `{AUTO}`, or a YAML file"}
        raise unknown_name_error("sharding profile" if kind == "sharding" else kind, name, known, also.get(kind, ""))
    return _with_parent(kind, read_file(configs() / kind / f"{name}.yaml"))


def _with_parent(kind: str, layer: ConfigLayer) -> ConfigLayer:
    own = {key: value for key, value in layer.values.items() if key != "extends"}
    parent = layer.values.get("extends")
    return _shipped_profile(kind, str(parent)).extended(replace(layer, values=own)) if parent else layer


def checkpoint_names(checkpoint: str) -> list[str]:
    """The names of a checkpoint: the last element of an existing path, or each element of REPO[/FILE]."""
    path = Path(expanduser(checkpoint))
    # A link keeps its own name: those in the hub's cache lead to files that are named by a checksum.
    return [Path(abspath(path)).name] if path.exists() else checkpoint.split("@")[0].split("/")


def _check_model(model: str) -> None:
    """Raise `UsageError` unless `model` is a profile, a folder, a single file or spelt like a repository."""
    known, path = profile_names("model"), Path(expanduser(model))
    is_file = path.is_file() and path.suffix == SINGLE_FILE
    if model in known or path.is_dir() or is_file or REPOSITORY.fullmatch(model):
        return
    others = "a folder, a .safetensors file, or a repository REPO[/FILE][@REV]"
    if "/" in model:
        what = f"`{model}` is no .safetensors file" if path.exists() else f"there is no folder or file `{model}`"
        raise UsageError(what, f"a model is a profile, {others}")
    raise unknown_name_error("model", model, known, f", {others}")


def _drop_alternative(layers: Sequence[ConfigLayer]) -> list[ConfigLayer]:
    """`layers`; if they set only one of `STEPS_OR_SIGMAS`, preceded by a layer that unsets the other."""
    given = {key for key in STEPS_OR_SIGMAS for layer in layers if layer.values.get(key) is not None}
    return [*([ConfigLayer("", dict.fromkeys(STEPS_OR_SIGMAS - given))] if len(given) == 1 else []), *layers]


def _config_values(file: ConfigLayer, above: Sequence[ConfigLayer]) -> tuple[ConfigLayer, set[str]]:
    """The values of a config file that apply under the layers `above`, and the keys that its user had set.

    A record holds every value, and as `asked` the keys that were set. If `above` names another model, recipe or compat
    profile, only those keys and the seed apply; if another sharding profile, all but that section.
    """
    asked, is_record = file.values.get(ASKED), PROVENANCE in file.values or ASKED in file.values
    if not is_record and file.values.get(CACHE) is not None:
        raise UsageError(
            f"{file.source}`{CACHE}` is not taken from a file: programs are code", "--compile-cache FOLDER"
        )
    others = {PROVENANCE, ASKED, CACHE, *(OUTPUT_KEYS if is_record else ())}
    own = replace(file, values={key: value for key, value in file.values.items() if key not in others})
    names = {kind: name for kind in KINDS if (name := _profile_name(own, kind)) is not None}
    if not is_record:
        return own, set(leaves(own))
    renamed = {kind for kind in names for layer in above if _profile_name(layer, kind) not in (None, names[kind])}
    if renamed and not isinstance(asked, list):
        raise UsageError(
            f"{file.source}this record does not list what was asked for, so its {min(renamed)} cannot be replaced",
            f"leave --{min(renamed)} out, or start from its prompt: --prompt",
        )
    kept = {str(key) for key in asked} if isinstance(asked, list) else set[str]()
    if renamed - {"sharding"}:
        own = replace(own, values=nested({key: value for key, value in leaves(own).items() if key in {*kept, "seed"}}))
    if "sharding" in renamed:
        kept = {key for key in kept if not key.startswith(SECTION)}
    return replace(own, values={key: own.values[key] for key in own.values if key not in renamed}), kept
