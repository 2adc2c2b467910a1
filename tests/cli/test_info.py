"""`ltx2 info`: what it says of each kind of file, for people and as JSON, and of files that are nothing known."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from loras import write_header
from ltx2_cli.core.provenance import fingerprint
from ltx2_cli.diffusion.latents import save_latents
from ltx2_cli.media.clip import Media
from ltx2_cli.media.write import write_mp4, write_record, write_wav
from ltx2_cli.models.networks import UPSAMPLERS
from ltx2_cli.models.upsampler import LatentUpsampler
from ltx2_cli.request.profiles import read_spec, to_yaml
from ltx2_cli.request.spec import RunSpec, Streams
from ltx2_cli.runs.info import _item_text
from ltx2_cli.units import quantity
from ltx2_cli.weights.declare import Scope, declared
from program import run_program

SPEC: RunSpec = read_spec(
    prompt="a fox,  ${dawn}\n☂", model="demo", negative_prompt="blur", seed=7, num_inference_steps=3
)
RECORD = to_yaml(SPEC, {"ltx2": "0.1.0", "jax": "0.10.2"})
ABOUT = {"model_version": "ltx2.3", "fps": "24.0", "stage": "final", "record": RECORD}
WAV_HEADER = b"RIFF$\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x80\xbb\0\0\0w\1\0\2\0\x10\0data\0\0\0\0"
MADE = [
    ["prompt", "a fox, ${dawn} ☂"],
    ["negative prompt", SPEC.negative_prompt],
    ["model", "demo"],
    ["recipe", "auto"],
    ["num inference steps", "3"],
    ["seed", "7"],
    ["made with", "ltx2 0.1.0, jax 0.10.2"],
]


class Said:
    """The exit code and what was printed; `rows` are the name and the text of each line."""

    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err

    @property
    def rows(self) -> list[list[str]]:
        return [re.split("  +", line, maxsplit=1) for line in self.out.splitlines() if line]


@pytest.fixture
def info(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return lambda *arguments: Said(run_program(monkeypatch, "info", *map(str, arguments)), *capsys.readouterr())


@pytest.fixture
def latents(tmp_path: Path) -> Path:
    arrays = Streams(np.zeros((1, 4, 2, 2, 3), np.float32), np.zeros((1, 2, 9, 4), np.float32))
    save_latents(arrays, tmp_path / "latents", ABOUT)
    return tmp_path / "latents"


@pytest.fixture
def video(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    frames = draw.integers(0, 255, (9, 64, 96, 3), np.uint8)
    media = Media(frames, draw.uniform(-0.5, 0.5, (9000, 2)).astype(np.float32), 24.0, 24000)
    write_mp4(media, tmp_path / "clip.mp4", ABOUT)
    return tmp_path / "clip.mp4"


@pytest.mark.parametrize(
    ("kind", "own"),
    [("video", ["audio", "24000 Hz, peak -1.0 dB"]), ("latents", ["latents", "video 1x4x2x2x3, audio 1x2x9x4"])],
)
def test_info_prints_the_origin_of_a_file(info, kind: str, own: list[str], request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(kind)
    assert info(path).rows == [
        [kind, str(path)],
        ["size", quantity(path.stat().st_size)],
        ["clip", "96x64, 9 frames, 0.38 s at 24 frames a second"],
        own,
        ["model version", "ltx2.3"],
        ["stage", "final"],
        *MADE,
    ]


def test_json_has_the_complete_record(info, latents: Path, video: Path) -> None:
    """Which --config reads: JSON is YAML."""
    said = info("--json", latents, video)
    of_latents, of_video = json.loads(said.out)
    record = of_video.pop("record")
    assert record == of_latents.pop("record")
    assert (record["prompt"], record["provenance"]["jax"]) == (SPEC.prompt, "0.10.2")
    assert record.keys() - {"provenance"} == asdict(SPEC).keys()
    clip = {"width": 96, "height": 64, "num_frames": 9, "fps": 24.0, "seconds": 0.375}
    common = {"model_version": "ltx2.3", "stage": "final", **clip}
    shapes = {"video": [1, 4, 2, 2, 3], "audio": [1, 2, 9, 4]}
    short = {"integrated": None, "peak": pytest.approx(-1, abs=0.1)}  # of audio below 0.4 s
    for said, path, own in (
        (of_video, video, {"kind": "video", "sample_rate": 24000, "latents": None, "loudness": short}),
        (of_latents, latents, {"kind": "latents", "sample_rate": None, "latents": shapes}),
    ):
        assert said == {"file": str(path), "bytes": path.stat().st_size, **own, **common}


def test_json_has_no_numbers_that_json_lacks(info, tmp_path: Path) -> None:
    text = RECORD.replace("fps: 24.0", "fps: .nan").replace("  ltx2: 0.1.0", "  ltx2: 0.1.0\n  x: [-.inf, {a: .inf}]")
    write_record(tmp_path / "clip.yaml", text)
    (said,) = json.loads(info("--json", tmp_path / "clip.yaml").out, parse_constant=pytest.fail)
    assert (said["record"]["fps"], said["record"]["provenance"]["x"]) == (".nan", ["-.inf", {"a": ".inf"}])


@pytest.mark.parametrize("prompt", ["a ${dawn}", r"a \\${dawn}", r"a \\\\${dawn}"])
def test_config_accepts_the_record_as_json(info, prompt: str, tmp_path: Path) -> None:
    write_record(tmp_path / "clip.yaml", to_yaml(replace(SPEC, prompt=prompt), {"ltx2": "0.1.0"}))
    (said,) = json.loads(info("--json", tmp_path / "clip.yaml").out)
    (tmp_path / "again.json").write_text(json.dumps(said["record"]))
    assert read_spec(config=tmp_path / "again.json").prompt == prompt


def test_files_of_other_programs_are_described(info, tmp_path: Path, video: Path) -> None:
    bare = Streams(np.zeros((1, 4, 2, 2, 3), np.float32), np.zeros((1, 2, 9, 4), np.float32))
    save_latents(bare, tmp_path / "bare.safetensors", {"format": "pt"})
    assert info(tmp_path / "bare.safetensors").rows[2:] == [
        ["clip", "96x64, 9 frames"],
        ["latents", "video 1x4x2x2x3, audio 1x2x9x4"],
        ["record", "none: the file does not say what made it"],
    ]
    write_mp4(Media(np.zeros((9, 64, 96, 3), np.uint8), np.zeros((0, 2), np.float32), 24.0, 24000), video)
    assert info(video).rows[3:] == [["audio", "none"], ["record", "none: the file does not say what made it"]]


def test_records_are_described(info, tmp_path: Path) -> None:
    write_record(tmp_path / "clip.yaml", RECORD)
    assert info(tmp_path / "clip.yaml").rows == [["record", str(tmp_path / "clip.yaml")], *MADE]


def test_a_sound_alone_has_its_record_beside_it(info, tmp_path: Path) -> None:
    """A WAV has no place for it; a record of a clip with a picture is that of another file."""
    write_wav(
        Media(np.zeros((0, 64, 96, 3), np.uint8), np.zeros((9000, 2), np.float32), 24.0, 24000),
        path := tmp_path / "s.wav",
    )
    header = [["audio", str(path)], ["size", quantity(path.stat().st_size)], ["length", "0.38 s at 24000 Hz, silent"]]
    none = ["record", "none: no file beside it says what made it"]
    assert info(path).rows == [*header, none]
    write_record(tmp_path / "s.yaml", RECORD)
    assert info(path).rows == [*header, none]
    write_record(
        tmp_path / "s.yaml", to_yaml(replace(SPEC, streams="audio", audio=None), {"ltx2": "0.1.0", "jax": "0.10.2"})
    )
    assert info(path).rows == [*header, *MADE]
    (said,) = json.loads(info("--json", path).out)
    assert (said["kind"], said["seconds"], said["sample_rate"], said["record"]["streams"]) == (
        "audio",
        0.375,
        24000,
        "audio",
    )


def test_info_prints_the_provenance_of_a_clip(info, tmp_path: Path) -> None:
    """Hashes as far as people compare them."""
    prints = Streams(fingerprint(np.zeros(4)), fingerprint(np.ones(4)))
    latents = {"final": {name: vars(each) for name, each in prints._asdict().items()}}
    made = {
        "ltx2": "0.1.0",
        "devices": "8 TPU7x",
        "meshes": {"stage1": "passes 2 x tokens 4", "final": "tokens 8"},
        "files": {"vae/model.safetensors": "a" * 64, "vocoder/model.safetensors": "b" * 64},
        "source": {"file": "/clips/fox.safetensors", "sha256": "c" * 64, "fps": 24},
        "latents": latents,
    }
    write_record(tmp_path / "clip.yaml", to_yaml(SPEC, made))
    assert info(tmp_path / "clip.yaml").rows[len(MADE) :] == [
        ["made with", "ltx2 0.1.0"],
        ["devices", "8 TPU7x: stage1 on passes 2 x tokens 4, final on tokens 8"],
        ["went on from", f"/clips/fox.safetensors {'c' * 12}"],
        ["files", f"vae/model.safetensors {'a' * 12}"],
        ["", f"vocoder/model.safetensors {'b' * 12}"],
        ["after final", ", ".join(f"{name} {each.sha256[:12]}" for name, each in prints._asdict().items())],
    ]
    (said,) = json.loads(info("--json", tmp_path / "clip.yaml").out)
    assert said["record"]["provenance"] == made


@pytest.mark.parametrize(
    ("name", "model_version", "factors"),
    [
        ("Lightricks/LTX-2.3/ltx-2.3-spatial-upscaler-x1.5-1.0.safetensors", "ltx2.3", (1, 1.5)),
        ("Lightricks/LTX-2/ltx-2-temporal-upscaler-x2-1.0.safetensors", None, (2, 1)),
    ],
)
def test_latent_upsamplers_are_described(
    info, name: str, model_version: str | None, factors: tuple[float, float], tmp_path: Path
):
    shapes = declared(LatentUpsampler(Scope("bfloat16"), UPSAMPLERS[name]))
    path = write_header(tmp_path / Path(name).name, shapes)
    parameters = sum(int(np.prod(shape)) for shape in shapes.values())
    (said,) = json.loads(info("--json", path).out)
    assert said == {
        "kind": "latent upsampler",
        "file": str(path),
        "bytes": path.stat().st_size,
        "model_version": model_version,
        "variant": None,
        "upsamples": dict(zip(("time", "space"), factors, strict=True)),
        "parameters": parameters,
        "networks": [{"name": "latent_upsampler", "parameters": parameters, "formats": {"bfloat16": len(shapes)}}],
    }
    assert ["space", f"x{factors[1]:g}"] in info(path).rows


def test_readable_files_are_described_before_errors(info, video: Path) -> None:
    said = info(video.with_name("gone.mp4"), video)
    assert said.code == 2
    assert said.rows[0] == ["video", str(video)]
    assert "gone.mp4 cannot be read: No such file or directory" in said.err


def metadata(**values: str) -> dict[str, str]:
    return ABOUT | values


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("notes.txt", b"rain", "notes.txt is nothing that is known here"),
        ("empty.mp4", b"", "empty.mp4 is nothing that is known here"),
        ("clip.mp4", b"\0\0\0\x18ftypisom", "clip.mp4 is damaged: "),
        ("s.wav", b"RIFF\xff\0\0\0WAVEfmt ", "s.wav is no WAV that ltx2 writes: fmt chunk and/or data"),
        ("s.wav", WAV_HEADER, "s.wav is damaged: it has no samples"),
        ("s.wav", WAV_HEADER[:-4] + b"\x10\0\0\0", "s.wav is damaged: it is cut short"),
        ("x.safetensors", b"rain", "x.safetensors is damaged or cut short"),
        ("x.safetensors", b"version https://git-lfs.github.com/spec/v1", "is a Git LFS pointer"),
        ("page.yaml", b"prompt: rain", "page.yaml is no record of a clip: it does not say what it was `provenance`"),
        ("page.yaml", b"a: [", "page.yaml, line 2: this is not plain YAML"),
        ("page.yaml", b"\xff\xfe", "page.yaml is nothing that is known here: it is not text"),
    ],
)
def test_unknown_files_are_an_error_of_one_sentence(
    info, name: str, content: bytes, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    said = info(tmp_path / name)
    assert (said.code, said.out) == (2, "")
    assert sentence in said.err
    assert [line.split(":")[0] for line in said.err.splitlines()] == ["error", "hint"]


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        (metadata(record="prompt: rain"), "is no record of a clip"),
        (metadata(record="a: ["), "line 2: this is not plain YAML"),
        (metadata(fps="fast"), "says that its fps is 'fast'"),
        (metadata(fps="nan"), "says that its fps is 'nan'"),
        (metadata(fps="0"), "says that its fps is '0'"),
        (metadata(stage="foo"), "says that its stage is 'foo'"),
        (metadata(height="abc"), "says that its height is 'abc'"),
        (metadata(num_frames="-1"), "says that its num_frames is '-1'"),
        (metadata(width=str(2**40)), "says that its width is '1099511627776'"),
    ],
)
def test_a_damaged_record_in_latents_is_refused(info, about: dict[str, str], sentence: str, latents: Path) -> None:
    save_latents(Streams(np.zeros((1, 4, 2, 2, 3)), np.zeros((1, 2, 9, 4))), latents, about)
    said = info(latents)
    assert (said.code, said.out) == (2, "")
    assert sentence in said.err


def test_other_tensors_and_folders_are_refused(info, tmp_path: Path) -> None:
    write_header(tmp_path / "a.safetensors", {"proj_in.weight": (4, 8)})
    for place in (tmp_path / "a.safetensors", tmp_path):
        said = info(place)
        assert (said.code, said.out) == (2, "")
        assert "a.safetensors is nothing that is known here: it holds `proj_in.weight`" in said.err
    write_header(tmp_path / "b.safetensors", {"proj_in.weight": (4, 8)})
    assert "it holds 2 safetensors files, a.safetensors, b.safetensors" in info(tmp_path).err
    write_header(tmp_path / "c.safetensors", {"model.diffusion_model.x": (1,)})
    assert "has no config in its metadata" in info(tmp_path / "c.safetensors").err


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        ({"kind": "video", "frame": -1}, "p@-1:0.5"),
        ({"kind": "reference", "frame": 0}, "reference p:0.5"),
        ({"kind": "mask", "frame": 0}, "reference mask p"),
        ({"kind": "image", "frame": 0, "strength": None}, "p@0"),
        (
            {"kind": "clip", "frame": 0, "anew": [8, 17], "streams": "both"},
            "frames 8 to 17 of clip p regenerated, both",
        ),
        (
            {"kind": "clip", "frame": 0, "regenerate": 8},
            "{'path': 'p', 'strength': 0.5, 'kind': 'clip', 'frame': 0, 'regenerate': 8}",
        ),
    ],
)
def test_conditions_are_shown_as_they_are_typed(condition: dict, text: str):
    assert _item_text({"path": "p", "strength": 0.5, **condition}) == text


def test_a_given_sound_is_shown_by_its_name():
    assert _item_text({"path": "s.wav", "sha256": "ab"}) == "s.wav"


def test_a_language_model_of_something_else_is_no_text_encoder(info, tmp_path: Path) -> None:
    """One of LTX-2.5 in a file has its tokenizer there."""
    write_header(tmp_path / "language.safetensors", {"model.embed_tokens.weight": (4, 8)})
    said = info(tmp_path / "language.safetensors")
    assert (said.code, said.out) == (2, "")
    assert "is nothing that is known here: it holds `model.embed_tokens.weight`" in said.err
