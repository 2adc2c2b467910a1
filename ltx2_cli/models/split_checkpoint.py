"""A checkpoint that is split into several files, as LTX-2.5 is published: the denoiser with the connectors in a folder
`diffusion_models`, and from the folder above it the autoencoders, and the text encoder with its projections, its config
and its tokenizer. Their tensors together are those of a single file."""

from pathlib import Path
from typing import Any

from ltx2_cli.errors import UsageError
from ltx2_cli.models.config import RENAMINGS, SECTIONS, Config
from ltx2_cli.models.gemma import MODEL_TYPES
from ltx2_cli.models.tokenizer import TOKENIZER_TENSOR
from ltx2_cli.request.spelling import typed
from ltx2_cli.weights.checkpoint import AGAIN, TensorFiles, abbreviate, collect, raise_all, read_json
from ltx2_cli.weights.published import AUDIO_VAE_FILE, TEXT_ENCODER_FILE, VIDEO_VAE_FILE

TEXT_PROJECTION = "text_embedding_projection."
OWN_GEMMA = "LTX-2.5 was trained with a Gemma-4 of its own, in one file with its projections"
GEMMA_CONFIG, GEMMA_SOURCE, GEMMA_VERSION = "gemma_config", "gemma_source_checkpoint", "gemma_version"  # of metadata


def text_encoder_beside(denoiser: Path) -> Path:
    """The place of the text encoder's file beside that of a denoiser."""
    return denoiser.absolute().parent.parent / TEXT_ENCODER_FILE


def read_split(path: Path, denoiser: TensorFiles, text_encoder: Path) -> tuple[TensorFiles, Config]:
    """The tensors and the metadata of the checkpoint with this denoiser, as a single file has them, without the text
    encoder's; and its config. A section that no file states is as published. Raises `UsageError` for files that are
    missing or damaged, and for a text encoder that the denoiser was not trained with."""
    root = path.absolute().parent.parent
    named = {"vae": root / VIDEO_VAE_FILE, "audio_vae": root / AUDIO_VAE_FILE, "text": text_encoder}
    if absent := [str(place) for place in named.values() if not place.exists()]:
        here = f"each in its folder beside `{path.parent.name}`, or {typed('text_encoder', 'FILE')}"
        raise UsageError(f"{path} holds the denoiser alone, and there is no {abbreviate(absent)}", f"{here}; {AGAIN}")
    others, problems = collect({name: _reader(place) for name, place in named.items()})
    raise_all(problems)
    vae, audio_vae, text = others["vae"], others["audio_vae"], others["text"]
    single = denoiser.renamed(_prefixed(denoiser, RENAMINGS["transformer"].prefix))
    single.update(vae.renamed(_prefixed(vae, RENAMINGS["vae"].prefix)))
    single.update(audio_vae)
    single.update({name: text[name] for name in text if name.startswith(TEXT_PROJECTION)})
    config: Config = {section: {} for section in SECTIONS}
    for place, files in {path: denoiser, named["vae"]: vae, named["audio_vae"]: audio_vae}.items():
        stated = _json(files, "config", place)
        config |= {section: stated[section] for section in SECTIONS if isinstance(stated.get(section), dict)}
    wanted = _json(denoiser, GEMMA_SOURCE, path).get(GEMMA_VERSION)
    found = _json(text, GEMMA_CONFIG, text_encoder).get(GEMMA_VERSION)
    if wanted is not None and found != wanted:
        raise UsageError(f"{path} was trained with the text encoder {wanted}, {text_encoder} is {found}", AGAIN)
    return single, config


def packed_config(path: Path) -> Config:
    """The config of the text encoder in a file. Raises `UsageError` for a text encoder that is not LTX-2.5's."""
    if path.is_dir():
        described = path / "config.json"
        kind = read_json(described).get("model_type") if described.exists() else None
        raise UsageError(f"{path} holds {MODEL_TYPES.get(str(kind), 'no Gemma')}, {OWN_GEMMA}", AGAIN)
    files = TensorFiles(path)
    if GEMMA_CONFIG not in files.metadata or TOKENIZER_TENSOR not in files:
        lacking = f"it has no {GEMMA_CONFIG} in its metadata, or no `{TOKENIZER_TENSOR}`"
        raise UsageError(f"{path} holds another text encoder: {lacking}; {OWN_GEMMA}", AGAIN)
    return _json(files, GEMMA_CONFIG, path)


def _reader(place: Path) -> Any:
    return lambda: TensorFiles(place)


def _prefixed(files: TensorFiles, prefix: str) -> dict[str, str]:
    """Names in a single file by those in a file of one network, which may lack their prefix."""
    return {name if name.startswith(prefix) else prefix + name: name for name in files}


def _json(files: TensorFiles, key: str, place: Path) -> Config:
    """The JSON object under a key of a file's metadata, empty if there is none."""
    if (value := files.config(absent="{}", key=key)) is None:
        raise UsageError(f"{place}: {key} in its metadata is not a JSON object", AGAIN)
    return value
