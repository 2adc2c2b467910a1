"""The networks of a trained model, read back from its folder to be measured or trained further."""

import json
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ltx2_cli.models.gemma import Gemma
from ltx2_cli.models.networks import TEXT_ENCODER, abstract_networks
from ltx2_cli.models.open_checkpoint import open_folder
from ltx2_cli.models.upsampler import LatentUpsampler
from ltx2_cli.request.spec import DType
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import Scope, Weight, map_weights, weights
from ltx2_cli.weights.load import load_weights
from ltx2_cli.weights.published import UPSAMPLER
from tools.train_demo.arch import ARCH, UPSAMPLER_ARCH
from tools.train_demo.denoiser import Denoiser, by_folder
from tools.train_demo.words import LIKE, VOCABULARY


def read_networks(folder: Path) -> dict[str, nnx.Module]:
    """Every network of a checkpoint in float32, by the name of its folder. The text encoder has this program's
    vocabulary: the row of a word that the checkpoint does not know is that of the word it is `LIKE`."""
    found, device = open_folder(folder), Mesh(np.array(jax.devices()[:1]), ("one",))
    place = NamedSharding(device, PartitionSpec())
    networks = abstract_networks(found.arch, DType.float32, DType.float32, scan_layers=False)._asdict()
    loaded = {name: load_weights(networks[name], files, lambda weight: place) for name, files in found.files.items()}
    upsampler = LatentUpsampler(Scope("float32"), UPSAMPLER_ARCH)
    loaded[UPSAMPLER] = load_weights(upsampler, TensorFiles(folder / UPSAMPLER), lambda weight: place)
    words = json.loads((found.tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    return loaded | {TEXT_ENCODER: _with_vocabulary(loaded[TEXT_ENCODER], words)}


def as_denoiser(networks: dict[str, nnx.Module]) -> Denoiser:
    """The networks that are trained together."""
    denoiser = Denoiser()
    for name in by_folder(denoiser):
        setattr(denoiser, name, networks[name])
    return denoiser


def _with_vocabulary(encoder: nnx.Module, words: dict[str, int]) -> Gemma:
    values = {weight.source: weight.get_value() for weight in weights(encoder)}
    rows = np.array([words[word if word in words else LIKE[word]] for word in VOCABULARY])

    def filled(weight: Weight) -> Weight:
        value = values[weight.source]
        return weight.with_value(value[rows] if "embed_tokens" in weight.source else value)

    return map_weights(filled, Gemma(Scope("float32"), ARCH.text_encoder))
