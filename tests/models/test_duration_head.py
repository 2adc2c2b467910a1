"""The duration head beside diffusers', from a folder and from the published file; and the frames of a length."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from duration_heads import duration_head, published_names
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.models.arch import ConnectorsArch
from ltx2_cli.models.duration_head import open_duration_head
from ltx2_cli.models.networks import PRESETS
from ltx2_cli.request.size import predicted_frames
from ltx2_cli.request.spec import Streams
from program import run_program

CONNECTORS: ConnectorsArch = PRESETS["ltx2.5"].connectors
FPS = (24.0, 25.0, 60.0, 7.5)


def random_contexts() -> Streams[np.ndarray]:
    random = np.random.default_rng(1)
    return Streams(*(random.standard_normal((20, width), np.float32) for width in CONNECTORS.widths))


@pytest.mark.parametrize(("heads", "queries"), [(4, 1), (8, 3)])
def test_seconds_equal_those_of_the_reference(heads: int, queries: int, tmp_path: Path) -> None:
    """Of both forms of files, as far as the published one can say: it states neither number."""
    reference = duration_head(CONNECTORS.widths, num_pooler_heads=heads, num_queries=queries)
    reference.save_pretrained(tmp_path / "folder")
    save_file(published_names(reference), tmp_path / "file.safetensors")
    contexts = random_contexts()
    with torch.no_grad():
        wanted = reference(*(torch.tensor(context)[None] for context in contexts)).item()
    places = [tmp_path / "folder", *([tmp_path / "file.safetensors"] if (heads, queries) == (4, 1) else [])]
    for place in places:
        assert open_duration_head(place, CONNECTORS).seconds(contexts) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("fps", FPS)
def test_frames_equal_those_of_the_reference(fps: float) -> None:
    reference = duration_head(CONNECTORS.widths)
    legal = {"num_frames": [8 * number + 1 for number in range(200)]}
    for seconds in (0.1, 0.99, 1.0, 1.4, 3.3, 7.77, 19.9, 20.5, 300.0):
        reference.forward = lambda *contexts, seconds=seconds: torch.tensor([seconds])
        assert predicted_frames(seconds, fps, legal) == reference.predict_num_frames(
            frame_rate=fps, temporal_compression_ratio=8
        )


def test_a_head_for_other_contexts_is_refused(tmp_path: Path) -> None:
    duration_head(Streams(16, 8)).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"holds no duration head of this model: .*video_input_proj\.weight"):
        open_duration_head(tmp_path, CONNECTORS)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mlp_out.bias", lambda tensor: tensor * torch.nan),
        ("mlp_out.bias", lambda tensor: tensor + 1000),
        ("attention_pooler.query_tokens", lambda tensor: tensor[0]),
        ("attention_pooler.cross_attn.in_proj_weight", lambda tensor: tensor[1:]),
        ("mlp_hidden.bias", lambda tensor: tensor[1:]),
    ],
    ids=["NaN", "no length", "one axis", "no three parts", "cut"],
)
def test_a_damaged_head_is_named(name: str, change: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    weights = published_names(duration_head(CONNECTORS.widths))
    weights[f"duration_head.{name}"] = change(weights[f"duration_head.{name}"]).contiguous()
    save_file(weights, tmp_path / "head.safetensors")
    with pytest.raises((UsageError, RunError), match=r"holds no duration head|the duration head is damaged"):
        open_duration_head(tmp_path / "head.safetensors", CONNECTORS).seconds(random_contexts())


@pytest.mark.parametrize("heads", [0, 5, "four"])
def test_a_number_of_heads_that_cannot_be_is_refused(heads: object, tmp_path: Path) -> None:
    duration_head(CONNECTORS.widths).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_pooler_heads": heads}))
    with pytest.raises(UsageError, match=f"holds no duration head of this model: {heads!r} heads"):
        open_duration_head(tmp_path, CONNECTORS)


SMALLEST = "--recipe distilled --width 64 --height 64"
REFUSED = {
    "generate --model demo --prompt rain --duration auto --dry-run": "and LTX-2.5 alone has a duration head",
    f"generate --model ltx2.3 --prompt rain --duration auto {SMALLEST}": "LTX-2.5 alone has a duration head",
    "generate --model demo --prompt rain --duration auto": "hint: a length: --duration 5s",
    "generate --model demo --prompt rain --duration auto --num-frames 9": "--num-frames is not taken beside --duration",
    "generate --model demo --prompt rain --duration auto --warmup": "--warmup compiles for one length",
    "plan --model demo --duration auto": "--duration auto is an option of `ltx2 generate` alone",
}


@pytest.mark.parametrize(("words", "sentence"), REFUSED.items())
def test_what_auto_cannot_be_is_refused(
    words: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    usual = os.sysconf  # on a machine that has room for the models, which are not here
    monkeypatch.setattr(os, "sysconf", lambda name: 8 * usual(name) if name == "SC_PHYS_PAGES" else usual(name))
    assert run_program(monkeypatch, *words.split()) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not [*tmp_path.iterdir()]
