"""Whether what was read of a checkpoint belongs together: networks to each other, tensors to their network."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from flax import nnx

from ltx2_cli.errors import UsageError
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.config import NetworkArch
from ltx2_cli.models.gemma import Gemma, GemmaArch, in_language_model
from ltx2_cli.models.networks import ARCHS, BUILDERS, TEXT_ENCODER, Checkpoint
from ltx2_cli.weights.checkpoint import AGAIN, TensorFiles, raise_all
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.load import mismatches

ONE_RELEASE = "take all networks from one release, or name another checkpoint: --model FOLDER or --model REPO"


# sizes that are equal wherever networks were made for each other, and what they are
EQUAL = [
    line.split(maxsplit=2)
    for line in """
    text_encoder.hidden_size connectors.caption_channels the text encoder's width and the connectors' caption_channels
    text_encoder.states connectors.text_proj_in_factor the text encoder's states and the connectors' text_proj_in_factor
    vae.latent_channels transformer.in_channels the video VAE's and the transformer's channels
    audio_vae.features transformer.audio_in_channels the audio VAE's and the transformer's features
    audio_vae.mel_channels vocoder.in_channels the audio VAE's and the vocoder's mel channels
    transformer.in_channels transformer.out_channels the transformer's channels in and out
    transformer.audio_in_channels transformer.audio_out_channels the transformer's audio channels in and out
    connectors.widths.video transformer.context_widths.video the video connector's width and the transformer's text
    connectors.widths.audio transformer.context_widths.audio the audio connector's width and the transformer's text
    """.strip().splitlines()
]


@dataclass(frozen=True)
class ParsedCheckpoint:
    """What could be read of a checkpoint, and why the rest could not."""

    where: Path
    archs: dict[str, Any]  # what each network is, by its config
    files: dict[str, TensorFiles]
    prefix: str | None  # of the text encoder's names
    tokenizer: Path
    problems: list[UsageError]
    text_hint: str = AGAIN  # what to do where the text encoder is the wrong one

    def check(self) -> None:
        """Raise `UsageError` with everything that is wrong, as far as what was read tells."""
        misfits = [*self._sizes(), *self._tensors()]
        if misfits:
            heading = f"{self.where} does not hold what its configs describe"
            misfits[0] = UsageError(f"{heading}. {misfits[0]}", misfits[0].hint)
        raise_all([*self.problems, *self._model_versions(), *misfits])

    def checkpoint(self) -> Checkpoint:
        """The checkpoint, if nothing is wrong with it."""
        self.check()
        assert self.prefix is not None
        arch = Arch(*(self.archs[name] for name in ARCHS))
        return Checkpoint(self.where, arch, self.archs[TEXT_ENCODER], self.prefix, self.files, self.tokenizer)

    def _sizes(self) -> Iterator[UsageError]:
        """Sizes in which one network must equal another and does not."""
        for first, second, meaning in EQUAL:
            (network, size), (other, other_size) = (name.split(".", 1) for name in (first, second))
            if network in self.archs and other in self.archs:
                sizes = attrgetter(size)(self.archs[network]), attrgetter(other_size)(self.archs[other])
                if sizes[0] != sizes[1]:
                    yield UsageError(f"{meaning} differ: {sizes[0]} and {sizes[1]}", self._hint(network))

    def _model_versions(self) -> Iterator[UsageError]:
        """Networks that fit and yet mean nothing to each other: latents and spectra are learnt together."""
        known: dict[str, list[str]] = {}
        for name, arch in self.archs.items():
            if isinstance(arch, NetworkArch) and arch.model_version is not None:
                known.setdefault(arch.model_version, []).append(name)
        if len(known) > 1:
            versions = "; ".join(f"{model_version}: {', '.join(names)}" for model_version, names in known.items())
            mixed = f"{self.where} mixes networks of different model versions, which were not trained together"
            yield UsageError(f"{mixed} ({versions})", ONE_RELEASE)

    def _tensors(self) -> Iterator[UsageError]:
        """Tensors that are not what their network declares."""
        for name, files in self.files.items():
            if name == TEXT_ENCODER and name in self.archs and self.prefix is not None:
                text = _abstract_text_encoder(self.archs[name], self.prefix)
                found = mismatches(text, files, partial(in_language_model, prefix=self.prefix))
            elif name in BUILDERS and name in self.archs:
                found = mismatches(_abstract_network(name, self.archs[name]), files)
            else:
                continue
            yield from (UsageError(f"{name}: {finding}", self._hint(name)) for finding in found)

    def _hint(self, network: str) -> str:
        return self.text_hint if network == TEXT_ENCODER else AGAIN


# Built once for checkpoints of one kind: nobody changes them.
@lru_cache(maxsize=8)
def _abstract_network(name: str, arch: Any) -> nnx.Module:
    return BUILDERS[name](Scope("float32"), arch)


@lru_cache(maxsize=2)
def _abstract_text_encoder(arch: GemmaArch, prefix: str) -> Gemma:
    return Gemma(Scope("float32", prefix), arch)
