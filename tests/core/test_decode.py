"""Decoding divided over devices and in tiles: the same clips, and nothing travels that need not."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from clips import ALL_ON, Case, Checkpoint, Size, plan_of
from ltx2_cli import read_spec, resolve
from ltx2_cli.core import decode as core_decode
from ltx2_cli.core.components import Components, abstract_network
from ltx2_cli.core.decode import decode, media_programs
from ltx2_cli.core.programs import Program
from ltx2_cli.core.report import Report
from ltx2_cli.errors import UsageError
from ltx2_cli.estimate.collectives import Collective, collectives
from ltx2_cli.media.clip import Media
from ltx2_cli.nn.layers import IMAGE_AXES
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.video_tiles import Tiles
from ltx2_cli.request.spec import Streams

CASE = Case(Size(9, 128, 256, 24.0), 1, ALL_ON.video, ALL_ON.audio, (0,))
EIGHT = {"profile": "gpu", "mesh": {"passes": 4, "heads": 2}}


def decoded(plan: Plan) -> list[Media]:
    draw, (stage,), arch = np.random.default_rng(3).standard_normal, plan.stages, plan.arch.transformer
    video, audio = (
        (8, stage.geometry.video_tokens, arch.in_channels),
        (8, stage.geometry.audio_frames, arch.audio_in_channels),
    )
    tokens = Streams(draw(video), draw(audio))
    rows = Streams(*(stream[: plan.spec.num_videos].astype(np.float32) for stream in tokens))
    return list(decode(plan, rows, plan.seeds, Components(plan), Report()))


@pytest.fixture(scope="module")
def plain(checkpoint: Checkpoint) -> list[Media]:
    return decoded(plan_of(checkpoint, CASE, 3, num_videos=8))


def check(clips: list[Media], wanted: list[Media]) -> None:
    for clip, other in zip(clips, wanted, strict=True):
        assert clip.frames.shape == (9, 128, 256, 3)
        assert np.abs(clip.frames.astype(int) - other.frames).max() <= 1
        assert np.linalg.norm(clip.waveform - other.waveform) <= 1e-4 * np.linalg.norm(other.waveform)


@pytest.mark.parametrize(("videos", "parts"), [(1, (1, 2, 4)), (3, (4, 1, 2)), (8, (8, 1, 1))])
def test_eight_devices_decode_the_same_clips_as_one(
    checkpoint: Checkpoint, plain: list[Media], videos: int, parts: tuple[int, int, int]
) -> None:
    plan = plan_of(checkpoint, CASE, 3, num_videos=videos, sharding=EIGHT)
    assert tuple(plan.decoding.mesh.shape.values())[:3] == parts
    check(decoded(plan), plain[:videos])


@pytest.mark.slow
def test_sharded_decoders_make_the_same_clip() -> None:
    clip = {"model": "demo", "prompt": "a", "height": 128, "width": 256, "num_frames": 9, "dtype": "float32"}
    split = {**EIGHT, "weights": {"conv_out": "heads"}, "replicate_vae": False}
    plain, plan = (resolve(read_spec({**clip, "sharding": sharding})) for sharding in ("single", split))
    kernel = abstract_network(plan, "vae").decoder.conv_in.kernel.get_value()
    assert kernel.sharding.shard_shape(kernel.shape)[-1] == kernel.shape[-1] // 2
    check(decoded(plan), decoded(plain))


def test_tiles_make_the_same_clip(checkpoint: Checkpoint, plain: list[Media]) -> None:
    room = 0.8 * plan_of(checkpoint, CASE, 3).decoding.video_bytes
    plan = plan_of(checkpoint, CASE, 3, vae_memory_gb=room / 1e9)
    assert plan.decoding.tiles is not None
    assert plan.decoding.video_bytes <= room
    check(decoded(plan), plain[:1])


def test_a_clip_in_windows_is_decoded_in_parts_as_it_is_at_once(checkpoint: Checkpoint) -> None:
    """20 s in two windows: in the memory of 10 s."""
    long = CASE._replace(size=Size(481, 64, 64, 24.0))
    plan, whole = plan_of(checkpoint, long, 3, windows=2), plan_of(checkpoint, long, 3)
    assert (plan.decoding.audio_tiles.number, whole.decoding.audio_tiles.number) == (2, 1)
    assert plan.decoding.tiles.frames_at_once > 0
    assert whole.decoding.tiles is None
    assert plan.decoding.bytes < 0.7 * whole.decoding.bytes
    (parts,), (at_once,) = decoded(plan), decoded(replace(plan, decoding=whole.decoding))
    assert np.abs(parts.frames.astype(int) - at_once.frames).max() <= 1
    np.testing.assert_allclose(parts.waveform, at_once.waveform, rtol=0, atol=1e-5)


def test_parts_of_images_make_the_same_clip_few_frames_at_a_time(checkpoint: Checkpoint, plain: list[Media]) -> None:
    plan = plan_of(checkpoint, CASE, 3, sharding=EIGHT)
    assert max(plan.decoding.mesh.shape[axis] for axis in IMAGE_AXES) > 1
    check(decoded(replace(plan, decoding=replace(plan.decoding, tiles=Tiles(3, (1, 1), 1)))), plain[:1])


@pytest.mark.parametrize("at_once", [True, False])
def test_the_sound_waits_for_frames_that_leave_it_no_memory(
    checkpoint: Checkpoint, plain: list[Media], at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frames are on the host before the sound's program begins."""
    decoding = plan_of(checkpoint, CASE, 3).decoding
    room = decoding.video_bytes + (decoding.audio_bytes if at_once else 0)
    plan, events, call = plan_of(checkpoint, CASE, 3, vae_memory_gb=room / 1e9), [], Program.__call__

    def watched(program: Program, *arguments: object) -> object:
        events.append(program.name)
        return call(program, *arguments)

    def fetched(array: jax.Array) -> np.ndarray:
        events.append(f"{array.dtype} here")
        return np.asarray(array)

    monkeypatch.setattr(Program, "__call__", watched)
    monkeypatch.setattr(core_decode, "to_first_host", fetched)
    check(decoded(plan), plain[:1])
    later = ["audio", "uint8 here"] if at_once else ["uint8 here", "audio"]
    assert events == ["frames", *later, "float32 here"]
    assert plan.decoding.at_once == at_once


def travelling(plan: Plan) -> dict[str, list[Collective]]:
    mesh = plan.decoding.mesh
    return {each.name: collectives(each.lower().compile().as_text(), mesh) for each in media_programs(plan)}


def test_decoding_videos_in_parallel_needs_no_collective(checkpoint: Checkpoint) -> None:
    plan = plan_of(checkpoint, CASE, 3, num_videos=8, sharding=EIGHT)
    assert travelling(plan) == {"frames": [], "audio": []}


def test_parts_of_a_clip_exchange_only_their_edges(checkpoint: Checkpoint) -> None:
    plan = plan_of(checkpoint, CASE, 3, sharding=EIGHT)
    found = travelling(plan)
    assert [each.kind for each in found["audio"]] == ["all-gather"]
    assert {each.kind for each in found["frames"]} == {"collective-permute"}
    assert {each.axes for each in found["frames"]} == {("height",), ("width",)}
    convolutions = 2 + sum(layer.convolutions for layer in plan.networks.vae.decoder.layers)
    assert len(found["frames"]) == 4 * convolutions  # an edge to each side
    assert all("1" in re.findall(r"\d+", each.results[0])[3:5] for each in found["frames"])


@pytest.mark.parametrize(("videos", "parts"), [(1, 8), (2, 4)])
def test_devices_make_parts_of_long_audio(checkpoint: Checkpoint, videos: int, parts: int) -> None:
    """What travels is the waveform alone."""
    long = CASE._replace(size=Size(97, 64, 64, 24.0))
    plan = plan_of(checkpoint, long, 3, num_videos=videos, sharding=EIGHT)
    assert plan.decoding.audio_tiles.number_of_parts == parts
    assert not plan.decoding.at_once  # on CPUs programs that exchange wait for each other
    alone, together = (decoded(each) for each in (plan_of(checkpoint, long, 3, num_videos=videos), plan))
    for clip, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(clip.waveform, other.waveform, rtol=0, atol=1e-5)
    sent = sum(each.sent_bytes for each in travelling(plan)["audio"])
    assert sent <= 1.5 * alone[0].waveform.nbytes


def test_decoding_over_the_memory_limit_is_warned_about(checkpoint: Checkpoint) -> None:
    (warning,) = plan_of(checkpoint, CASE, 3, vae_memory_gb=1e-6).warnings
    assert "decod" in warning
    assert "--num-frames" in warning
    with pytest.raises(UsageError, match="vae_memory_gb -1"):
        plan_of(checkpoint, CASE, 3, vae_memory_gb=-1)


def test_no_convolution_uses_the_slow_library_for_cpus(checkpoint: Checkpoint) -> None:
    """It takes twice as long; which option keeps it out depends on the version of XLA."""
    for program in media_programs(plan_of(checkpoint, CASE, 3)):
        compiled = program.lower().compile().as_text()
        assert " convolution(" in compiled
        assert "__ynn_fusion" not in compiled
