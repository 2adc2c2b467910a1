"""What a checkpoint and devices cannot do, and what is legal but hardly meant."""

from collections.abc import Iterator, Sequence

import jax

from ltx2_cli.errors import UsageError
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.networks import Checkpoint
from ltx2_cli.models.trained_on import clip_warnings, prompt_warnings, read_trained_on
from ltx2_cli.plan.decoding import DecodePlan
from ltx2_cli.plan.stages import (
    Stage,
)
from ltx2_cli.request.profiles import profile_names
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.sharding import ShardingPlan
from ltx2_cli.units import natural

DEVICE_PROFILES = {
    "gpu": "gpu",
    "TPU7x": "ironwood",
    "TPU v7x": "ironwood",
    "TPU v6 lite": "trillium",
    "TPU v6e": "trillium",
    "TPU v5 lite": "trillium",
    "TPU v5e": "trillium",
}


def check_hosts(spec: RunSpec, sharding: ShardingPlan) -> None:
    """Raise `UsageError` for what each of several hosts would understand in another way, or leaves one without work."""
    if spec.seed is None:
        raise UsageError("several hosts need one seed between them", "--seed N")
    if sharding.mesh.size < jax.device_count():
        raise UsageError(
            f"one of {jax.device_count()} devices on {jax.process_count()} hosts would do all the work",
            "--sharding NAME or FILE of a profile with a mesh, or --num-processes 1 to run one host alone",
        )


def check_size(spec: RunSpec, arch: Arch) -> None:
    """Raise `UsageError` for a clip that this checkpoint's autoencoders cannot divide or decode."""
    frames, pixels = arch.compression.frames, arch.compression.pixels
    if spec.height % pixels or spec.width % pixels or (spec.num_frames - 1) % frames:
        raise UsageError(
            f"{spec.width}x{spec.height}x{spec.num_frames} does not divide into this model's latents",
            f"sides that are multiples of {pixels}, and {frames}k + 1 frames",
        )
    if min(spec.height, spec.width) < (smallest := arch.video_vae.smallest):
        raise UsageError(
            f"{spec.width}x{spec.height} is too small for this model's decoder", f"at least {smallest} pixels a side"
        )
    if round(spec.num_frames / spec.fps * arch.compression.audio_rate) < 1:
        raise UsageError(
            f"{spec.num_frames} frames at {spec.fps:g} a second are too short for sound",
            "more --num-frames or less --fps",
        )


def device_profile(devices: Sequence[jax.Device]) -> str:
    """The profile for these devices; raises `UsageError` where they are several of an unknown kind."""
    platform, kind = devices[0].platform, devices[0].device_kind
    if platform == "cpu" or len(devices) == 1:
        return "single"
    for known, profile in DEVICE_PROFILES.items():
        if kind.startswith(known) or platform == known:
            return profile
    known = ", ".join(f"--sharding {name}" for name in profile_names("sharding"))
    raise UsageError(
        f"no sharding profile is made for {len(devices)} devices of kind {kind}", f"name one: {known}, or a FILE"
    )


def gather_warnings(sharding: ShardingPlan, heads: int) -> Iterator[str]:
    """A sentence if self-attention cannot trade tokens for heads."""
    local, parts = heads // sharding.parts("heads"), sharding.parts("tokens")
    if local % parts:
        yield (
            f"{local} attention heads do not divide by the {parts} devices that split the tokens: each of them gathers"
            " all keys and values; fewer devices along that axis, or --sharding with another mesh, would not"
        )


def untrained_warnings(
    spec: RunSpec, checkpoint: Checkpoint, all_stages: Sequence[Stage], prompts: Sequence[str]
) -> Iterator[str]:
    """A sentence for all of the request that the model was not trained on, as far as its checkpoint lists that."""
    trained_on = read_trained_on(checkpoint.where)
    if trained_on is None:
        return
    pixels = checkpoint.arch.compression.pixels
    sizes = [(pixels * stage.geometry.width, pixels * stage.geometry.height) for stage in all_stages]
    yield from clip_warnings(trained_on, sizes, spec.num_frames, spec.fps)
    for prompt in prompts:
        yield from prompt_warnings(trained_on, checkpoint.tokenizer, prompt)


def decode_warnings(decoding: DecodePlan, room: float) -> Iterator[str]:
    if decoding.bytes > room:
        yield (
            f"decoding takes about {natural(decoding.bytes)} on a device that has {natural(max(room, 0))} for it;"
            " fewer --num-frames, a smaller --height or --width, or more devices"
        )
