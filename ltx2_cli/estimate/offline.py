"""A plan from configs alone: those of the checkpoint where it is on this machine, else those that come with us."""

from collections.abc import Sequence

import jax

from ltx2_cli.models.layouts import open_folder, open_single_file, preset_text_encoder, read_text_encoder
from ltx2_cli.models.lora import preset_lora
from ltx2_cli.models.networks import Checkpoint, preset_checkpoint, preset_upsampler
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.upsampler import LatentUpsamplerArch, open_upsampler
from ltx2_cli.plan.recipe import complete_request
from ltx2_cli.plan.resolve import Declared, Plan, build_plan, declare
from ltx2_cli.plan.stages import InitialLatents, SecondStage
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.hub import local_path
from ltx2_cli.weights.lora import LoraFile, check_address, lora_file, open_lora, parse_lora
from ltx2_cli.weights.published import FOLDER_FILES, TEXT_ENCODER_FILES, UPSAMPLER_FILES


def plan_offline(spec: RunSpec, devices: Sequence[jax.Device], source: InitialLatents | None = None) -> Plan:
    """The plan of a request on these devices, be they here or not. It fetches nothing, and may lack the weights.

    With latents `source` it goes on from those, as `resolve` says. The LoRAs of all stages count by their names: added
    to the weights, they take no memory. Raises `UsageError` as `resolve` does, and for what is neither here nor known.
    """
    checkpoint = _checkpoint(spec)
    spec = complete_request(spec, checkpoint, source is not None)
    return build_plan(declare_offline(spec, checkpoint, source), spec, devices, source)


def declare_offline(spec: RunSpec, checkpoint: Checkpoint, source: InitialLatents | None = None) -> Declared:
    """The networks of a completed request, of the files that are here, else as they were published."""
    loras = []
    for name, strength in map(parse_lora, spec.lora):
        check_address(name)
        if lora := _local_lora(name):
            loras.append((lora, strength))
    if not (spec.second_stage.sigmas or source):
        return declare(spec, checkpoint, loras)
    transformer = Transformer(Scope(spec.dtype.value), checkpoint.arch.transformer)
    named = [parse_lora(lora) for lora in spec.second_stage.lora or ()]
    added = [(_local_lora(name) or preset_lora(name, transformer), strength) for name, strength in named if strength]
    upsampler = _upsampler(spec.second_stage.upsampler, checkpoint)
    return declare(spec, checkpoint, loras, SecondStage(upsampler, None, added))


def _local_lora(name: str) -> LoraFile | None:
    path = local_path(name, [])
    return open_lora(lora_file(str(path))) if path else None


def _upsampler(name: str | None, checkpoint: Checkpoint) -> LatentUpsamplerArch:
    """That of a name, or of none the checkpoint's own."""
    place = local_path(name, UPSAMPLER_FILES) if name else checkpoint.where
    return open_upsampler(place, checkpoint.arch.video_vae)[0] if place else preset_upsampler(name or "")


def _checkpoint(spec: RunSpec) -> Checkpoint:
    place = local_path(spec.checkpoint, FOLDER_FILES)
    if place is None:
        return preset_checkpoint(spec.checkpoint)
    if place.is_dir():
        return open_folder(place)
    text = local_path(spec.text_encoder, TEXT_ENCODER_FILES) if spec.text_encoder else None
    return open_single_file(place, preset_text_encoder() if text is None else read_text_encoder(text))
