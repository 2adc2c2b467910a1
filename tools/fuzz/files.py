"""Files that strangers hand to `ltx2`: good ones, odd ones, damaged and hostile ones."""

import json
import os
import subprocess
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import imageio_ffmpeg
import numpy as np
from PIL import Image
from safetensors.numpy import save_file

FFMPEG = imageio_ffmpeg.get_ffmpeg_exe()
PICTURE, SOUND = ("-f", "lavfi", "-i", "testsrc=s=96x64:r=24:d=2"), ("-f", "lavfi", "-i", "sine=440:d=2")
ESCAPE = "\x1b]0;own\x07\x1b[31m"
VIDEOS = {  # name: arguments of ffmpeg
    "plain.mp4": (*PICTURE, *SOUND, "-pix_fmt", "yuv420p"),
    "ten-bits.mp4": (*PICTURE, "-pix_fmt", "yuv420p10le", "-c:v", "libx265"),
    "film.webm": (*PICTURE, "-c:v", "libvpx"),
    "frame.mp4": (*PICTURE, "-frames:v", "1"),
    "slow.mkv": ("-f", "lavfi", "-i", "testsrc=s=96x64:r=1:d=5"),
    "odd.avi": ("-f", "lavfi", "-i", "testsrc=s=95x63:r=24:d=2", "-pix_fmt", "yuv444p"),
    "tone.wav": SOUND,
    "tone.mp3": SOUND,
    "tone-in.mp4": SOUND,
    "around.wav": ("-f", "lavfi", "-i", "sine=440:d=2", "-ac", "6"),
}
TEXTS = {
    "steps.yaml": "num_inference_steps: 2\nwidth: 96\nheight: 64\nnum_frames: 9\n",
    "alias.yaml": "steps: 2\n",
    "unknown.yaml": "promt: a red ball\n",
    "twice.yaml": "prompt: a\nprompt: b\n",
    "tags.yaml": "prompt: !!python/object/apply:os.system ['touch owned']\n",
    "variables.yaml": "prompt: ${oc.env:HOME}\noutput: ../out.mp4\n",
    "bomb.yaml": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
    "escapes.yaml": f'prompt: "{ESCAPE.encode().decode("latin1")}"\nmodel: "\\e[31mnope"\n',
    "foreign.yaml": "prompt: a\nmodel: demo\ncheckpoint: stranger/LTX-2\ntext_encoder: stranger/gemma\n",
    "nothing.yaml": "",
    "prompts.txt": "# my prompts\na red ball bounces\n\na blue box moves\n",
    "jobs.jsonl": '{"prompt": "a", "seed": 3}\n{"prompt": "b", "steps": 2}\n{"prompt": "c", "image": "no.png"}\n',
    "array.json": '[{"prompt": "a red ball"}, "a blue box"]',
    "list.yaml": "- prompt: a\n- prompt: b\n",
    "outside.jsonl": '{"prompt": "a", "output": "../../o.mp4"}\n{"prompt": "b", "save_latents": "/x.safetensors"}\n',
    "broken.jsonl": '{"prompt": "a"\n[\n]\n{"prompt": NaN}\n{"a": {"b": [1, {}]}}\n\x00\n',
    "playlist.mp4": "ffconcat version 1.0\nfile plain.mp4\n",
    "hls.mp4": "#EXTM3U\n#EXTINF:1,\nplain.mp4\n#EXT-X-ENDLIST\n",
}


def write_files(folder: Path) -> None:
    """Write them all into a folder."""
    for name, arguments in VIDEOS.items():
        subprocess.run([FFMPEG, "-v", "error", "-y", *arguments, name], cwd=folder, check=True)
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name, image in _pictures().items():
        image.save(folder / name)
    _write_tensors(folder)
    _damage(folder)
    (folder / "clips").mkdir()
    (folder / "pipe").symlink_to("/dev/null")
    (folder / "loop.mp4").symlink_to("loop.mp4")


def _pictures() -> dict[str, Image.Image]:
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    turned = Image.fromarray(noise)
    turned.getexif()[0x0112] = 6
    return {
        "plain.png": Image.fromarray(noise),
        "turned.jpg": turned,
        "grey.png": Image.fromarray(noise[..., 0].astype(np.uint16) * 257),
        "alpha.png": Image.fromarray(np.dstack([noise, noise[..., :1]])),
        "dot.png": Image.new("RGB", (1, 1)),
        "strip.png": Image.new("RGB", (20000, 10)),
        "moving.gif": Image.fromarray(noise).convert("P"),
        "print.tiff": Image.fromarray(noise).convert("CMYK"),
    }


def _write_tensors(folder: Path) -> None:
    draw = np.random.default_rng(0).standard_normal
    latents = {"video": draw((1, 32, 2, 4, 4)).astype(np.float32), "audio": draw((1, 2, 51, 16)).astype(np.float32)}
    save_file(latents, folder / "latents.safetensors", {"stage": "final"})
    save_file(latents, folder / "noise.safetensors")
    save_file({"video": latents["video"][:, :, :0], "audio": latents["audio"]}, folder / "empty.safetensors")
    infinite = {name: np.full_like(array, np.inf) for name, array in latents.items()}
    save_file(infinite, folder / "infinite.safetensors", {"stage": "final"})
    lora = {f"transformer_blocks.0.attn1.to_q.lora_{each}.weight": draw((4, 4)).astype(np.float32) for each in "AB"}
    save_file(lora, folder / "style.safetensors", {"format": json.dumps({ESCAPE: 1})})


def _damage(folder: Path) -> None:
    """Parts of good files, and good names of other things."""
    random = np.random.default_rng(1)
    for name in ("plain.mp4", "plain.png", "tone.wav", "latents.safetensors"):
        data = (folder / name).read_bytes()
        (folder / f"cut-{name}").write_bytes(data[: len(data) // 2])
        spoilt = bytearray(data)
        for place in random.integers(0, len(data), 40):
            spoilt[place] = int(random.integers(256))
        (folder / f"spoilt-{name}").write_bytes(bytes(spoilt))
        (folder / f"empty-{name}").write_bytes(b"")
        (folder / f"text-{name}").write_text("hello\n")
    (folder / "noise.bin").write_bytes(os.urandom(4096))


def write_clip(folder: Path, ltx2: Callable[..., BaseProcess]) -> None:
    """A clip of the demo, its record and latents, by `ltx2` itself; and records of strangers beside copies of it."""
    size = ("--width", "64", "--height", "64", "--num-frames", "9", "--steps", "1", "--seed", "7")
    made = ("--save-latents", "own.safetensors", "-o", "own.mp4")
    process = ltx2("generate", "--model", "demo", "a red ball bounces", *size, *made)
    process.join()
    assert process.exitcode == 0
    record = (folder / "own.yaml").read_text(encoding="utf-8")
    changes = {
        "long": ("num_frames: 9", "num_frames: 8000001"),
        "nan": ("num_inference_steps: 1", "num_inference_steps: .nan"),
        "foreign": ("prompt:", "checkpoint: stranger/LTX-2\nprompt:"),
        "escaped": ("prompt: a red", 'prompt: "\\e[2J" # a red'),
    }
    for name, (old, new) in changes.items():
        (folder / f"{name}.mp4").write_bytes((folder / "own.mp4").read_bytes())
        (folder / f"{name}.yaml").write_text(record.replace(old, new, 1), encoding="utf-8")
