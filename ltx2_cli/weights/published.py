"""The catalogue of published checkpoints, text encoders, upscalers and LoRAs, and the files of a checkpoint. Facts
alone: listed without a network and without jax."""

import csv
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ltx2_cli.request.profiles import DENOISER_FOLDER
from ltx2_cli.request.spec import RunSpec

NETWORKS = ("text_encoder", "connectors", "transformer", "vae", "audio_vae", "vocoder")  # the folders of a checkpoint
WEIGHT_ENDINGS = (".safetensors", "-?????-of-?????.safetensors", ".safetensors.index.json")


def network_patterns(network: str) -> tuple[str, ...]:
    """Patterns of one network's files. Some repositories have a second copy of the text encoder under another stem."""
    stems = ("model",) if network == "text_encoder" else ("diffusion_pytorch_model", "model")
    return (f"{network}/config.json", *(f"{network}/{stem}{ending}" for stem in stems for ending in WEIGHT_ENDINGS))


def checkpoint_files(networks: Collection[str]) -> tuple[str, ...]:
    """Patterns of the files that are needed of a checkpoint's folder: all configs, and the weights of `networks`."""
    configs = [network_patterns(network)[0] for network in NETWORKS]
    weights = [pattern for network in NETWORKS if network in networks for pattern in network_patterns(network)[1:]]
    tokenizer = ["tokenizer/*"] if "text_encoder" in networks else []
    return (*configs, "scheduler/scheduler_config.json", *weights, *tokenizer)


FOLDER_FILES = checkpoint_files(NETWORKS)


TEXT_ENCODER_FILES = (  # in a repository of its own, or in that of a checkpoint
    "config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    *(f"model{ending}" for ending in WEIGHT_ENDINGS),
    *network_patterns("text_encoder"),
)


def own_networks(networks: Collection[str], transformer: str | None) -> frozenset[str]:
    """Those of the networks that a checkpoint's own folder has, beside a file `transformer` with the denoiser."""
    return frozenset(networks) - ({"transformer"} if transformer else set())


def named_files(spec: RunSpec, networks: Collection[str] = NETWORKS) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The addresses that a request names for these networks of a checkpoint, itself first, each with the files needed
    of a repository."""
    yield spec.checkpoint, checkpoint_files(own_networks(networks, spec.transformer))
    if spec.transformer and "transformer" in networks:
        yield spec.transformer, ()
    if spec.text_encoder and "text_encoder" in networks:
        yield spec.text_encoder, TEXT_ENCODER_FILES


DURATION_HEAD = "duration_head"  # the folder of a duration head there
DIFFUSION_DECODER = "diffusion_decoder"  # and that of a diffusion decoder
UPSAMPLER = "latent_upsampler"  # the folder of an upsampler beside the networks of a checkpoint
UPSAMPLER_FILES = network_patterns(UPSAMPLER)

FOLDER, IN_PACKAGE, SPLIT = "folder", "in this package", "split files"  # forms; another is a single file
MODEL_KIND, TEXT_ENCODER_KIND, LORA_KIND = (
    "models",
    "text encoders",
    "LoRAs",
)  # kinds; another is an upscaler or a duration head

# The files of a split model beside its denoiser, in the folders that ComfyUI has for them.
TEXT_ENCODER_FILE = "text_encoders/gemma4-12b-with-proj-ltx-2.5-bf16.safetensors"
VIDEO_VAE_FILE, AUDIO_VAE_FILE = "vae/ltx-2.5-video-vae-conv-bf16.safetensors", "vae/ltx-2.5-audio-vae-bf16.safetensors"
DIFFUSION_DECODER_FILE = "vae/ltx-2.5-video-vae-bf16.safetensors"  # read for `--decoder diffusion` alone
DURATION_HEAD_FILE = "model_patches/ltx-2.5-duration-head-bf16.safetensors"  # read for `--duration auto` alone


def companions(file: str) -> tuple[str, ...]:
    """The files that a model needs beside that of its denoiser, from the folder above; none of another file."""
    split = Path(file).parent.name == DENOISER_FOLDER
    return (TEXT_ENCODER_FILE, VIDEO_VAE_FILE, AUDIO_VAE_FILE) if split else ()


@dataclass(frozen=True)
class CatalogEntry:
    """A download. `name` is a repository, or a repository and a file in it."""

    kind: str
    name: str
    model_version: str
    recipe: str  # that a model was made for; empty for other kinds
    form: str
    size: int  # bytes
    exact: bool = True  # whether `size` is; else it is as stated, rounded
    gated: bool = False  # terms are to be accepted first

    @property
    def parts(self) -> set[str]:
        """The folders that a complete download has."""
        if self.form == FOLDER:
            return {*NETWORKS} if self.kind == MODEL_KIND else {""}
        return {name.rpartition("/")[0] for name in self.wanted}

    @property
    def lacks_text_encoder(self) -> bool:
        """Whether it is a model that needs a text encoder from elsewhere."""
        return self.kind == MODEL_KIND and self.form not in (FOLDER, IN_PACKAGE) and not self.form.startswith(SPLIT)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Patterns of the needed files in its repository."""
        if self.form == IN_PACKAGE:
            return ()
        if self.form == FOLDER:
            return TEXT_ENCODER_FILES if self.kind == TEXT_ENCODER_KIND else FOLDER_FILES
        file = self.name.split("/", 2)[2]
        return (file, *companions(file))


# The 4-bit files of all model versions are left out, since their sizes are not known.
with Path(__file__).with_name("catalog.csv").open(encoding="utf-8") as table:
    CATALOG = tuple(
        CatalogEntry(kind, name, version, recipe, form, round(float(size.strip("~"))), "~" not in size, bool(gated))
        for kind, name, version, recipe, form, size, gated in list(csv.reader(table))[1:]
    )
