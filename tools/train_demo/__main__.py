"""From nothing to the embedded model: every course in its order, each going on from what an earlier call left."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from flax import nnx

    from tools.train_demo.training import Course

# Memory in huge pages that are not given back between steps: a step takes two thirds of the time.
MEMORY = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=20000000000:glibc.malloc.arena_max=1"
)


def main(
    out: Annotated[Path, typer.Option(help="Where states, logs and the model go.")] = Path("out/train_demo"),
    share: Annotated[float, typer.Option(help="Of every course's steps and of the clips, how much.")] = 1.0,
    start: Annotated[Path | None, typer.Option(help="A trained model: the last course alone follows.")] = None,
) -> None:
    """Train the embedded model; call it again to go on."""
    if sys.platform == "linux" and os.environ.get("GLIBC_TUNABLES") != MEMORY:
        command = [sys.executable, "-m", "tools.train_demo", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"GLIBC_TUNABLES": MEMORY})
    from tools.train_demo import ship
    from tools.train_demo.arch import ARCH
    from tools.train_demo.courses import COURSES

    courses = {
        name: replace(course, steps=max(1, round(share * course.steps)), warm_up=round(share * course.warm_up))
        for name, course in COURSES.items()
    }
    networks = trained_further(start, courses, share, out) if start else trained(courses, share, out)
    ship.ship({name: ship.rounded(network) for name, network in networks.items()}, ARCH, out / "model")
    ship.write_trained_on(out / "model")


def trained(courses: "dict[str, Course]", share: float, out: Path) -> "dict[str, nnx.Module]":
    """Every network after all of its courses, from nothing."""
    from ltx2_cli.weights.published import UPSAMPLER
    from tools.train_demo import audio, clips, denoiser, upsampler, video_vae

    of_video = {name: courses[name] for name in ("pieces", "frames", "moving", "decoder", "large")}
    vae = video_vae.trained(**of_video, clips=courses["video_vae"], out=out)
    audio_vae = audio.trained_vae(courses["audio_vae"], out)
    vocoder = audio.trained_vocoder(courses["vocoder"], audio_vae, out)
    vae, audio_vae = clips.with_statistics(vae, audio_vae, max(1, round(share * clips.MEASURED)))
    small, large = (clips.usual_clips(share, pixels, vae, audio_vae, out) for pixels in clips.TRAINING_CLIPS)
    long = clips.long_clips(share, vae, audio_vae, out)
    twice = upsampler.trained(courses["upsampler"], vae.statistics, small, large, out)
    learned = denoiser.trained(courses, small, large, long, out)
    networks = {"vae": vae, "audio_vae": audio_vae, "vocoder": vocoder, UPSAMPLER: twice}
    return networks | denoiser.by_folder(learned)


def trained_further(start: Path, courses: "dict[str, Course]", share: float, out: Path) -> "dict[str, nnx.Module]":
    """The networks in the folder `start`, its denoiser after the course `continued`."""
    from tools.train_demo import clips, denoiser, shipped

    networks: dict[str, Any] = {**shipped.read_networks(start)}
    autoencoders = networks["vae"], networks["audio_vae"]
    large = clips.usual_clips(share, 2 * clips.PIXELS, *autoencoders, out)
    long = clips.long_clips(share, *autoencoders, out)
    learned = denoiser.trained_to_continue(courses["continued"], shipped.as_denoiser(networks), long, large, out)
    return networks | denoiser.by_folder(learned)


if __name__ == "__main__":
    typer.run(main)
