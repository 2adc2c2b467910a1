"""Open the networks of a checkpoint in two layouts: diffusers' folder, and a published single file, which holds all but
the text encoder."""

import re
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from flax import nnx

from ltx2_cli.errors import UsageError
from ltx2_cli.models.arch import Arch, TransformerArch
from ltx2_cli.models.config import (
    LAYOUTS,
    LTX2,
    LTX2_3,
    LTX2_5,
    RENAMINGS,
    RULES,
    Config,
    config_problems,
    stated_sizes,
)
from ltx2_cli.models.gemma import Gemma, gemma_arch, language_model
from ltx2_cli.models.networks import (
    BUILDERS,
    DENOISER,
    READERS,
    TEXT_ENCODER,
    Checkpoint,
    published_config,
    published_text_encoder,
)
from ltx2_cli.models.split_checkpoint import packed_config, read_split, text_encoder_beside
from ltx2_cli.models.tokenizer import check_tokenizer
from ltx2_cli.request.spelling import typed
from ltx2_cli.weights.checkpoint import AGAIN, TensorFiles, abbreviate, collect, raise_all, read_json
from ltx2_cli.weights.declare import Scope, declared
from ltx2_cli.weights.load import mismatches
from ltx2_cli.weights.published import NETWORKS

ONE_RELEASE = "take all networks from one release, or name another FOLDER or REPO as the model"
TEXT_HINT = "name the Gemma that the model was trained with, a FOLDER or REPO, as the text encoder"
CONFIG_FILES = {name: f"{name}/config.json" for name in READERS} | {"scheduler": "scheduler/scheduler_config.json"}
UNREAD = re.compile(r"(audio_)?vae\.per_channel_statistics\..*")  # more of them than normalising takes
TEXT_PROJECTIONS = tuple(f"text_embedding_projection.{stream}aggregate_embed.weight" for stream in ("", "video_"))
DENOISER_TENSOR = "model.diffusion_model.patchify_proj.weight"  # a tensor of every denoiser
# tensors of other networks
NOT_OF_DENOISER = re.compile(r"(?!model\.diffusion_model\.)|.*(_embeddings_connector|text_embedding_projection)\.")
# Tensors that a version has and those before it have not, the newest first; and the first of its numbers.
VERSION_TENSORS = {
    LTX2_5: "model.diffusion_model.keyframes_abs_pos_embedding",
    LTX2_3: "model.diffusion_model.prompt_adaln_single.linear.weight",
}
FIRST_NUMBERS = {LTX2_5: (2, 5), LTX2_3: (2, 3)}


@dataclass(frozen=True)
class _ParsedCheckpoint:
    """The readable part of a checkpoint, and the problems of the rest."""

    where: Path
    archs: dict[str, Any]  # what each network is, by its config
    files: dict[str, TensorFiles]
    tokenizer: Path
    problems: list[UsageError]
    text_hint: str = AGAIN  # what to do where the text encoder is the wrong one
    sizes: Mapping[str, Config] = field(default_factory=dict)  # of each network, by the metadata of a single file

    def checkpoint(self) -> Checkpoint:
        """The checkpoint. Raises `UsageError` with everything that is wrong, as far as what was read tells."""
        misfits = [*self._sizes(), *self._tensors()]
        if misfits:
            source = "its metadata describes" if self.sizes else "its configs describe"
            heading = f"{self.where} does not hold what {source}"
            misfits[0] = UsageError(f"{heading}. {misfits[0]}", misfits[0].hint)
        raise_all([*self.problems, *self._model_versions(), *misfits])
        return Checkpoint(self.where, Arch(**self.archs), self.files, self.tokenizer)

    def _sizes(self) -> Iterator[UsageError]:
        """Sizes that are equal wherever networks were made for each other, and are not here; a text encoder without
        tensors is not that of this checkpoint."""
        known = self.archs.keys() - ({TEXT_ENCODER} - self.files.keys())
        for first, second, meaning in RULES["equal"]:
            places = [place.split(".", 1) for place in (first, second)]
            if all(network in known for network, _ in places):
                size, other = (attrgetter(key)(self.archs[network]) for network, key in places)
                if size != other:
                    yield UsageError(f"{meaning} differ: {size} and {other}", self._hint(places[0][0]))

    def _model_versions(self) -> Iterator[UsageError]:
        """Networks that fit and yet mean nothing to each other: latents and spectra are learnt together."""
        known: dict[str, list[str]] = {}
        own = self.archs[DENOISER].model_version if DENOISER in self.archs else None
        for name, arch in self.archs.items():
            if name != TEXT_ENCODER and arch.model_version is not None:
                version = own if own and arch.model_version == LAYOUTS.get(own) else arch.model_version
                known.setdefault(version, []).append(name)
        if len(known) > 1:
            versions = "; ".join(f"{model_version}: {', '.join(names)}" for model_version, names in known.items())
            mixed = f"{self.where} mixes networks of different model versions, which were not trained together"
            yield UsageError(f"{mixed} ({versions})", ONE_RELEASE)

    def _tensors(self) -> Iterator[UsageError]:
        """Tensors that differ from the declarations of their network."""
        for name, files in self.files.items():
            if name in self.archs:
                found = mismatches(_abstract_network(name, self.archs[name]), files)
                if found and (sizes := self.sizes.get(name)):
                    found.append(f"stated {abbreviate([f'{key} {size}' for key, size in sizes.items()])}")
                for mismatch in found:
                    yield UsageError(f"{name}: {mismatch}", self._hint(name))

    def _hint(self, network: str) -> str:
        return self.text_hint if network == TEXT_ENCODER else AGAIN


# Built once for checkpoints of one kind: nobody changes them.
@lru_cache(maxsize=10)
def _abstract_network(name: str, arch: Any) -> nnx.Module:
    return (BUILDERS | {TEXT_ENCODER: Gemma})[name](Scope("float32"), arch)


def is_checkpoint(folder: Path) -> bool:
    """Whether `folder` has the config of any network of a checkpoint."""
    return any((folder / file).exists() for file in CONFIG_FILES.values())


def open_folder(folder: Path, networks: Collection[str] = NETWORKS) -> Checkpoint:
    """The checkpoint in `folder`, with the tensors of these networks; raises `UsageError` with all that is missing,
    damaged, or does not belong together."""
    if not is_checkpoint(folder):
        raise UsageError(f"{folder} is no LTX-2 checkpoint: it holds none of {', '.join(CONFIG_FILES.values())}", AGAIN)
    readings = {name: partial(_read_config, folder / CONFIG_FILES[name], reader) for name, reader in READERS.items()}
    archs, bad_configs = collect(readings)
    held = [name for name in BUILDERS if name in networks]
    tensors, bad_files = collect({name: partial(TensorFiles, folder / name) for name in held})
    text = _read_text_encoder(folder, weights=TEXT_ENCODER in networks)
    problems = [*bad_configs, *bad_files, *text.problems]
    return _ParsedCheckpoint(folder, archs | text.archs, text.files | tensors, text.tokenizer, problems).checkpoint()


def _read_text_encoder(folder: Path, weights: bool = True) -> _ParsedCheckpoint:
    """The text encoder in a folder of its own, or in that of a checkpoint in diffusers' layout, and its tokenizer; or
    what it is alone, without weights."""
    inside = (folder / TEXT_ENCODER).is_dir()
    place, tokenizer = (folder / TEXT_ENCODER, folder / "tokenizer") if inside else (folder, folder)
    archs, bad_config = collect({TEXT_ENCODER: partial(_read_config, place / "config.json", gemma_arch)})
    if not weights:
        return _ParsedCheckpoint(folder, archs, {}, tokenizer, bad_config)
    files, bad_files = collect({TEXT_ENCODER: lambda: language_model(TensorFiles(place, ("model",)))})
    _, bad_tokenizer = collect({"tokenizer": partial(check_tokenizer, tokenizer)})
    return _ParsedCheckpoint(folder, archs, files, tokenizer, [*bad_config, *bad_files, *bad_tokenizer])


def _read_text_file(path: Path) -> _ParsedCheckpoint:
    """The text encoder in the file of a split checkpoint, and its tokenizer there."""
    config, problems = collect({TEXT_ENCODER: partial(packed_config, path)})
    archs, bad_config = collect({name: partial(gemma_arch, stated, str(path)) for name, stated in config.items()})
    files, bad_files = collect({name: lambda: language_model(TensorFiles(path)) for name in config})
    _, bad_tokenizer = collect({name: partial(check_tokenizer, path) for name in config})
    return _ParsedCheckpoint(path, archs, files, path, [*problems, *bad_config, *bad_files, *bad_tokenizer])


def _read_config(path: Path, reader: Callable[[Config, str], Any]) -> Any:
    return reader(read_json(path), str(path))


def open_file(path: Path, text_encoder: Path | None) -> Checkpoint:
    """The checkpoint in a published single file and a text encoder's folder; None: the published one, without tensors.
    Or the one that is split, by the file of its denoiser, and a text encoder's file; None: the one beside it. The
    networks are those of the published model whose tensors the file has, in the sizes that its metadata states. Raises
    `UsageError` as `open_folder`."""
    whole, problems = collect({"": partial(TensorFiles, path)})
    denoiser = next((file for file in whole.values() if lone_denoiser(file) == LTX2_5), None)
    place = text_encoder or (text_encoder_beside(path) if denoiser else None)
    text = _ParsedCheckpoint(path, {}, {}, path, [])
    if place:
        text = (_read_text_file if denoiser else _read_text_encoder)(place)
    hints = {AGAIN: TEXT_HINT}
    text_problems = [UsageError(str(problem), hints.get(problem.hint, problem.hint)) for problem in text.problems]
    reading = {name: partial(_single_file, path, file) for name, file in whole.items()}
    opened, refused = collect({"": partial(read_split, path, denoiser, place)} if denoiser and place else reading)
    if problems or refused:
        raise_all([*problems, *refused, *text_problems])
    file, config = opened[""]
    version = _version(file)
    sizes = _read_sizes(file, config)
    archs, bad_sizes = _read_archs(sizes, version, path)
    problems = [*config_problems(config, version, str(path)), *bad_sizes, *_other_version(file, version, path)]
    files = {} if bad_sizes else _parts(file, archs)
    if place:
        archs |= text.archs
    elif DENOISER in archs:
        archs[TEXT_ENCODER] = published_text_encoder(archs[DENOISER])
    problems += text_problems
    return _ParsedCheckpoint(path, archs, files | text.files, text.tokenizer, problems, TEXT_HINT, sizes).checkpoint()


def _read_sizes(file: TensorFiles, config: Config) -> dict[str, Config]:
    """The sizes that a single file states. Its config does not count the states of the text encoder: the projection of
    all of them does."""
    sizes = stated_sizes(config)
    width = sizes["connectors"].get("caption_channels")
    features = next((file[name].shape[-1] for name in TEXT_PROJECTIONS if name in file), 0)
    if isinstance(width, int) and 0 < width <= features:
        sizes["connectors"]["text_proj_in_factor"] = features // width
    return sizes


def _read_archs(sizes: Mapping[str, Config], version: str, path: Path) -> tuple[dict[str, Any], list[UsageError]]:
    """The networks of a published model in other sizes, and why some cannot be."""
    configs = {name: published_config(version, name) | sizes.get(name, {}) for name in READERS}
    # The reference for single files perturbs attention whenever it is asked to, without a key for it.
    configs["transformer"]["perturbed_attn"] = True
    return collect({name: partial(read, configs[name], f"{path}, {name}") for name, read in READERS.items()})


def open_denoiser(path: Path, arch: TransformerArch) -> TensorFiles:
    """The denoiser's tensors in a GGUF or safetensors file, which may have other networks too, under the names that it
    declares. Raises `UsageError` if they are of another denoiser."""
    file = TensorFiles(path)
    names = _full_names(file)
    if DENOISER_TENSOR not in names:
        raise UsageError(f"{path} holds no denoiser of LTX-2: no tensor {DENOISER_TENSOR}", "name another file")
    if (version := _version(names)) != arch.model_version:
        sentence = f"{path} holds the denoiser of {version}, the model is {arch.model_version}"
        raise UsageError(sentence, f"name a model of the same version: {typed('model', version)}")
    network = _abstract_network(DENOISER, arch)
    table = RENAMINGS[DENOISER].originals(declared(network))
    strange = names.keys() - {*table.values()}
    table |= {names[full]: full for full in strange if not NOT_OF_DENOISER.match(full)}
    tensors = file.renamed({ours: names[full] for ours, full in table.items() if full in names})
    if found := mismatches(network, tensors):
        sentence = f"{path} does not hold the denoiser of this model: {'; '.join(found)}"
        raise UsageError(sentence, "name the file of another denoiser, or the model that it was made for")
    return tensors


def lone_denoiser(file: TensorFiles) -> str | None:
    """The version of the denoiser that a file holds without the video autoencoder; None for another file."""
    names = _full_names(file)
    if DENOISER_TENSOR not in names or any(name.startswith(RENAMINGS["vae"].prefix) for name in file):
        return None
    return _version(names)


def _version(names: Container[str]) -> str:
    """The model version of a denoiser, by the names of its tensors in a single file."""
    return next((version for version, mark in VERSION_TENSORS.items() if mark in names), LTX2)


def _full_names(file: TensorFiles) -> dict[str, str]:
    """The names in a file by those in a single file with all networks. A file of the denoiser alone may lack their
    prefix."""
    prefix = RENAMINGS[DENOISER].prefix
    prefixed = any(name.startswith(prefix) for name in file)
    return {name if prefixed else prefix + name: name for name in file}


def _single_file(path: Path, file: TensorFiles) -> tuple[TensorFiles, Config]:
    if lone_denoiser(file):
        hint = f"{typed('transformer', path)} takes it, beside a model with the other networks"
        raise UsageError(f"{path} holds the denoiser alone", hint)
    if (config := file.config(absent="")) is None:
        raise UsageError(f"{path} has no config in its metadata: it is not one of the published single files", AGAIN)
    return file, config


def _parts(file: TensorFiles, archs: dict[str, Any]) -> dict[str, TensorFiles]:
    """The tensors of each network, under the names that it declares."""
    networks = {name: _abstract_network(name, archs[name]) for name in BUILDERS}
    names = {name: RENAMINGS[name].originals(declared(network)) for name, network in networks.items()}
    claimed = {native for table in names.values() for native in table.values()}
    # What no network claims is shown to one of them, whose check will say that it is not known.
    names["transformer"] |= {name: name for name in file if name not in claimed and not UNREAD.fullmatch(name)}
    return {name: file.renamed(table) for name, table in names.items()}


def _other_version(file: TensorFiles, version: str, path: Path) -> Iterator[UsageError]:
    """A model version in the metadata that contradicts the tensors."""
    stated = file.metadata.get("model_version", "")
    numbers = tuple(int(number) for number in re.split("[.-]", stated) if number.isdecimal())
    named = next((name for name, first in FIRST_NUMBERS.items() if numbers >= first), LTX2)
    if numbers and named != version:
        yield UsageError(f"{path}: model_version is {stated!r}, the transformer in it is of {version}", AGAIN)
