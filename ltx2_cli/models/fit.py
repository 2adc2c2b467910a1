"""Whether what was read of a checkpoint belongs together: networks to each other, tensors to their network."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ltx2_cli.models.arch import Arch
from ltx2_cli.models.config import NetworkArch
from ltx2_cli.models.gemma import Gemma, in_language_model
from ltx2_cli.models.networks import ARCHS, BUILDERS, TEXT_ENCODER, Checkpoint
from ltx2_cli.spec import SpecError
from ltx2_cli.weights.checkpoint import AGAIN, TensorFiles
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.findings import refuse
from ltx2_cli.weights.load import mismatches

ONE_RELEASE = "take all networks from one release, or name another checkpoint: --model FOLDER or --model REPO"


class Side(NamedTuple):
    """A network, and a size of what describes it."""

    network: str
    size: Callable[[Any], int]


# what is equal wherever networks were made for each other
EQUAL: tuple[tuple[str, Side, Side], ...] = (
    (
        "the text encoder's width and the connectors' caption_channels",
        Side(TEXT_ENCODER, lambda arch: arch.hidden_size),
        Side("connectors", lambda arch: arch.caption_channels),
    ),
    (
        "the text encoder's states and the connectors' text_proj_in_factor",
        Side(TEXT_ENCODER, lambda arch: arch.states),
        Side("connectors", lambda arch: arch.text_proj_in_factor),
    ),
    (
        "the video VAE's and the transformer's channels",
        Side("vae", lambda arch: arch.latent_channels),
        Side("transformer", lambda arch: arch.in_channels),
    ),
    (
        "the audio VAE's and the transformer's features",
        Side("audio_vae", lambda arch: arch.latent_channels * arch.latent_mels),
        Side("transformer", lambda arch: arch.audio_in_channels),
    ),
    (
        "the audio VAE's and the vocoder's mel channels",
        Side("audio_vae", lambda arch: arch.output_channels * arch.mel_bins),
        Side("vocoder", lambda arch: arch.in_channels),
    ),
    (
        "the transformer's channels in and out",
        Side("transformer", lambda arch: arch.in_channels),
        Side("transformer", lambda arch: arch.out_channels),
    ),
    (
        "the transformer's audio channels in and out",
        Side("transformer", lambda arch: arch.audio_in_channels),
        Side("transformer", lambda arch: arch.audio_out_channels),
    ),
    (
        "the video connector's width and the transformer's text",
        Side("connectors", lambda arch: arch.widths.video),
        Side("transformer", lambda arch: arch.streams.video.context_width),
    ),
    (
        "the audio connector's width and the transformer's text",
        Side("connectors", lambda arch: arch.widths.audio),
        Side("transformer", lambda arch: arch.streams.audio.context_width),
    ),
)


@dataclass(frozen=True)
class Readings:
    """What could be read of a checkpoint, and why the rest could not."""

    where: Path
    described: dict[str, Any]  # what each network is, by its config
    files: dict[str, TensorFiles]
    prefix: str | None  # of the text encoder's names
    tokenizer: Path
    problems: list[SpecError]
    text_hint: str = AGAIN  # what to do where the text encoder is the wrong one

    def check(self) -> None:
        """Raise `SpecError` with everything that is wrong, as far as what was read tells."""
        misfits = [*self._sizes(), *self._tensors()]
        if misfits:
            heading = f"{self.where} does not hold what its configs describe"
            misfits[0] = SpecError(f"{heading}. {misfits[0]}", misfits[0].hint)
        refuse([*self.problems, *self._generations(), *misfits])

    def checkpoint(self) -> Checkpoint:
        """The checkpoint, if nothing is wrong with it."""
        self.check()
        assert self.prefix is not None
        arch = Arch(*(self.described[name] for name in ARCHS))
        return Checkpoint(self.where, arch, self.described[TEXT_ENCODER], self.prefix, self.files, self.tokenizer)

    def _sizes(self) -> Iterator[SpecError]:
        """Sizes in which one network must equal another and does not."""
        for what, *sides in EQUAL:
            networks = [side.network for side in sides]
            if not self.described.keys() >= set(networks):
                continue
            one, other = (side.size(self.described[side.network]) for side in sides)
            if one != other:
                yield SpecError(f"{what} differ: {one} and {other}", self._hint(networks[0]))

    def _generations(self) -> Iterator[SpecError]:
        """Networks that fit and yet mean nothing to each other: latents and spectra are learnt together."""
        known: dict[str, list[str]] = {}
        for name, arch in self.described.items():
            if isinstance(arch, NetworkArch) and arch.generation is not None:
                known.setdefault(arch.generation, []).append(name)
        if len(known) > 1:
            said = "; ".join(f"{generation}: {', '.join(names)}" for generation, names in known.items())
            mixed = f"{self.where} mixes networks of different generations, which were not trained together"
            yield SpecError(f"{mixed} ({said})", ONE_RELEASE)

    def _tensors(self) -> Iterator[SpecError]:
        """Tensors that are not what their network declares."""
        for name, files in self.files.items():
            if name == TEXT_ENCODER and name in self.described and self.prefix is not None:
                text = Gemma(Scope("float32", self.prefix), self.described[name])
                found = mismatches(text, files, partial(in_language_model, prefix=self.prefix))
            elif name in BUILDERS and name in self.described:
                found = mismatches(BUILDERS[name](Scope("float32"), self.described[name]), files)
            else:
                continue
            yield from (SpecError(f"{name}: {finding}", self._hint(name)) for finding in found)

    def _hint(self, network: str) -> str:
        return self.text_hint if network == TEXT_ENCODER else AGAIN
