"""One tiny checkpoint with random weights, and the reference pipeline it came from, for all tests of the core."""

from collections.abc import Iterator

import jax
import pytest
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

from clips import PROMPT, TEXT_TOKENS, Checkpoint
from loras import ORIGINAL, write_lora
from ltx2_cli.private_api import COMPILED_EVENT
from parity import randomise
from tiny import tiny_pipeline

CLIP = ["--height", "128", "--width", "128", "--num-frames", "9", "--steps", "2", "--stg-blocks", "0", "--seed", "3"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("tiny")
    return Checkpoint(folder, tiny_pipeline(folder))


@pytest.fixture(scope="session")
def second_stage(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """An upsampler, and a LoRA for the second stage, as a request names them."""
    folder = tmp_path_factory.mktemp("second")
    config = {"in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 1}
    randomise(LTX2LatentUpsamplerModel(**config), seed=1).save_pretrained(folder / "upsampler")
    lora = write_lora(folder / "distilled.safetensors", checkpoint.pipeline, ORIGINAL, 3)
    return {"second_stage.upsampler": str(folder / "upsampler"), "second_stage.lora": [str(lora)]}


@pytest.fixture(scope="session")
def two_stages(checkpoint: Checkpoint, second_stage: dict[str, object]) -> list[str]:
    """The options of `ltx2 generate` for a clip in two stages, and the files they name."""
    model = ["--model", str(checkpoint.folder), "--dtype", "float32", "--text-encoder-dtype", "float32"]
    length = ["--set", f"max_sequence_length={TEXT_TOKENS}"]
    upsampler, (lora,) = second_stage.values()
    second = ["--recipe", "two_stage", "--upsampler", str(upsampler), "--set", f"second_stage.lora=[{lora}]"]
    return ["--prompt", PROMPT, *CLIP, *model, *length, *second]


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Grows by one for each program that XLA compiles, or that is read from what this session has compiled."""
    seen: list[str] = []

    def listen(event: str, seconds: float, **details: object) -> None:
        if event == COMPILED_EVENT:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)
