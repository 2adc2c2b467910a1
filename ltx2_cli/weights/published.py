"""The catalogue of published checkpoints, text encoders, upscalers and LoRAs, and the files of a checkpoint. Facts
alone: listed without a network and without jax."""

import csv
from dataclasses import dataclass
from pathlib import Path

NETWORKS = ("text_encoder", "connectors", "transformer", "vae", "audio_vae", "vocoder")  # the folders of a checkpoint
ENDINGS = (".safetensors", "-?????-of-?????.safetensors", ".safetensors.index.json")


def _files(network: str) -> tuple[str, ...]:
    """Patterns of one network's files. Some repositories have a second copy of the text encoder under another stem."""
    stems = ("model",) if network == "text_encoder" else ("diffusion_pytorch_model", "model")
    return (f"{network}/config.json", *(f"{network}/{stem}{ending}" for stem in stems for ending in ENDINGS))


FOLDER_FILES = (
    *(pattern for network in NETWORKS for pattern in _files(network)),
    "tokenizer/*",
    "scheduler/scheduler_config.json",
)


def checkpoint_files(transformer: str | None) -> tuple[str, ...]:
    """Patterns of the files that are needed of a checkpoint's folder, without weights of the denoiser if a file has
    them that is named `transformer`."""
    own = {pattern for pattern in _files("transformer") if not pattern.endswith("config.json")} if transformer else {}
    return tuple(pattern for pattern in FOLDER_FILES if pattern not in own)


TEXT_ENCODER_FILES = (  # in a repository of its own, or in that of a checkpoint
    "config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    *(f"model{ending}" for ending in ENDINGS),
    *_files("text_encoder"),
)
UPSAMPLER = "latent_upsampler"  # the folder of an upsampler beside the networks of a checkpoint
UPSAMPLER_FILES = _files(UPSAMPLER)

FOLDER, EMBEDDED = "folder", "in this package"  # forms; another is a single file
MODEL, TEXT_ENCODER, LORA = "models", "text encoders", "LoRAs"  # kinds; another is an upscaler


@dataclass(frozen=True)
class CatalogEntry:
    """A download. `name` is a repository, or a repository and a file in it."""

    kind: str
    name: str
    model_version: str
    recipe: str  # how a model was made to be sampled; nothing for what is not one
    form: str
    size: int  # bytes
    exact: bool = True  # or rounded as it was stated
    gated: bool = False  # terms are to be accepted first

    @property
    def parts(self) -> set[str]:
        """The folders that a complete download has."""
        return {*NETWORKS} if (self.kind, self.form) == (MODEL, FOLDER) else {""}

    @property
    def lacks_text_encoder(self) -> bool:
        """Whether it is a model that needs a text encoder from elsewhere."""
        return self.kind == MODEL and self.form not in (FOLDER, EMBEDDED)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Patterns of the needed files in its repository."""
        if self.form == EMBEDDED:
            return ()
        if self.form == FOLDER:
            return TEXT_ENCODER_FILES if self.kind == TEXT_ENCODER else FOLDER_FILES
        return (self.name.split("/", 2)[2],)


# The 4-bit files of both model versions are left out, since their sizes are not known, and the packs of LTX-2.5, which
# nothing here can run.
with Path(__file__).with_name("catalog.csv").open(encoding="utf-8") as table:
    CATALOG = tuple(
        CatalogEntry(kind, name, version, recipe, form, round(float(size.strip("~"))), "~" not in size, bool(gated))
        for kind, name, version, recipe, form, size, gated in list(csv.reader(table))[1:]
    )
