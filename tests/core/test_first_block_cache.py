"""The first-block cache: steps skip layers where diffusers' does, and what is skipped depends on a video alone."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from diffusers import FirstBlockCacheConfig
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.hooks.first_block_cache import FBCHeadBlockHook
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformerBlock
from safetensors.numpy import load_file

from clips import ALL_ON, Case, Checkpoint, Size, final_latents, plan_of, reference_latents
from ltx2_cli.core.components import Components
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import START, run_phases
from ltx2_cli.core.run_saver import RunSaver
from ltx2_cli.core.state import RunState
from ltx2_cli.diffusion.latents import from_tokens
from ltx2_cli.request.spec import Streams
from parity import relative_error
from program import run_program
from tiny import LTX2_3, tiny_pipeline

OFF = (1.0, 0.0, 1.0, 0.0)
UNGUIDED = Case(Size(17, 64, 96, 24.0), 24, OFF, OFF, (1,))
GUIDED = ALL_ON._replace(steps=8)  # STG at block 1, behind the first
THRESHOLDS = {"2.0": 0.64, "2.3": 0.72}  # of random weights; of trained ones a tenth skips many blocks


class BlockOfStreams(TransformerBlockMetadata):
    """What diffusers' cache is told of a block whose second stream is the audio, not the text."""

    def _get_parameter_from_args_kwargs(self, identifier: str, args: Any = (), kwargs: Any = None) -> Any:
        return kwargs["audio_hidden_states" if identifier == "encoder_hidden_states" else identifier]


@contextmanager
def cached(pipeline: Any, threshold: float) -> Iterator[list[bool]]:
    """The pipeline with diffusers' first-block cache; whether each of its two forwards a step ran all blocks: one is
    perturbed behind the first block, of no weight here."""
    metadata = BlockOfStreams(return_hidden_states_index=0, return_encoder_hidden_states_index=1)
    TransformerBlockRegistry.register(LTX2VideoTransformerBlock, metadata)
    whole, decide = list[bool](), FBCHeadBlockHook._should_compute_remaining_blocks

    def seen(hook: FBCHeadBlockHook, residual: Any) -> bool:
        whole.append(decide(hook, residual))
        return whole[-1]

    pipeline.transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FBCHeadBlockHook, "_should_compute_remaining_blocks", seen)
        yield whole
    pipeline.transformer.disable_cache()


@pytest.mark.parametrize("version", THRESHOLDS)
def test_steps_skip_blocks_as_in_diffusers(version: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The same ones, to the same latents."""
    changes, folder, threshold = None if version == "2.0" else LTX2_3, tmp_path / "model", THRESHOLDS[version]
    model = Checkpoint(folder, tiny_pipeline(folder, 40, changes)) if changes else checkpoint
    plan = plan_of(model, UNGUIDED, 5, tmp_path / "noise.safetensors", first_block_cache=threshold)
    *_, state = run_phases(plan, START, Components(plan), Report())
    ours = from_tokens(Streams(*map(np.asarray, state.latents)), plan.latent_shapes)
    with cached(model.pipeline, threshold) as whole:
        theirs = reference_latents(model.pipeline, UNGUIDED, 5)
    assert whole[::2] == whole[1::2]
    assert len(whole) == 2 * UNGUIDED.steps
    assert 2 < (skipped := whole.count(False) // 2) < UNGUIDED.steps - 2
    assert state.skipped == (skipped,)
    for got, wanted in zip(ours, theirs, strict=True):
        assert relative_error(got, wanted) <= 1e-4


def difference(got: tuple[np.ndarray, ...], wanted: tuple[np.ndarray, ...]) -> float:
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in zip(got, wanted, strict=True))


def test_without_a_change_nothing_is_skipped(checkpoint: Checkpoint, compilations: list[str]) -> None:
    """Whether the perturbed pass begins behind the first block or with it; other thresholds compile nothing."""
    for block in (1, 0):
        case = GUIDED._replace(stg_blocks=(block,))
        plan = plan_of(checkpoint, case, 5, first_block_cache=0)
        made = final_latents(plan, components := Components(plan))
        assert difference(made, final_latents(plan_of(checkpoint, case, 5))) < 2e-6
        compilations.clear()
        components.adopt(other := plan_of(checkpoint, case, 5, first_block_cache=1))
        assert difference(final_latents(other, components), made) > 1e-3
        assert not compilations


EIGHT = {"profile": "ironwood", "mesh": {"passes": 2, "tokens": -1, "heads": 1}}


@pytest.mark.slow
def test_what_is_skipped_depends_on_a_video_alone(checkpoint: Checkpoint) -> None:
    """Of three at once on eight devices each is as alone on one, also with layers in the host's memory, in windows and
    with fresh noise."""
    asked = {"first_block_cache": 0.9, "sampler": "euler_ancestral", "windows": 2, "window_overlap": 0.3}
    three = plan_of(checkpoint, GUIDED, 5, sharding=EIGHT, num_videos=3, offload="layers", **asked)
    *_, state = run_phases(three, START, Components(three), Report())
    for row, skipped in enumerate(state.skipped):
        plan = plan_of(checkpoint, GUIDED, 5 + row, **asked)
        *_, alone = run_phases(plan, START, Components(plan), Report())
        assert alone.skipped == (skipped,)
        assert 0 < skipped < 2 * GUIDED.steps
        beside = tuple(stream[row : row + 1] for stream in state.latents)
        assert difference(beside, alone.latents) < 1e-4


@pytest.mark.slow
def test_a_stopped_run_skips_the_same(
    two_stages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It goes on from the last step that ran all blocks, to the same bytes; the record counts what was skipped."""
    monkeypatch.chdir(tmp_path)
    options = [*two_stages, "--first-block-cache", "0.9"]
    for name, value in {"--height": "64", "--width": "64", "--steps": "12"}.items():
        options[options.index(name) + 1] = value
    assert run_program(monkeypatch, "generate", *options, "-o", "a.mp4", "--save-latents", "a.safetensors") == 0
    assert "of 12 forwards ran the first of" in capsys.readouterr().err
    others = ["-o", "b.mp4", "--save-latents", "b.safetensors", "--save-run", "--save-run-every", "0"]
    with stopped_after_skipping():
        assert run_program(monkeypatch, "generate", *options, *others) == 130
    assert run_program(monkeypatch, "resume", "b.run") == 0
    got, wanted = load_file("b.safetensors"), load_file("a.safetensors")
    assert {name: got[name].tobytes() for name in got} == {name: wanted[name].tobytes() for name in wanted}
    counts = [yaml.safe_load(Path(f"{name}.yaml").read_text())["provenance"]["skipped_forwards"] for name in "ab"]
    assert counts[0] == counts[1] > 0
    capsys.readouterr()
    assert run_program(monkeypatch, "info", "a.mp4") == 0
    assert re.search(r"^first block cache +0\.9$", capsys.readouterr().out, re.MULTILINE)


@contextmanager
def stopped_after_skipping() -> Iterator[None]:
    """This process gets SIGTERM when a step after one that skipped blocks ran them all."""
    measure = RunSaver._measure

    def send(saver: RunSaver, progress: RunState) -> None:
        measure(saver, progress)
        if progress.current is not None and any(progress.skipped) and not saver.stop.requested:
            os.kill(os.getpid(), signal.SIGTERM)
            while not saver.stop.requested:
                pass  # a thread hears the signal

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunSaver, "_measure", send)
        yield


REFUSED = {
    "--sampler res_2s": "those of res_2s have two forwards hint: --sampler euler",
    "--guidance-interval 0.2,0.9": "these have different passes hint: --guidance-interval 0,1",
    "--first-block-cache 2": "first_block_cache 2.0 is not in 0 to 1; nearest: --first-block-cache 1",
}


@pytest.mark.parametrize("options", REFUSED)
def test_steps_that_cannot_be_compared_are_refused(
    options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = options.split() if "cache" in options else ["--first-block-cache", "0.1", *options.split()]
    assert run_program(monkeypatch, "generate", "rain", "--model", "demo", *words) == 2
    assert REFUSED[options] in " ".join(capsys.readouterr().err.split())
    assert not [*tmp_path.iterdir()]


def test_random_weights_measure_no_cache(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(monkeypatch, "bench", "run", "--model", "demo", "--first-block-cache", "0.1") == 2
    assert "leave out --first-block-cache" in capsys.readouterr().err
