"""A checkpoint in diffusers' layout: a folder for each network, with its config and its tensors."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ltx2_cli.errors import UsageError
from ltx2_cli.models.arch import AudioVAEArch, ConnectorsArch, SchedulerArch, TransformerArch, VideoVAEArch
from ltx2_cli.models.config import Config, read_arch
from ltx2_cli.models.gemma import checkpoint_prefix, gemma_arch
from ltx2_cli.models.networks import BUILDERS, TEXT_ENCODER, Checkpoint
from ltx2_cli.models.parsed_checkpoint import ParsedCheckpoint
from ltx2_cli.models.tokenizer import check_tokenizer
from ltx2_cli.models.vocoder_with_bwe import vocoder_arch
from ltx2_cli.weights.checkpoint import AGAIN, TensorFiles, collect, read_json

CONFIG = "config.json"
SCHEDULER = "scheduler/scheduler_config.json"
# where each config lies, and what reads it and says what is wrong with it
READERS: dict[str, tuple[str, Callable[[Config, str], Any]]] = {
    "transformer": (f"transformer/{CONFIG}", partial(read_arch, TransformerArch)),
    "connectors": (f"connectors/{CONFIG}", partial(read_arch, ConnectorsArch)),
    "vae": (f"vae/{CONFIG}", partial(read_arch, VideoVAEArch)),
    "audio_vae": (f"audio_vae/{CONFIG}", partial(read_arch, AudioVAEArch)),
    "vocoder": (f"vocoder/{CONFIG}", vocoder_arch),
    "scheduler": (SCHEDULER, partial(read_arch, SchedulerArch)),
}


def open_folder(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`; raises `UsageError` with all that is missing, damaged, or does not belong
    together."""
    if not is_checkpoint(folder):
        files = ", ".join(file for file, _ in READERS.values())
        raise UsageError(f"{folder} is no LTX-2 checkpoint: it holds none of {files}", AGAIN)
    archs, misread = collect(
        {name: partial(_read_config, folder / file, reader) for name, (file, reader) in READERS.items()}
    )
    tensors, unopened = collect({name: partial(TensorFiles, folder / name) for name in BUILDERS})
    text = read_text_encoder(folder)
    return ParsedCheckpoint(
        folder,
        archs | text.archs,
        text.files | tensors,
        text.prefix,
        text.tokenizer,
        [*misread, *unopened, *text.problems],
    ).checkpoint()


def is_checkpoint(folder: Path) -> bool:
    """Whether any network of a checkpoint is archs in `folder`."""
    return any((folder / file).exists() for file, _ in READERS.values())


def read_text_encoder(folder: Path) -> ParsedCheckpoint:
    """The text encoder in a folder of its own, or in that of a checkpoint in diffusers' layout, and its tokenizer."""
    inside = (folder / TEXT_ENCODER).is_dir()
    place, tokenizer = (folder / TEXT_ENCODER, folder / "tokenizer") if inside else (folder, folder)
    archs, misread = collect({TEXT_ENCODER: partial(_read_config, place / CONFIG, gemma_arch)})
    files, unopened = collect({TEXT_ENCODER: partial(TensorFiles, place, ("model",))})
    prefix, unnamed = collect({name: partial(checkpoint_prefix, tensors) for name, tensors in files.items()})
    _, unspelt = collect({"tokenizer": partial(check_tokenizer, tokenizer)})
    problems = [*misread, *unopened, *unnamed, *unspelt]
    return ParsedCheckpoint(folder, archs, files, prefix.get(TEXT_ENCODER), tokenizer, problems)


def _read_config(path: Path, reader: Callable[[Config, str], Any]) -> Any:
    return reader(read_json(path), str(path))
