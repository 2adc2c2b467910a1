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
    start: Annotated[Path | None, typer.Option(help="A trained model: large and brief alone follow.")] = None,
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
    small, large = clips.of_both_sizes(share, vae, audio_vae, out)
    twice = upsampler.trained(courses["upsampler"], vae.statistics, small, large, out)
    learned = denoiser.trained(courses, small, large, out)
    networks = {"vae": vae, "audio_vae": audio_vae, "vocoder": vocoder, UPSAMPLER: twice}
    return networks | denoiser.by_folder(learned)


def trained_further(start: Path, courses: "dict[str, Course]", share: float, out: Path) -> "dict[str, nnx.Module]":
    """The networks in the folder `start`: the video decoder after the course `large`, the denoiser after `brief`."""
    from tools.train_demo import clips, denoiser, shipped, video_vae

    networks: dict[str, Any] = {**shipped.read_networks(start)}
    networks["vae"] = video_vae.decoder_trained(courses["large"], networks["vae"], out, video_vae.BOTH_SIZES)
    small, large = clips.of_both_sizes(share, networks["vae"], networks["audio_vae"], out)
    learned = denoiser.briefly_trained(courses["brief"], shipped.as_denoiser(networks), small, large, out)
    return networks | denoiser.by_folder(learned)


if __name__ == "__main__":
    typer.run(main)
