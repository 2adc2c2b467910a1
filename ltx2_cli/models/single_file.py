"""A published single file: all networks but the text encoder in one, under the names they were trained with."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ltx2_cli.models.config import Config
from ltx2_cli.models.gemma import Gemma, checkpoint_prefix
from ltx2_cli.models.networks import TEXT_ENCODER, Checkpoint, abstract_networks, open_text_encoder
from ltx2_cli.models.original import RENAMINGS, video_vae_renaming
from ltx2_cli.models.original_config import original_archs
from ltx2_cli.spec import DType, SpecError
from ltx2_cli.weights.checkpoint import AGAIN, Index, Tensor, TensorFiles
from ltx2_cli.weights.declare import Scope, declared

PROJECTIONS = ("aggregate_embed", "video_aggregate_embed")


class Part(TensorFiles):
    """One network's tensors of a single file, under the names that are declared."""

    def __init__(self, file: TensorFiles, names: Mapping[str, str]):
        self.folder, self._file = file.folder, file
        self._names = {ours: theirs for ours, theirs in names.items() if theirs in file}

    def __getitem__(self, name: str) -> Tensor:
        return self._file[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def read(self, name: str, index: Index) -> np.ndarray:
        return self._file.read(self._names[name], index)


def open_single_file(path: Path, text_encoder: Path) -> Checkpoint:
    """The checkpoint in `path`, with the text encoder in the folder `text_encoder`.

    Raises `SpecError` for what is missing, damaged or not implemented.
    """
    file = TensorFiles(path.parent, (path.stem,))
    config = _config(file, path)
    arch = original_archs(config, _text_states(file, config, path), str(path))
    recipe, text_files, tokenizer = open_text_encoder(text_encoder)
    prefix = checkpoint_prefix(text_files)
    vae = video_vae_renaming(len(arch.video_vae.block_out_channels), len(arch.video_vae.decoder_block_out_channels))
    renamings = {**RENAMINGS, "vae": vae}
    text = Gemma(Scope("float32", prefix), recipe)
    modules = abstract_networks(arch, text, DType.float32)._asdict()
    names = {name: renaming.originals(declared(modules[name])) for name, renaming in renamings.items()}
    claimed = {theirs for table in names.values() for theirs in table.values()}
    # What no network claims is shown to one of them, whose check will say that it is not known.
    names["transformer"] |= {name: name for name in file if name not in claimed}
    files = {TEXT_ENCODER: text_files} | {name: Part(file, table) for name, table in names.items()}
    return Checkpoint(path, arch, recipe, prefix, files, tokenizer)


def _config(file: TensorFiles, path: Path) -> Config:
    try:
        config = json.loads(file.metadata().get("config", ""))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise SpecError(f"{path} has no config in its metadata: it is not one of the published single files", AGAIN)
    return config


def _text_states(file: TensorFiles, config: Config, path: Path) -> int:
    """How many hidden states of the text encoder the projection reads."""
    for name in PROJECTIONS:
        tensor = file.get(f"text_embedding_projection.{name}.weight")
        if tensor is not None:
            return tensor.shape[1] // config.get("transformer", {}).get("caption_channels", 3840)
    raise SpecError(f"{path} holds no `text_embedding_projection`", AGAIN)
