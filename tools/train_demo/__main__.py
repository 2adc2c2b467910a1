"""From nothing to the embedded model: every course in its order, each going on from what an earlier call left."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

# Memory in huge pages that are not given back between steps: a step takes two thirds of the time.
MEMORY = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=20000000000:glibc.malloc.arena_max=1"
)


def main(
    out: Annotated[Path, typer.Option(help="Where states, logs and the model go.")] = Path("out/train_demo"),
    share: Annotated[float, typer.Option(help="Of every course's steps and of the clips, how much.")] = 1.0,
) -> None:
    """Train the embedded model; call it again to go on."""
    if sys.platform == "linux" and os.environ.get("GLIBC_TUNABLES") != MEMORY:
        command = [sys.executable, "-m", "tools.train_demo", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"GLIBC_TUNABLES": MEMORY})
    from ltx2_cli.weights.published import UPSAMPLER
    from tools.train_demo import audio, clips, denoiser, ship, upsampler, video_vae
    from tools.train_demo.arch import ARCH
    from tools.train_demo.courses import COURSES, LARGE_CLIPS, SMALL_CLIPS

    course = {
        name: replace(each, steps=max(1, round(share * each.steps)), warm_up=round(share * each.warm_up))
        for name, each in COURSES.items()
    }
    of_video = (course[name] for name in ("pieces", "frames", "moving", "video_vae", "decoder"))
    vae = video_vae.trained(*of_video, out)
    audio_vae = audio.trained_vae(course["audio_vae"], out)
    vocoder = audio.trained_vocoder(course["vocoder"], audio_vae, out)
    vae, audio_vae = clips.with_statistics(vae, audio_vae, max(1, round(share * clips.MEASURED)))
    small = clips.clips(max(1, round(share * SMALL_CLIPS)), denoiser.SMALL, vae, audio_vae, out)
    large = clips.clips(max(1, round(share * LARGE_CLIPS)), denoiser.LARGE, vae, audio_vae, out)
    twice = upsampler.trained(course["upsampler"], vae.statistics, small, large, out)
    learned = denoiser.trained(course["denoiser"], course["both_sizes"], small, large, out)
    networks = {"text_encoder": learned.text_encoder, "connectors": learned.connectors}
    networks |= {"transformer": learned.transformer, "vae": vae, "audio_vae": audio_vae, "vocoder": vocoder}
    networks = {name: ship.rounded(network) for name, network in (networks | {UPSAMPLER: twice}).items()}
    ship.ship(networks, ARCH, out / "model")


if __name__ == "__main__":
    typer.run(main)
