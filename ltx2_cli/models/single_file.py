"""A published single file: all networks but the text encoder in one, under the names they were trained with."""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from ltx2_cli.models.arch import VideoVAEArch
from ltx2_cli.models.config import LATER, Config, NetworkArch
from ltx2_cli.models.fit import Readings
from ltx2_cli.models.networks import BUILDERS, Checkpoint
from ltx2_cli.models.original.config import original_archs
from ltx2_cli.models.original.names import RENAMINGS, video_vae_renaming
from ltx2_cli.spec import SpecError
from ltx2_cli.weights.checkpoint import AGAIN, TensorFiles
from ltx2_cli.weights.declare import Scope, declared
from ltx2_cli.weights.findings import attempt, refuse
from ltx2_cli.weights.rename import Renaming

UNREAD = re.compile(r"(audio_)?vae\.per_channel_statistics\..*")  # more of them than normalising takes
PROJECTIONS = ("aggregate_embed", "video_aggregate_embed")
LATER_VERSIONS = (2, 3)  # the first of them
TEXT_HINT = "--text-encoder FOLDER or REPO names the Gemma-3 that the model was trained with"


def open_single_file(path: Path, text: Readings) -> Checkpoint:
    """The checkpoint in `path`, with a text encoder from elsewhere.

    Raises `SpecError` with all that is missing, damaged, not implemented, or does not belong together.
    """
    return read_single_file(path, text).checkpoint()


def read_single_file(path: Path, text: Readings) -> Readings:
    """What `path` holds, and beside it `text`. Raises `SpecError` where it holds nothing that describes it."""
    of_text = [SpecError(str(each), TEXT_HINT if each.hint == AGAIN else each.hint) for each in text.problems]
    opened, problems = attempt({"file": partial(TensorFiles, path.parent, (path.stem,))})
    configs, bare = attempt({name: partial(_config, file, path) for name, file in opened.items()})
    if not configs:
        refuse([*problems, *bare, *of_text])
    file, config = opened["file"], configs["file"]
    archs, misread = original_archs(config, partial(_text_features, file, path), str(path))
    problems = [*misread, *_contradictions(file, archs, path), *of_text]
    described, files = archs | text.described, _parts(file, archs) | text.files
    return Readings(path, described, files, text.prefix, text.tokenizer, problems, TEXT_HINT)


def _parts(file: TensorFiles, archs: Mapping[str, NetworkArch]) -> dict[str, TensorFiles]:
    """The tensors of each network that is described, under the names that it declares."""
    names = {
        name: _renaming(name, archs[name]).originals(declared(build(Scope("float32"), archs[name])))
        for name, build in BUILDERS.items()
        if name in archs
    }
    if names.keys() == BUILDERS.keys():
        claimed = {theirs for table in names.values() for theirs in table.values()}
        # What no network claims is shown to one of them, whose check will say that it is not known.
        names["transformer"] |= {name: name for name in file if name not in claimed and not UNREAD.fullmatch(name)}
    return {name: file.renamed(table) for name, table in names.items()}


def _renaming(name: str, arch: NetworkArch) -> Renaming:
    if isinstance(arch, VideoVAEArch):
        return video_vae_renaming(len(arch.block_out_channels), len(arch.decoder_block_out_channels))
    return RENAMINGS[name]


def _config(file: TensorFiles, path: Path) -> Config:
    config = file.config(absent="")
    if config is None:
        raise SpecError(f"{path} has no config in its metadata: it is not one of the published single files", AGAIN)
    return config


def _contradictions(file: TensorFiles, archs: Mapping[str, NetworkArch], path: Path) -> Iterator[SpecError]:
    """What the metadata say of the model's version, where the denoiser is another's."""
    stated = file.metadata().get("model_version", "")
    version = tuple(int(number) for number in re.split("[.-]", stated) if number.isdecimal())
    if not version or "transformer" not in archs:
        return
    made = archs["transformer"].generation
    if (version >= LATER_VERSIONS) != (made == LATER):
        yield SpecError(f"{path}: model_version is {stated!r}, the transformer in it is of {made}", AGAIN)


def _text_features(file: TensorFiles, path: Path) -> int:
    """How many numbers of a token of the text encoder the projection reads."""
    for name in PROJECTIONS:
        tensor = file.get(f"text_embedding_projection.{name}.weight")
        if tensor is not None and len(tensor.shape) == 2:
            return tensor.shape[1]
    raise SpecError(f"{path} holds no `text_embedding_projection`", AGAIN)
