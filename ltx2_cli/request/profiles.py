"""Merge profiles, files and flags into a `RunSpec`; write a `RunSpec` as a record and read it back."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from os.path import abspath, devnull, expanduser, isabs
from pathlib import Path
from typing import Any, NamedTuple

from ltx2_cli.errors import UsageError
from ltx2_cli.request.layers import (
    ASKED,
    ConfigLayer,
    flatten,
    read_file,
    read_setting,
    spec_from_values,
    spec_values,
    unknown_name_error,
)
from ltx2_cli.request.spec import RunSpec, ShardingSpec
from ltx2_cli.request.spelling import option_name, typed
from ltx2_cli.request.validation import validate
from ltx2_cli.request.yaml import Values, dump

# The key that names the profile of each kind, in stacking order
PROFILE_KEYS = {"model": "model", "recipe": "recipe", "compat": "compat", "sharding": "sharding.profile"}
AUTO = "auto"  # chosen by `resolve`, from the checkpoint and the devices
STEPS_OR_SIGMAS = {"num_inference_steps", "sigmas"}  # two spellings of one choice: the higher layer decides both
# None: the recipe's value
RECIPE_KEYS = (
    *("num_inference_steps", "sigmas", "sampler", "guidance", "stg_blocks", "second_stage"),
    *("image_crf", "image_strength", "keyframe_segments"),
)
SECTION = "sharding."  # begins the dotted keys of the sharding section
BY_RECIPE = "by_recipe"  # section of a model profile: recipe name -> values
CACHE = "compile_cache"  # never read from a file: compiled programs are code, and the file may be a stranger's
OUTPUT_KEYS = ("output", "save_latents", "base_output_directory")  # not repeated from a record
FILE, ENVIRONMENT, FLAG = "file", "environment", "flag"  # origins of values
PROVENANCE = "provenance"  # section of a record that is not part of the request
MODEL_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*(/[\w./-]+\.safetensors)?(@[^@\s]+)?")
SAFETENSORS, GGUF = ".safetensors", ".gguf"
DENOISER_FOLDER = "diffusion_models"  # the folder of a model's denoiser, where the model is split into several files
PUBLISHED_LAYERS = 48  # blocks of the published transformers; `stg_blocks` of a profile counts among these
GEMMA = "Lightricks/gemma-3-12b-it-qat-q4_0-unquantized"  # text encoder of every release, in an ungated repository


class RequestLayers(NamedTuple):
    """Requested values, above the values of profiles."""

    layers: dict[str, Values]  # values by dotted key, of each origin: `FILE`, `ENVIRONMENT`, `FLAG`; later wins
    keys: set[str]  # that a user set

    @property
    def values(self) -> Values:
        """The merged values."""
        return {key: value for layer in self.layers.values() for key, value in layer.items()}


def merge_layers(
    overrides: Mapping[str, object],
    config: str | Path | ConfigLayer | None = None,
    dotlist: Sequence[str] = (),
    environment: Mapping[str, object] | None = None,
) -> RequestLayers:
    """Merge the layers above the profiles, as in `read_spec`; `environment`, of `read_environment`, is above
    `config`."""
    flags: Values = {}
    for layer in [ConfigLayer("", dict(overrides)), *map(read_setting, dotlist)]:
        flags |= flatten(layer)
    above = {ENVIRONMENT: _without_alternative(dict(environment or {})), FLAG: _without_alternative(flags)}
    file = read_file(Path(config)) if isinstance(config, str | Path) else config or ConfigLayer("", {})
    below, kept = _config_values(file, {key: value for layer in above.values() for key, value in layer.items()})
    keys = kept | {*(environment or ()), *flags}
    return RequestLayers({FILE: _without_alternative(below), **above}, keys - {*OUTPUT_KEYS, CACHE})


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
    `{"guidance.video.stg_scale": 0.0}`. A key of `RECIPE_KEYS` that nobody sets is None; `complete_spec` fills it.
    Raises `UsageError` for an unknown name or key, a wrong type, a broken file, and everything `validate` finds.
    """
    return validated_spec(merge_layers({**(overrides or {}), **keys}, config, dotlist))


def validated_spec(asked: RequestLayers, later: Collection[str] = ()) -> RunSpec:
    """Build and validate the request. Raises `UsageError` with all problems but those of the keys `later`."""
    spec = build_spec(asked.values)
    validate(spec, later)
    steps = spec.num_inference_steps if spec.sigmas is None else len(spec.sigmas) - 1
    return replace(spec, num_inference_steps=steps, asked=tuple(sorted(asked.keys)))


def build_spec(asked: Values) -> RunSpec:
    """Build the request of these values and of the profiles that they name, without validation."""
    published = {key: value for key, value in _profile_values(asked).items() if not _is_of_recipe(key)}
    return spec_from_values({**default_values(), **published, **asked})


def origins(asked: RequestLayers, complete: RunSpec, model_version: str | None) -> dict[str, str]:
    """The origin of each value of a complete request, by dotted key: a profile by its kind and name,
    else `FILE`, `ENVIRONMENT`, `FLAG` or `default`."""
    values = {key: value for key, value in asked.values.items() if value is not None or not _is_of_recipe(key)}
    layers = profile_layers({**values, "recipe": complete.recipe}, model_version)
    layers |= {name: {key: layer[key] for key in layer.keys() & values.keys()} for name, layer in asked.layers.items()}
    found = {key: name for name, layer in layers.items() for key in layer}
    return {**found, "num_inference_steps": found["sigmas"]} if "sigmas" in values else found


def complete_spec(
    spec: RunSpec, recipe: str, sharding: str, model_version: str | None, layers: int = PUBLISHED_LAYERS
) -> RunSpec:
    """`spec` over its profiles, with this recipe, and with this sharding profile where it says `auto`. They fill what
    is None of `RECIPE_KEYS`, and under `auto` the sharding that nobody asked for. A model without a profile has that of
    `model_version`, with STG blocks rescaled to `layers`."""
    values = spec_values(spec)
    asked = {key: value for key, value in values.items() if value is not None or not _is_of_recipe(key)}
    asked["recipe"] = recipe
    if spec.sharding.profile == AUTO:
        asked = {key: value for key, value in asked.items() if key in spec.asked or not key.startswith(SECTION)}
        asked["sharding.profile"] = sharding
    return replace(spec_from_values({**_profile_values(asked, model_version, layers), **asked}), asked=spec.asked)


def recipe_defaults(
    spec: RunSpec, recipe: str, model_version: str | None = None, layers: int = PUBLISHED_LAYERS
) -> RunSpec:
    """The profiles of `spec` with this recipe, and nothing else set."""
    named = {"model": spec.model, "recipe": recipe, "compat": spec.compat, "sharding.profile": AUTO}
    return spec_from_values({**_profile_values(named, model_version, layers), **named})


def read_sharding(name: str) -> ShardingSpec:
    """The sharding profile `name`, or that in a YAML file."""
    return spec_from_values({**default_values(), **_profile("sharding", name)}).sharding


@cache
def default_values() -> Values:
    """The values of `default.yaml` by dotted key; not to be changed."""
    return flatten(read_file(configs() / "default.yaml"))


def profile_names(kind: str) -> list[str]:
    """Names of the shipped profiles of one kind: the files in `configs/<kind>`."""
    return sorted(path.stem for path in (configs() / kind).glob("*.yaml"))


def configs() -> Path:
    """The folder of shipped YAML files: inside an installed package, else at the root of the checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def user_cache() -> Path:
    """The user's cache folder of this program. Without a home it is a path that cannot be created: nothing is kept."""
    home = expanduser("~")
    cache = Path(home, ".cache") if isabs(home) else Path(devnull, "HOME is not set")
    return Path(os.environ.get("XDG_CACHE_HOME") or cache) / "ltx2"


def program_cache() -> Path:
    """The folder of compiled programs in the user's cache."""
    return user_cache() / "programs"


def to_yaml(spec: RunSpec, provenance: Mapping[str, Any] | None = None) -> str:
    """`spec` as a YAML record: `read_spec(config=...)` gives an equal one. `asked` and `provenance` come last."""
    extra = {ASKED: list(spec.asked), **({PROVENANCE: provenance} if provenance else {})}
    seed = {"seed": spec.seed[0]} if spec.seed and len(spec.seed) == 1 else {}
    return dump({**asdict(spec), CACHE: None, **seed, **extra})


def checkpoint_names(checkpoint: str) -> list[str]:
    """The names of a checkpoint: the last element of an existing path, or each element of REPO[/FILE]."""
    path = Path(expanduser(checkpoint))
    # A link keeps its own name: those in the hub's cache lead to files that are named by a checksum.
    return [Path(abspath(path)).name] if path.exists() else checkpoint.split("@")[0].split("/")


def _is_of_recipe(key: str) -> bool:
    return key.split(".")[0] in RECIPE_KEYS


def _without_alternative(values: Values) -> Values:
    """`values`; if they set only one of `STEPS_OR_SIGMAS`, with None for the other."""
    given = {key for key in STEPS_OR_SIGMAS if values.get(key) is not None}
    return {**values, **dict.fromkeys(STEPS_OR_SIGMAS - given)} if len(given) == 1 else values


def _profile_values(asked: Values, model_version: str | None = None, layers: int = PUBLISHED_LAYERS) -> Values:
    """The defaults, overridden by the profile of the model version and by those that `asked` or the defaults name."""
    pages = profile_layers(asked, model_version, layers)
    return {key: value for page in pages.values() for key, value in page.items()}


def profile_layers(
    asked: Values, model_version: str | None = None, layers: int = PUBLISHED_LAYERS
) -> dict[str, Values]:
    """The values of each profile by its kind and name, after those of `default`; later wins."""
    values = default_values()
    pages = {"default": dict(values)}
    names: Values = {kind: asked.get(key, values[key]) for kind, key in PROFILE_KEYS.items()}
    if model_version:
        page = dict(_shipped_profile("model", model_version))
        blocks = (round(block * layers / PUBLISHED_LAYERS) for block in page["stg_blocks"])
        pages["model " + model_version] = {**page, "stg_blocks": tuple(min(block, layers - 1) for block in blocks)}
    if {key for key in default_values() if key.startswith(SECTION)} <= asked.keys():
        names["sharding"] = AUTO  # the section is complete, as in a record: no profile is read
    for kind, name in names.items():
        pages[f"{kind} {name}"] = page = dict(_profile(kind, name))
        if kind == "recipe":
            prefix = f"{BY_RECIPE}.{name}."
            below = {key: value for values in pages.values() for key, value in values.items()}
            page |= {key.removeprefix(prefix): below[key] for key in below if key.startswith(prefix)}
    return pages


def _profile(kind: str, name: str) -> Values:
    """The values of a profile. A model may also be a folder, file or repository; a sharding profile may be a file."""
    if kind in ("recipe", "sharding") and name == AUTO:
        return {}
    if kind == "sharding" and ("/" in name or name.endswith((".yaml", ".yml"))):
        return _read_profile(kind, Path(expanduser(name)), name)
    if kind == "model" and name not in profile_names(kind):
        return _unpublished_model(name)
    return _shipped_profile(kind, name)


@cache
def _shipped_profile(kind: str, name: str) -> Values:
    known = profile_names(kind)
    if name not in known:
        also = {"recipe": f", `{AUTO}`", "sharding": f", `{AUTO}`, or a YAML file"}
        raise unknown_name_error("sharding profile" if kind == "sharding" else kind, name, known, also.get(kind, ""))
    return _read_profile(kind, configs() / kind / f"{name}.yaml", name)


def _read_profile(kind: str, path: Path, name: str) -> Values:
    file = read_file(path)
    own = dict(file.values)
    parent, by_recipe = own.pop("extends", None), own.pop(BY_RECIPE, {}) if kind == "model" else {}
    values = flatten(replace(file, values={"sharding": {**own, "profile": name}} if kind == "sharding" else own))
    for recipe, section in by_recipe.items():
        values |= {f"{BY_RECIPE}.{recipe}.{key}": value for key, value in flatten(ConfigLayer("", section)).items()}
    return {**_shipped_profile(kind, str(parent)), **values} if parent else values


def _unpublished_model(model: str) -> Values:
    """The values of a folder, a single file or a repository; its model version is known once it is open. Raises
    `UsageError` for a name that is none of them."""
    place = expanduser(model)
    path = Path(place)
    if path.is_dir() or (path.is_file() and path.suffix == SAFETENSORS) or MODEL_REPOSITORY.fullmatch(model):
        last = checkpoint_names(place)[-1]
        text = (
            {"text_encoder": GEMMA} if last.endswith(SAFETENSORS) and Path(place).parent.name != DENOISER_FOLDER else {}
        )
        return {"checkpoint": place, "model_name": last.removesuffix(SAFETENSORS), **text}
    if model.partition("@")[0].endswith(GGUF):
        hint = f"{typed('transformer', model)} takes it, beside a model with the other networks"
        raise UsageError(f"`{model}` holds the denoiser alone, as every GGUF file", hint)
    others = "a folder, a .safetensors file, or a repository REPO[/FILE][@REV]"
    if "/" in model:
        what = f"`{model}` is no .safetensors file" if path.exists() else f"there is no folder or file `{model}`"
        raise UsageError(what, f"a model is a profile, {others}")
    raise unknown_name_error("model", model, profile_names("model"), f", {others}")


def _config_values(file: ConfigLayer, flags: Values) -> tuple[Values, set[str]]:
    """The values of a config file that apply under the flags, and the keys that its user had set.

    A record holds every value, and as `asked` the keys that were set. If a flag names another model, recipe or compat
    profile, only those keys and the seed apply; if another sharding profile, all but that section.
    """
    asked, is_record = file.values.get(ASKED), PROVENANCE in file.values or ASKED in file.values
    if not is_record and file.values.get(CACHE) is not None:
        hint = typed("compile_cache", "FOLDER")
        raise UsageError(f"{file.source}`{CACHE}` is not taken from a file: programs are code", hint)
    others = {PROVENANCE, ASKED, CACHE, *(OUTPUT_KEYS if is_record else ())}
    values = flatten(replace(file, values={key: value for key, value in file.values.items() if key not in others}))
    if not is_record:
        return values, set(values)
    named = {kind: key for kind, key in PROFILE_KEYS.items() if key in values}
    renamed = {kind for kind, key in named.items() if flags.get(key, values[key]) != values[key]}
    if renamed and not isinstance(asked, list):
        raise UsageError(
            f"{file.source}this record does not list what was asked for, so its {min(renamed)} cannot be replaced",
            f"leave {option_name(PROFILE_KEYS[min(renamed)])} out, or start from its prompt: {option_name('prompt')}",
        )
    kept = {str(key) for key in asked} if isinstance(asked, list) else set[str]()
    if renamed - {"sharding"}:
        values = {key: value for key, value in values.items() if key in {*kept, "seed"}}
    if "sharding" in renamed:
        kept = {key for key in kept if not key.startswith(SECTION)}
        values = {key: value for key, value in values.items() if not key.startswith(SECTION)}
    return {key: value for key, value in values.items() if key not in {PROFILE_KEYS[kind] for kind in renamed}}, kept
