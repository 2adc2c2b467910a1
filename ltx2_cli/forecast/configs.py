"""A plan from configs alone: those of the checkpoint where it is on this machine, else those that come with us."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax

from ltx2_cli.models.folder import open_folder, read_text_encoder
from ltx2_cli.models.networks import Checkpoint
from ltx2_cli.models.published import (
    described,
    described_lora,
    described_text_encoder,
    described_upsampler,
)
from ltx2_cli.models.single_file import open_single_file
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.upsampler import LatentUpsamplerArch
from ltx2_cli.models.upsampler_source import has_upsampler, open_upsampler
from ltx2_cli.plan import Declared, Plan, decide, declare
from ltx2_cli.recipe import ONE_STAGE, TWO_STAGE, complete
from ltx2_cli.spec import RunSpec
from ltx2_cli.stages import Refinement, Source
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.hub import here
from ltx2_cli.weights.lora import LoraFile, open_lora
from ltx2_cli.weights.lora_source import check_address, lora_file, parse_lora
from ltx2_cli.weights.published import FOLDER_FILES, TEXT_ENCODER_FILES, UPSAMPLER_FILES


def foresee(spec: RunSpec, devices: Sequence[jax.Device], source: Source | None = None) -> Plan:
    """The plan of a request on these devices, be they here or not. It fetches nothing, and may lack the weights.

    With latents `source` it goes on from those, as `resolve` says. The LoRAs of all stages count by their names: added
    to the weights, they take no memory. Raises `SpecError` as `decide` does, and for what is neither here nor known.
    """
    checkpoint = _checkpoint(spec)
    own = spec.refinement.upsampler is None and has_upsampler(checkpoint.where)
    spec = complete(spec, checkpoint.arch, TWO_STAGE if source else ONE_STAGE)
    if own:
        spec = replace(spec, refinement=replace(spec.refinement, upsampler=None))
    return decide(declare_described(spec, checkpoint, source), spec, devices, source)


def _present(loras: Sequence[str]) -> Iterator[tuple[LoraFile, float]]:
    """The LoRAs that are on this machine, each with its strength."""
    for name, strength in map(parse_lora, loras):
        check_address(name)
        if (path := here(name, [])) is not None:
            yield open_lora(lora_file(str(path))), strength


def declare_described(spec: RunSpec, checkpoint: Checkpoint, source: Source | None = None) -> Declared:
    """The networks of a completed request, of the files that are here, else as they were published."""
    refinement = _refinement(spec, checkpoint) if spec.refinement.sigmas or source else None
    return declare(spec, checkpoint, list(_present(spec.lora)), refinement)


def _refinement(spec: RunSpec, checkpoint: Checkpoint) -> Refinement:
    """What the second stage takes, of the files that are here, else as it was published."""
    transformer = Transformer(Scope(spec.dtype.value), checkpoint.arch.transformer)
    named = [parse_lora(lora) for lora in spec.refinement.lora or ()]
    loras = [(_lora(name, transformer), strength) for name, strength in named if strength]
    return Refinement(_upsampler(spec.refinement.upsampler, checkpoint), None, loras)


def _upsampler(name: str | None, checkpoint: Checkpoint) -> LatentUpsamplerArch:
    """That of a name, or of none the checkpoint's own."""
    place = checkpoint.where if name is None else here(name, UPSAMPLER_FILES)
    if place is None:
        assert name is not None
        return described_upsampler(name)
    arch, _ = open_upsampler(place, checkpoint.arch.video_vae)
    return arch


def _lora(name: str, transformer: Transformer) -> LoraFile:
    path = here(name, [])
    return described_lora(name, transformer) if path is None else open_lora(lora_file(str(path)))


def _checkpoint(spec: RunSpec) -> Checkpoint:
    place = here(spec.checkpoint, FOLDER_FILES)
    if place is None:
        return described(spec.checkpoint)
    if place.is_dir():
        return open_folder(place)
    text = here(spec.text_encoder, TEXT_ENCODER_FILES) if spec.text_encoder else None
    return open_single_file(place, described_text_encoder() if text is None else read_text_encoder(text))
