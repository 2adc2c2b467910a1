"""Records and files with keys and values of earlier versions: read where they mean what is done now, else refused."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ltx2_cli import resolve
from ltx2_cli.core.provenance import read_provenance
from ltx2_cli.core.saved_run import open_saved_run
from ltx2_cli.errors import UsageError
from ltx2_cli.media.clip import Media
from ltx2_cli.media.write import write_mp4
from ltx2_cli.request.profiles import read_spec, to_yaml
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.yaml import dump, parse
from program import run_program
from sounds import tone

BEFORE = Path(__file__).parent / "before"  # a run after 2 of 4 steps, and the record of its clip
Ltx2 = Callable[..., tuple[int, str, str]]
SIDES = {  # what earlier versions wrote into records
    "ltx-core": {
        "stg_rule": "always",
        "shift_tokens": "reference",
        "x0_sigma": "token",
        "cross_timestep": "gate",
        "reference_bias": "log",
        "clamp_vocoder": True,
    },
    "diffusers": {
        "stg_rule": "config",
        "shift_tokens": "actual",
        "x0_sigma": "stream",
        "cross_timestep": "always",
        "reference_bias": "linear",
        "clamp_vocoder": False,
    },
}
OTHER = {"ltx-core": "diffusers", "diffusers": "ltx-core"}
UPSAMPLING = ("adain", "tone_map")


@pytest.fixture
def ltx2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ltx2:
    """`ltx2` in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: (run_program(monkeypatch, *words), *capsys.readouterr())


def recorded(side: str) -> tuple[RunSpec, dict[str, Any]]:
    """A request, and its record as earlier versions wrote it."""
    spec = read_spec(prompt="rain", model="demo", compat=side, seed=5)
    record = parse(to_yaml(spec, {"ltx2": "0"})) | SIDES[side]
    record["second_stage"] |= dict.fromkeys(UPSAMPLING, 0.0)
    return spec, record


@pytest.mark.parametrize("side", SIDES)
def test_a_record_of_before_is_read(side: str, ltx2: Ltx2) -> None:
    """In a file beside its clip and in the clip."""
    spec, record = recorded(side)
    Path("rain.yaml").write_text(dump(record))
    assert read_spec(config=Path("rain.yaml")) == spec
    assert read_spec(config=Path("rain.yaml"), compat=OTHER[side]).compat == OTHER[side]
    write_mp4(
        Media(np.zeros((9, 64, 64, 3), np.uint8), tone(1, 16000), 24.0, 16000), Path("a.mp4"), {"record": dump(record)}
    )
    pages = [ltx2("config", "show", "--config", name, "--json") for name in ("rain.yaml", "a.mp4")]
    assert [(code, err) for code, _, err in pages] == [(0, "")] * 2
    assert f'"compat": {{\n    "value": "{side}"' in pages[0][1]
    assert pages[0][1].replace("rain.yaml", "a.mp4") == pages[1][1]
    assert ltx2("config", "validate", "rain.yaml")[0] == 0


@pytest.mark.parametrize("key", SIDES["diffusers"])
@pytest.mark.parametrize("side", SIDES)
def test_a_side_of_its_own_is_refused(side: str, key: str, ltx2: Ltx2) -> None:
    _, record = recorded(side)
    other = SIDES[OTHER[side]][key]
    Path("rain.yaml").write_text(dump({**record, key: other}))
    code, out, err = ltx2("config", "show", "--config", "rain.yaml")
    assert (code, out) == (2, "")
    sentence, hint = err.splitlines()
    assert sentence.startswith(f"error: rain.yaml: `{key}` is {other!r}, and `compat` decides it, which is {side}: ")
    assert hint.endswith(f"--set compat={OTHER[side]}")
    assert ltx2("info", "rain.yaml")[0] == 0


@pytest.mark.parametrize("key", UPSAMPLING)
def test_upsampled_latents_that_were_changed_are_refused(key: str, ltx2: Ltx2) -> None:
    _, record = recorded("ltx-core")
    record["second_stage"][key] = 0.5
    Path("rain.yaml").write_text(dump(record))
    sentence = f"rain.yaml: `second_stage.{key}` was removed, and is 0.5; 0 alone is read"
    assert ltx2("config", "show", "--config", "rain.yaml") == (2, "", f"error: {sentence}\nhint: leave it out\n")
    assert ltx2("info", "rain.yaml")[0] == 0
    line = dump(record).splitlines().index(f"  {key}: 0.5") + 1
    assert f"rain.yaml, line {line}: `second_stage.{key}` was removed" in ltx2("config", "validate", "rain.yaml")[1]


def test_old_keys_may_still_be_typed() -> None:
    """Beside the `compat` of the same layer, else as under ltx-core; by short names too."""
    assert read_spec(dotlist=["stg_rule=always", "adain=0", "second_stage.tone_map=0"], prompt="rain") == read_spec(
        prompt="rain"
    )
    assert read_spec(prompt="rain", compat="diffusers", clamp_vocoder=False).follows_diffusers
    for setting in ("stg_rule=config", "cross_timestep=never", "adain=0.5", "x0_sigma=[1]"):
        with pytest.raises(UsageError, match=f"--set '{setting.partition('=')[0]}"):
            read_spec(dotlist=[setting], prompt="rain")


def test_an_old_key_of_noise_is_read(tmp_path: Path) -> None:
    (noise := tmp_path / "noise").touch()
    (page := tmp_path / "page.yaml").write_text(dump({"prompt": "rain", "noise": str(noise)}))
    assert read_spec(config=page).initial_noise == str(noise)


@pytest.mark.parametrize(("old", "new"), [("picture", "video"), ("sound", "audio"), ("both", "both")])
def test_old_streams_of_an_edited_clip_are_read(old: str, new: str, tmp_path: Path) -> None:
    edited = {"kind": "clip", "path": __file__, "anew": [1, 2], "streams": old}
    (page := tmp_path / "page.yaml").write_text(dump({"prompt": "rain", "conditions": [edited]}))
    assert [(each.streams, each.regenerate) for each in read_spec(config=page).conditions] == [(new, (1, 2))]


def test_a_run_and_a_record_of_before_are_read(ltx2: Ltx2) -> None:
    Path("ball.run").write_bytes(gzip.decompress((BEFORE / "ball.run.gz").read_bytes()))
    kept = open_saved_run(Path("ball.run").absolute())
    state = kept.progress(resolve(kept.spec({"sharding": "single"})))
    assert (state.phase, state.batch, state.step, state.written, kept.every) == (0, 0, 2, 0, 0)
    assert state.current is not None
    assert [stream.shape for stream in (*state.current, *state.contexts["connectors"])] == [
        (1, 4, 32),
        (1, 9, 32),
        (1, 32, 128),
        (1, 32, 64),
    ]
    assert ltx2("resume", "ball.run", "--sharding", "single", "--allow-changes", "--dry-run")[0] == 0
    Path("ball.yaml").write_bytes((BEFORE / "ball.yaml").read_bytes())
    latents = read_provenance(parse(Path("ball.yaml").read_text()), "ball.yaml").latents
    assert [stream.size for stream in latents["final"]] == [128, 288]
    code, out, _ = ltx2("config", "show", "--config", "ball.yaml")
    assert (code, "num_inference_steps: 4 " in out) == (0, True)
