"""`ltx2 decode` on latents that a run has saved: the run's own media, each kind of file, and what does not fit."""

import json
import subprocess
import wave
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import OpenEXR
import pytest
import torch
from diffusers.pipelines.ltx2.image_processor import LTX2VideoHDRProcessor
from PIL import Image
from safetensors.numpy import load_file, save_file

from clips import ALL_ON, Case, Checkpoint, Size, plan_of
from local_hub import local_hub
from ltx2_cli.core.run import open_components
from ltx2_cli.core.write import write
from ltx2_cli.diffusion.latents import open_latents
from ltx2_cli.media import checks
from ltx2_cli.media.probe import open_video
from program import run_program

SMALL = Case(Size(9, 64, 64, 24.0), 2, ALL_ON.video, ALL_ON.audio, (0,))


@pytest.fixture(scope="module")
def made(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a clip and its latents."""
    folder = tmp_path_factory.mktemp("made")
    names = {"output": str(folder / "clip.mp4"), "save_latents": str(folder / "latents.safetensors")}
    plan = plan_of(checkpoint, SMALL, 3, **names)
    assert list(write(plan, open_components(plan))) == [(folder / "clip.mp4", [])]
    return folder


def sound(path: Path) -> np.ndarray:
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (2, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, 2)


def streams(path: Path) -> str:
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-i", path]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def packets(path: Path) -> bytes:
    """Checksums of picture and sound as they lie in a file."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-i", path, "-c", "copy", "-f", "streamhash", "-"]
    return subprocess.run(command, capture_output=True, check=True).stdout


def test_saved_latents_decode_to_the_clip_of_their_run(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = [tmp_path / "again.mp4", tmp_path / "again.wav", tmp_path / "frames", tmp_path / "again.png"]
    options = [text for path in outputs for text in ("-o", str(path))]
    code = run_program(monkeypatch, "decode", str(made / "latents.safetensors"), *options)
    out, err = capsys.readouterr()
    assert (code, out.splitlines()) == (0, [str(path) for path in outputs]), err
    assert "compiled" in err.splitlines()[-1]
    assert outputs[0].read_bytes() == (made / "clip.mp4").read_bytes()
    frames = SMALL.size[0]
    assert [path.name for path in sorted(outputs[2].iterdir())] == [f"{number:05}.png" for number in range(frames)]
    assert len(sound(outputs[1])) > 100
    assert sound(outputs[1]).any()
    with Image.open(outputs[3]) as sheet, Image.open(outputs[2] / "00000.png") as first:
        assert sheet.width > 2 * first.width
        assert sheet.crop((6, 26, 6 + first.width, 26 + first.height)).tobytes() == first.convert("RGB").tobytes()


def frames_of(path: Path, pixels: str) -> np.ndarray:
    """Frames of a file as ffmpeg decodes them, [frames, height, width, RGB]."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", path, "-f", "rawvideo"]
    raw = subprocess.run([*command, "-pix_fmt", pixels, "-"], capture_output=True, check=True).stdout
    return np.frombuffer(raw, "<u2" if "48" in pixels else "u1").reshape(-1, *SMALL.size[1:3], 3)


def by_diffusers(checkpoint: Checkpoint, latents: Path) -> np.ndarray:
    """Frames in 0 to 1 of saved latents by diffusers' decoder, [frames, height, width, RGB]."""
    vae = checkpoint.pipeline.vae
    saved = torch.from_numpy(open_latents(latents).read().video)
    mean, std = (statistic.reshape(1, -1, 1, 1, 1) for statistic in (vae.latents_mean, vae.latents_std))
    with torch.no_grad():
        pixels = vae.decode(saved * std / vae.config.scaling_factor + mean, return_dict=False)[0]
    return ((pixels[0].permute(1, 2, 3, 0) + 1) / 2).clamp(0, 1).double().numpy()


@pytest.mark.parametrize("more", [[], ["--set", "vae_memory_gb=0.0001"]], ids=["whole", "tiles"])
def test_master_files_have_more_levels_than_8_bits(
    made: Path,
    checkpoint: Checkpoint,
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A .mkv all levels of 16 bits, a .mov those of 10; both the whole audio, and what a clip records."""
    lossless, prores, clip = (tmp_path / name for name in ("clip.mkv", "clip.mov", "clip.mp4"))
    names = [text for path in (lossless, prores, clip) for text in ("-o", str(path))]
    assert run_program(monkeypatch, "decode", str(made / "latents.safetensors"), *names, *more) == 0
    assert "8 bits" not in capsys.readouterr().err  # these networks are of float32
    wanted = by_diffusers(checkpoint, made / "latents.safetensors") * (2**16 - 1)
    exact = frames_of(lossless, "rgb48le")
    assert np.abs(exact - wanted).max() < 8  # of 65,535: in 8 bits it would be 128
    assert "Video: prores (4444)" in streams(prores)
    assert all("pcm_s24le" in streams(path) for path in (lossless, prores))
    close = np.abs(frames_of(clip, "rgb24").astype(int) - frames_of(made / "clip.mp4", "rgb24"))
    assert close.max() <= 2
    for path in (lossless, prores):
        assert run_program(monkeypatch, "info", str(path)) == 0
        assert SMALL.prompt in capsys.readouterr().out
    assert run_program(monkeypatch, "replay", "--verify", str(prores)) == 0  # its frames are not those of a clip
    assert "only latents are compared" in capsys.readouterr().err


def test_frames_of_linear_light_are_those_of_16_bits(
    made: Path, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In half floats, as OpenEXR's own library reads them; by the curve that display referred images have."""
    monkeypatch.chdir(tmp_path)
    assert run_program(monkeypatch, "decode", str(made / "latents.safetensors"), "-o", "a%d/%05d.exr") == 0
    levels = by_diffusers(checkpoint, made / "latents.safetensors")
    wanted = np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)
    paths = sorted((tmp_path / "a%d").iterdir())
    assert [path.name for path in paths] == [f"{number:05}.exr" for number in range(SMALL.size[0])]
    for path, frame in zip(paths, wanted, strict=True):
        pixels = OpenEXR.File(str(path)).channels()["RGB"].pixels
        assert pixels.dtype == np.float16
        np.testing.assert_allclose(pixels.astype(np.float64), frame, rtol=2e-3, atol=1e-4)
    assert run_program(monkeypatch, "decode", str(made / "latents.safetensors"), "-o", "a%d/%05d.exr") == 2


LOGC3 = LTX2VideoHDRProcessor._logc3_decompress


def hlg_to_light(values: np.ndarray) -> np.ndarray:
    """The inverse of BT.2100's HLG and of BT.2087's matrix, where diffuse white is 75 % of the signal."""
    exponential = (np.exp((values - 0.55991073) / 0.17883277) + 0.28466892) / 12
    scene = np.where(values <= 0.5, values**2 / 3, exponential)
    white = (np.exp((0.75 - 0.55991073) / 0.17883277) + 0.28466892) / 12
    to_bt2020 = [[0.627404, 0.329283, 0.043313], [0.069097, 0.919540, 0.011362], [0.016391, 0.088013, 0.895595]]
    return scene / white @ np.linalg.inv(to_bt2020).T


def test_light_of_an_hdr_lora_is_that_of_diffusers(
    made: Path,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """LogC3, brighter than white in EXR files, and in HLG as far as that goes; with the audio and the record."""
    mp4, prores, lossless = (tmp_path / name for name in ("clip.mp4", "clip.mov", "clip.mkv"))
    names = [text for path in (mp4, prores, lossless, tmp_path / "light/%05d.exr") for text in ("-o", str(path))]
    assert run_program(monkeypatch, "decode", str(made / "latents.safetensors"), "--hdr", *names) == 0
    logc3 = by_diffusers(checkpoint, made / "latents.safetensors")
    wanted = LOGC3(torch.from_numpy(logc3)).numpy()
    assert wanted.max() > 2
    exr = [OpenEXR.File(str(path)).channels()["RGB"].pixels for path in sorted((tmp_path / "light").iterdir())]
    np.testing.assert_allclose(np.stack(exr).astype(np.float64), wanted, rtol=3e-3, atol=1e-3)
    shown = hlg_to_light(frames_of(lossless, "rgb48le") / 65535)
    in_range = (wanted > 0.01).all(-1) & (wanted < 3).all(-1)
    assert in_range.sum() > 500
    np.testing.assert_allclose(shown[in_range], wanted[in_range], rtol=0.02, atol=0.01)
    for path, codec in ((mp4, "hevc (Main 10) (hvc1"), (prores, "prores (4444)"), (lossless, "ffv1")):
        assert codec in streams(path)
        assert "/bt2020/arib-std-b67" in streams(path)
        assert "Audio" in streams(path)
        assert run_program(monkeypatch, "info", str(path)) == 0
        assert SMALL.prompt in capsys.readouterr().out
    assert run_program(monkeypatch, "replay", "--verify", str(mp4)) == 0
    assert "only latents are compared" in capsys.readouterr().err


def test_levels_that_a_type_lacks_are_said(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--dtype", "bfloat16", "--silent", "-o", str(tmp_path / "clip.mkv")]
    assert run_program(monkeypatch, "decode", str(made / "latents.safetensors"), *options) == 0
    assert "a decoder in bfloat16 makes about 8 bits of a colour: --dtype float32" in capsys.readouterr().err
    assert "Audio" not in streams(tmp_path / "clip.mkv")


def test_sound_and_picture_are_decoded_alone(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is not asked for is not loaded."""
    latents = str(made / "latents.safetensors")
    assert run_program(monkeypatch, "decode", latents, "-v", "-o", str(tmp_path / "a.wav")) == 0
    loaded = capsys.readouterr().err
    assert "load vocoder" in loaded
    assert "load vae" not in loaded
    assert run_program(monkeypatch, "decode", latents, "-v", "--silent", "-o", str(tmp_path / "b.mp4")) == 0
    loaded = capsys.readouterr().err
    assert "load vae" in loaded
    assert "load vocoder" not in loaded
    assert "Video: h264" in streams(tmp_path / "b.mp4")
    assert "Audio" not in streams(tmp_path / "b.mp4")


def test_flaws_are_printed_and_an_error_with_strict(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "DARK", 255)
    clip = tmp_path / "clip.mp4"
    decode = ("decode", str(made / "latents.safetensors"), "-o", str(clip))
    assert run_program(monkeypatch, *decode) == 0
    assert f"{clip}: the video is black\n" in capsys.readouterr().err
    assert run_program(monkeypatch, *decode, "--strict", "--force") == 4
    assert f"error: {clip}: the video is black\n" in capsys.readouterr().err
    assert clip.exists()
    assert (
        run_program(monkeypatch, *decode[:2], "--strict", "-o", str(tmp_path / "a.wav")) == 0
    )  # no picture is asked for


def test_saved_latents_have_a_record(made: Path) -> None:
    file = open_latents(made / "latents.safetensors")
    assert (file.metadata["model_version"], file.metadata["fps"], file.metadata["stage"]) == ("ltx2", "24.0", "final")
    assert f"seed: {3}" in file.metadata["record"]


def test_latents_without_metadata_need_a_model(
    made: Path,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bare, clip = tmp_path / "bare.safetensors", tmp_path / "clip.mp4"
    save_file(load_file(made / "latents.safetensors"), bare)
    assert run_program(monkeypatch, "decode", str(bare)) == 2
    assert "does not say which model made it" in capsys.readouterr().err
    model = ["--model", str(checkpoint.folder)]
    assert run_program(monkeypatch, "decode", str(bare), *model, "--fps", "6", "-o", str(clip)) == 2
    assert "the audio latents in" in capsys.readouterr().err
    settings = ["--dtype", "float32", "--set", "compat=diffusers"]
    assert run_program(monkeypatch, "decode", str(bare), *model, *settings, "-o", str(clip)) == 0
    assert packets(clip) == packets(made / "clip.mp4")
    assert open_video(clip).metadata == {}  # nobody knows


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"video": (1, 8, 2, 2, 2)}, "holds no latents of one video but `video` 1x8x2x2x2"),
        ({"video": (2, 8, 2, 2, 2), "audio": (2, 4, 9, 4)}, "holds no latents of one video but"),
        ({}, "holds no latents of one video but nothing"),
    ],
    ids=["no sound", "a batch", "nothing"],
)
def test_files_with_other_content_are_refused(
    tensors: dict[str, tuple[int, ...]],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_file({name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, tmp_path / "l.safetensors")
    assert run_program(monkeypatch, "decode", str(tmp_path / "l.safetensors")) == 2
    assert sentence in capsys.readouterr().err


def test_latents_of_another_model_version_are_refused(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = open_latents(made / "latents.safetensors")
    other = {**file.metadata, "model_version": "ltx2.3"}
    save_file(load_file(file.path), tmp_path / "l.safetensors", other)
    assert run_program(monkeypatch, "decode", str(tmp_path / "l.safetensors")) == 2
    assert "was made by ltx2.3" in capsys.readouterr().err


def test_files_of_the_denoiser_may_be_missing(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, path = open_latents(made / "latents.safetensors"), tmp_path / "l.safetensors"
    record, distilled = file.metadata["record"], "Lightricks/LTX-2/ltx-2-19b-distilled-lora-384.safetensors"
    assert "lora: []" in record
    record = record.replace("lora: []", "lora: [gone.safetensors]")
    record = record.replace("initial_noise: null", "initial_noise: gone").replace(
        f"- {distilled}", "- gone.safetensors"
    )
    record = record.replace("transformer: null", "transformer: gone.gguf")
    record = record.replace("text_encoder: null", "text_encoder: gone")
    assert record.count("gone") == 5
    save_file(load_file(file.path), path, {**file.metadata, "record": record})
    assert run_program(monkeypatch, "decode", str(path), "-o", str(tmp_path / "a.wav")) == 0, capsys.readouterr().err


def test_the_decoders_weights_alone_are_downloaded(
    made: Path,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And a run that needs all networks downloads the others later."""
    folder, cache, model, clip = checkpoint.folder, tmp_path / "hub", "someone/model", tmp_path / "a.mp4"
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    decoding = ["decode", str(made / "latents.safetensors"), "--model", model, "-o", str(clip)]
    with local_hub(cache, monkeypatch, {model: files}):
        assert run_program(monkeypatch, *decoding, "--dry-run", "--json") == 0
        parts = json.loads(capsys.readouterr().out)["download"]["parts"]
        assert not cache.exists()
        assert run_program(monkeypatch, *decoding) == 0
        assert run_program(monkeypatch, "generate", "rain", "--model", model, "--dry-run", "--json") == 0
        later = json.loads(capsys.readouterr().out.splitlines()[-1])["download"]["parts"]
    held = {path.parent.name for path in cache.rglob("*.safetensors")}
    assert held == {"vae", "audio_vae", "vocoder"}
    assert {name for name, size in parts.items() if size > 20_000} <= {f"{model}/{name}" for name in held}
    assert later.keys() == {f"{model}/{name}" for name in ("text_encoder", "connectors", "transformer", "tokenizer")}
    assert packets(clip) == packets(made / "clip.mp4")


def test_warnings_are_printed_before_the_work(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--set", "vae_memory_gb=1e-6", "-o", str(tmp_path / "a.wav")]
    assert run_program(monkeypatch, "decode", str(made / "latents.safetensors"), *short) == 0
    assert capsys.readouterr().err.startswith("decoding takes about ")


@pytest.mark.parametrize(
    ("outputs", "sentence"),
    [
        (
            ["clip.avi"],
            "output clip.avi is no kind of file that is written\nhint: FILE.mp4, FILE.mov or .mkv (masters), FILE.wav",
        ),
        (
            ["clip.exr"],
            "output clip.exr is no kind of file that is written\nhint: FILE.mp4, FILE.mov or .mkv (masters), ",
        ),
        (["clip.v2"], "output clip.v2 is no kind of file that is written"),
        (["-"], "output - is no file: stdout carries the paths of files"),
        (["o.png", "./o.png"], "o.png is named twice"),
        (["o/", "o/"], "o is named twice"),
        (["o/%05d.exr", "o/"], "o is named twice"),
        (
            ["a.mp4", "o/", "--hdr"],
            "o would be of 8 bits, too few for HDR\nhint: -o FILE.mp4, FILE.mov, FILE.mkv or FOLDER/%05d.exr",
        ),
        (["a.wav", "--hdr"], "audio has no HDR\nhint: no --hdr, or a video too: -o FILE.mp4"),
        (["o/a.png", "o/"], "o/a.png lies in o, which holds frames alone"),
        (["full"], "full holds frames\nhint: --force replaces them, or name another: -o FOLDER/"),
        (["mixed/", "--force"], "mixed holds other files than frames: mine.png\nhint: name another: -o FOLDER/"),
        (["file/", "--force"], "file is a file\nhint: name a folder: -o FOLDER/"),
        (["here.png", "--force"], "here.png is a folder\nhint: name a file: -o FILE"),
    ],
)
def test_wrong_outputs_are_refused(
    made: Path,
    outputs: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("full/00000.png", "mixed/00000.png", "mixed/mine.png", "here.png/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    options = [text for name in outputs for text in ([name] if name.startswith("--") else ["-o", name])]
    assert run_program(monkeypatch, "decode", str(made / "latents.safetensors"), *options) == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence}")
    assert sorted(tmp_path.rglob("*")) == before


def test_frames_are_replaced_with_force(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("frames.v2", "empty", "linked"):
        (tmp_path / folder).mkdir()
    (tmp_path / "link").symlink_to("linked")
    for folder in ("frames.v2", "linked"):
        (tmp_path / folder / "00077.png").write_text("an older frame")
    outputs = ["-o", "frames.v2", "-o", "empty", "-o", "new.v2/", "-o", "link/", "-o", "A.PNG"]
    code = run_program(monkeypatch, "decode", str(made / "latents.safetensors"), *outputs, "--force")
    out, err = capsys.readouterr()
    assert (code, out.split()) == (0, ["frames.v2", "empty", "new.v2", "link", "A.PNG"]), err
    names = [f"{number:05}.png" for number in range(SMALL.size[0])]
    for folder in ("frames.v2", "empty", "new.v2", "linked"):
        assert sorted(file.name for file in (tmp_path / folder).iterdir()) == names
    assert (tmp_path / "link").is_symlink()
    assert Image.open(tmp_path / "A.PNG").format == "PNG"
    assert not list(tmp_path.glob(".partial*"))
