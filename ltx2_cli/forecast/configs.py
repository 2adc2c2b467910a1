"""A plan from configs alone: those of the checkpoint where it is on this machine, else those that come with us."""

import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from ltx2_cli.decoding import SHARE, usable_memory
from ltx2_cli.forecast.chips import chip
from ltx2_cli.forecast.forecast import DECODE, Forecast
from ltx2_cli.models.demo import ARCH, EMBEDDED, TEXT_CONFIG
from ltx2_cli.models.folder import open_folder, read_text_encoder
from ltx2_cli.models.networks import Checkpoint
from ltx2_cli.models.published import describe, described, described_text_encoder
from ltx2_cli.models.single_file import open_single_file
from ltx2_cli.plan import Plan, decide
from ltx2_cli.recipe import complete
from ltx2_cli.spec import RunSpec
from ltx2_cli.weights.hub import here
from ltx2_cli.weights.published import FOLDER_FILES, TEXT_ENCODER_FILES


def foresee(spec: RunSpec, devices: Sequence[jax.Device]) -> Plan:
    """The plan of a request on these devices, be they here or not. It fetches nothing, and may lack the weights.

    Of several stages it is one in their place, at full size and with all passes.
    LoRAs count by their names: added to the weights, they take no memory. Raises `SpecError` as `decide` does, and
    for a checkpoint that is neither here nor known.
    """
    checkpoint = _checkpoint(spec)
    spec = complete(spec, checkpoint.arch)
    plan, known = decide(spec, checkpoint, [], devices), chip(devices[0].device_kind)
    if spec.vae_memory is not None or known is None or math.isfinite(usable_memory(np.array(devices))):
        return plan
    left = SHARE * known.hbm_bytes - Forecast(plan).present_bytes[DECODE]  # as on devices that are here to be asked
    return decide(replace(spec, vae_memory=left / 1e9), checkpoint, [], devices)


def _checkpoint(spec: RunSpec) -> Checkpoint:
    if spec.checkpoint == EMBEDDED:
        return describe(EMBEDDED, ARCH, TEXT_CONFIG)
    place = here(spec.checkpoint, FOLDER_FILES)
    if place is None:
        return described(spec.checkpoint)
    if place.is_dir():
        return open_folder(place)
    text = here(spec.text_encoder, TEXT_ENCODER_FILES) if spec.text_encoder else None
    return open_single_file(place, described_text_encoder() if text is None else read_text_encoder(text))
