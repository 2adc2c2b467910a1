"""The command as a user types it, from its arguments to its files, against diffusers from the same folder and noise."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from safetensors.torch import save_file

from clips import ALL_ON, NEGATIVE, PROMPT, TEXT_TOKENS, Checkpoint, reference_latents
from forked import fork, run_main
from ltx2_cli.core.bench import WARM_RUN
from parity import relative_error
from tiny import draw_noise

GUIDANCE = ("guidance-scale", "stg-scale", "modality-scale", "guidance-rescale")


@pytest.mark.slow
def test_generate_makes_the_latents_of_the_reference(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Compiled as for a user, where the other tests compile in haste."""
    save_file(draw_noise(checkpoint.pipeline, 12, *ALL_ON.size), tmp_path / "noise")
    asked = {
        "model": checkpoint.folder,
        "prompt": PROMPT,
        "negative-prompt": NEGATIVE,
        **{name.replace("_", "-"): value for name, value in ALL_ON.size._asdict().items()},
        "steps": ALL_ON.steps,
        **dict(zip(GUIDANCE, ALL_ON.video, strict=True)),
        **dict(zip((f"audio-{name}" for name in GUIDANCE), ALL_ON.audio, strict=True)),
        "stg-blocks": ",".join(map(str, ALL_ON.stg_blocks)),
        "dtype": "float32",
        "text-encoder-dtype": "float32",
        "sharding": "single",
        "noise": "noise",
        "save-latents": "latents",
        "output": "new/clip.mp4",
        "preview": "preview.png",
        "perf-dump": "perf.json",
    }
    options = [text for name, value in asked.items() for text in (f"--{name}", str(value))]
    settings = ["--set", "compat=diffusers", "--set", f"max_sequence_length={TEXT_TOKENS}"]
    run = fork(
        tmp_path,
        run_main,
        "generate",
        *options,
        *settings,
        environment={"XLA_FLAGS": "", "XDG_CACHE_HOME": str(tmp_path)},
    )
    out, err = run.communicate(timeout=300)
    assert (run.returncode, out) == (0, "new/clip.mp4\n"), err
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["clip.mp4", "clip.yaml"]
    assert (tmp_path / "preview.png").read_bytes().startswith(b"\x89PNG")
    settings = json.loads((tmp_path / "perf.json").read_text())["settings"]
    assert (settings["measured"], settings["steps"], settings["passes"]) == (WARM_RUN, [ALL_ON.steps], [4])
    latents = load_file(tmp_path / "latents")
    theirs = dict(zip(("video", "audio"), reference_latents(checkpoint.pipeline, ALL_ON, 12), strict=True))
    errors = {name: relative_error(latents[name], wanted) for name, wanted in theirs.items()}
    assert max(errors.values()) <= 1e-4, errors
