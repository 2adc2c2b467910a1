"""A forecast as JSON has it: plain values, sizes in bytes, times in seconds."""

import math
from collections.abc import Sequence
from typing import Any

from ltx2_cli.forecast.forecast import Forecast
from ltx2_cli.forecast.hlo import Collective
from ltx2_cli.forecast.meshes import Search
from ltx2_cli.forecast.phases import LOOPS
from ltx2_cli.refiner import holding


def record(forecast: Forecast) -> dict[str, Any]:
    """Everything in a forecast; null where it is not known. `memory`, `wire_bytes`, `flops` and `collectives` are of
    one device and one forward of the first stage's denoiser over all passes; in `stages` they are of each."""
    plan, clip = forecast.plan, forecast.clip_seconds
    return {
        "model": plan.spec.model,
        "checkpoint": plan.spec.checkpoint,
        "device": plan.sharding.mesh.devices.flat[0].device_kind,
        "devices": forecast.devices,
        "sharding": {"profile": plan.spec.sharding.profile, "mesh": dict(plan.sharding.mesh.shape)},
        "dtype": plan.spec.dtype.value,
        **_stage(forecast),
        "width": plan.spec.width,
        "height": plan.spec.height,
        "num_frames": plan.spec.num_frames,
        "num_videos": plan.spec.num_videos,
        "stages": [_stage(each) for each in forecast.stages],
        "hold": holding(plan.networks).value if plan.networks.refiner is not None else None,
        "hbm_bytes": None if math.isinf(forecast.hbm_bytes) else forecast.hbm_bytes,
        "weight_bytes": forecast.weight_bytes,
        "phase_bytes": forecast.phase_bytes,
        "fits": forecast.fits,
        "seconds_per_clip": sum(clip.values()) if clip else None,
        "phase_seconds": clip or None,
        "assumptions": assumptions(forecast),
        "programs": {
            each.name: {
                "compile_seconds": each.compile_seconds,
                "memory": vars(each.memory),
                "wire_bytes": each.wire_bytes,
                "collectives": _collectives(each.collectives),
            }
            for each in forecast.compiled
        },
        "refused": {each.name: each.reason for each in forecast.refused},
        "warnings": forecast.warnings,
    }


def _stage(forecast: Forecast) -> dict[str, Any]:
    """What is of one stage."""
    stage, forward, step = forecast.stage, forecast.forward, forecast.step
    scale = forecast.plan.arch.compression
    return {
        "width": stage.geometry.width * scale.pixels,
        "height": stage.geometry.height * scale.pixels,
        "num_frames": (stage.geometry.frames - 1) * scale.frames + 1,
        "mesh": dict(stage.sharding.mesh.shape),
        "tokens": _tokens(forecast),
        "passes": [each.name.lower() for each in stage.passes],
        "steps": forecast.steps,
        "memory": vars(forward.memory) if forward else _weights_alone(forecast),
        "flops": forecast.flops / forecast.devices,
        "wire_bytes": forward.wire_bytes if forward else None,
        "collectives": _collectives(forward.collectives) if forward else None,
        "compile_seconds": forward.compile_seconds if forward else None,
        "seconds_per_step": step.seconds if step else None,
        "roofline_seconds": vars(step) if step else None,
    }


def search_record(search: Search) -> dict[str, Any]:
    """The meshes that were tried; null where one was not compiled."""
    return {
        "search": [
            {
                "mesh": dict(each.plan.sharding.mesh.shape),
                "chosen": each is search.best,
                "fits": each.fits,
                "phase_bytes": each.phase_bytes,
                "wire_bytes": each.forward.wire_bytes if each.forward else None,
                "seconds_per_step": each.step.seconds if each.forward and each.step else None,
                "compile_seconds": each.forward.compile_seconds if each.forward else None,
            }
            for each in search.tried
        ],
        "search_seconds": search.seconds,
    }


def assumptions(forecast: Forecast) -> list[str]:
    """What the times rest on."""
    if forecast.chip is None:
        return []
    chip = forecast.chip
    return [
        f"a device does {chip.flops / 1e12:.0f} TFLOP/s, reads {chip.hbm_bandwidth / 1e9:.0f} GB/s and sends"
        f" {chip.wire_bandwidth / 1e9:.0f} GB/s, as its maker says",
        "arithmetic, memory and links overlap fully, and all devices work evenly",
        "each step reads the denoiser's weights once and sends what its compiled program does",
        "of the text encoder the products with its weights count, of decoding the picture",
        "loading, compiling, the sound and writing the file do not count, nor do a LoRA's low-rank products",
    ]


def _weights_alone(forecast: Forecast) -> dict[str, int | None]:
    arguments = forecast.read_bytes(LOOPS[forecast.number])
    return {"arguments_bytes": arguments, "temporaries_bytes": None, "peak_bytes": None}


def _tokens(forecast: Forecast) -> dict[str, int]:
    geometry = forecast.stage.geometry
    text = forecast.plan.spec.max_sequence_length
    return {"video": geometry.video_tokens, "audio": geometry.audio_frames, "text": text}


def _collectives(collectives: Sequence[Collective]) -> list[dict[str, Any]]:
    return [
        {
            "kind": each.kind,
            "axes": list(each.axes),
            "devices": each.group,
            "results": [str(result) for result in each.results],
            "bytes": each.bytes,
            "times": each.times,
            "wire_bytes": each.wire_bytes,
            "in_traced_loop": each.in_traced_loop,
            "op_name": each.op_name,
        }
        for each in collectives
    ]
