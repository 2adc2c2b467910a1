"""What a run promises beyond equality with the reference: the same bytes again, nothing compiled twice, any mesh."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clips import ALL_ON, Case, Checkpoint, Size, final_latents, make_latents, plan_of
from live_bytes import LiveBytes, check_live_bytes
from ltx2_cli import read_spec, resolve
from ltx2_cli.core.components import Components
from ltx2_cli.core.denoise_memory import kept_networks
from ltx2_cli.core.report import Advance, Report
from ltx2_cli.core.run import START, open_components
from ltx2_cli.core.state import RunState
from ltx2_cli.core.write import write
from ltx2_cli.diffusion.latents import noise, open_latents, to_tokens
from ltx2_cli.errors import UsageError
from ltx2_cli.estimate.phases import phase_memory
from ltx2_cli.media.probe import open_video
from ltx2_cli.models.networks import DENOISER
from ltx2_cli.parallel.devices import DeviceMemory
from ltx2_cli.request.spec import Streams

SMALL = Case(Size(9, 64, 64, 24.0), 3, ALL_ON.video, ALL_ON.audio, (1,))


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def test_the_same_seed_gives_the_same_bytes(checkpoint: Checkpoint) -> None:
    first, again = (final_latents(plan_of(checkpoint, SMALL, 3)) for _ in range(2))
    assert [stream.tobytes() for stream in first] == [stream.tobytes() for stream in again]
    other = final_latents(plan_of(checkpoint, SMALL, 4))
    assert error(other[0], first[0]) > 0.1


def test_other_scales_seeds_prompts_steps_and_fps_compile_nothing(
    checkpoint: Checkpoint, compilations: list[str]
) -> None:
    final_latents(plan_of(checkpoint, SMALL, 3))
    jax.jit(lambda x: x + 1)(1)
    assert compilations  # a new program is noticed
    compilations.clear()
    other = Case(SMALL.size._replace(fps=24.5), 5, (2.5, 0.5, 4.0, 0.1), (3.0, 2.0, 1.5, 0.9), (0, 2))
    final_latents(plan_of(checkpoint, other, 11, prompt="Rain on a tin roof, at night", negative_prompt="dull"))
    assert not compilations


def test_doubles_in_the_environment_change_nothing(checkpoint: Checkpoint) -> None:
    """As JAX_ENABLE_X64 sets it: steps begin from the same float32 noise, as a run that was kept goes on from."""
    plan, kept = plan_of(checkpoint, SMALL, 3), list[RunState]()
    make_latents(plan, Components(plan), on_progress=kept.append)
    begun = next(state for state in kept if state.current)
    start, same = replace(begun, current=None), list[RunState]()

    def stop(state: RunState) -> None:
        same.append(replace(state, current=Streams(*map(np.array, state.current))))
        raise InterruptedError

    jax.config.update("jax_enable_x64", True)
    try:
        with pytest.raises(InterruptedError):
            make_latents(plan, Components(plan), start, stop)
    finally:
        jax.config.update("jax_enable_x64", False)
    plain = noise(3, plan.latent_shapes)
    for got, wanted in zip(same[0].current, to_tokens(plain), strict=True):
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("sharding", ["single", "ironwood"])
def test_a_batch_equals_its_videos_generated_alone(checkpoint: Checkpoint, sharding: str) -> None:
    batch = final_latents(plan_of(checkpoint, SMALL, 5, num_videos=3, sharding=sharding))
    for video in range(3):
        alone = final_latents(plan_of(checkpoint, SMALL, 5 + video))
        for together, single in zip(batch, alone, strict=True):
            assert error(together[video : video + 1], single) <= 1e-5


def test_several_seeds_equal_their_videos_generated_alone(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """To the byte, two batches of three; each network is loaded once."""
    report = Order()
    plan = plan_of(checkpoint, SMALL, [5, 9], num_videos=3, output=str(tmp_path / "clip.mp4"))
    assert plan.batches == ((5, 6, 7), (9, 10, 11))
    made = [path.name for path, _ in write(plan, open_components(plan), report)]
    assert made == [f"clip-s{seed}.mp4" for seed in (5, 6, 7, 9, 10, 11)]
    assert report.names.count("load transformer") == report.names.count("load text encoder") == 1
    together = final_latents(plan)
    for batch, seed in enumerate((5, 9)):
        alone = final_latents(plan_of(checkpoint, SMALL, seed, num_videos=3))
        for many, three in zip(together, alone, strict=True):
            np.testing.assert_array_equal(many[3 * batch : 3 * batch + 3], three)


@pytest.mark.parametrize(
    "option",
    [
        {"scan_layers": False},
        {"compile_text_encoder": False},
        {"sharding": {"profile": "single", "use_batched_text_encoder": False}},
        {"sharding": "ironwood"},
        {"sharding": {"profile": "trillium", "mesh": {"passes": 1, "heads": 1, "embed": 2}}, "scan_layers": False},
    ],
    ids=str,
)
def test_memory_and_compilation_options_do_not_change_the_clip(
    checkpoint: Checkpoint, option: dict[str, object]
) -> None:
    """Eight devices under every profile, layers unrolled, text one by one: within float32 rounding of the plain run."""
    wanted = final_latents(plan_of(checkpoint, SMALL, 3))
    for got, plain in zip(final_latents(plan_of(checkpoint, SMALL, 3, **option)), wanted, strict=True):
        assert error(got, plain) <= 2e-5


def test_a_run_in_float16_is_near_one_in_float32(checkpoint: Checkpoint) -> None:
    """Text encoder and denoiser; a rounding in float16 is 5e-4."""
    wanted = final_latents(plan_of(checkpoint, SMALL, 3))
    half = final_latents(plan_of(checkpoint, SMALL, 3, dtype="float16", text_encoder_dtype="float16"))
    for got, exact in zip(half, wanted, strict=True):
        assert 1e-6 < error(got, exact) <= 2e-2


def test_noise_depends_only_on_the_seed() -> None:
    shapes = Streams((1, 4, 2, 3, 3), (1, 2, 5, 4))
    first, again, other = noise(2**32 - 1, shapes), noise(2**32 - 1, shapes), noise(0, shapes)
    np.testing.assert_array_equal(first.video, again.video)
    assert error(np.asarray(other.audio), np.asarray(first.audio)) > 0.1
    assert error(np.asarray(first.video).ravel()[:40], np.asarray(first.audio).ravel()) > 0.1


def test_a_run_writes_its_files(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The mp4, its record, and latents that another run may start from."""
    output, saved = tmp_path / "clip.mp4", tmp_path / "clip.safetensors"
    plan = plan_of(checkpoint, SMALL, 3, output=str(output), save_latents=str(saved))
    assert list(write(plan, open_components(plan))) == [(output, [])]
    latents = load_file(saved)
    assert {name: array.shape for name, array in latents.items()} == {
        "video": (1, 8, 2, 2, 2),
        "audio": (1, 4, 9, 4),
    }
    np.testing.assert_array_equal(latents["video"], final_latents(plan)[0])
    record = output.with_suffix(".yaml")
    assert "jax: " + jax.__version__ in record.read_text()
    files = {"output": str(output), "save_latents": str(saved)}
    assert resolve(read_spec(files, config=record)).spec == plan.spec
    assert open_video(output).metadata == open_latents(saved).metadata
    said = open_latents(saved).metadata
    assert [said[key] for key in ("num_frames", "height", "width", "fps")] == ["9", "64", "64", "24.0"]
    assert (said["model_version"], said["stage"]) == ("ltx2", "final")
    assert record.read_text() == said["record"]
    assert all(len(line) < 200 for line in record.read_text().splitlines())  # a person reads it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip.mp4", "clip.safetensors", "clip.yaml"]


class Order(Report):
    """What a run did, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def activity(self, name: str) -> Iterator[None]:
        self.names.append(name)
        yield

    @contextmanager
    def steps(self, total: int, later: float = 0, clips: int = 0, name: str = "") -> Iterator[Advance]:
        self.names.append(f"{total} steps")
        yield lambda steps: None


def test_each_clip_is_written_at_once_where_the_decoders_fit(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the denoiser, to a byte; and a run gone on with elsewhere writes what is not written."""
    monkeypatch.chdir(tmp_path)
    plan = plan_of(checkpoint, SMALL, 3, output="clip.mp4", save_latents="clip.safetensors")
    plan = resolve(replace(plan.spec, seed=(3, 4, 5)))
    monkeypatch.setattr("ltx2_cli.plan.decoding.device_memory", lambda devices: DeviceMemory(1e12, 1e12, 1e12))
    order, made, kept = Order(), [], list[RunState]()
    for path, _ in write(plan, open_components(plan), memory := LiveBytes(order), on_progress=kept.append):
        made.append(path.name)
        assert Path(f"clip-{path.stem[-2:]}.safetensors").exists()
        assert len(list(tmp_path.glob("*.mp4"))) == len(made)
    assert made == ["clip-s3.mp4", "clip-s4.mp4", "clip-s5.mp4"]
    assert [name for name in order.names if name in ("3 steps", "load vae", "decode", "write")] == (
        ["3 steps", "load vae", *["decode", "write", "3 steps"] * 2, "decode", "write"]
    )
    check_live_bytes(plan, memory.samples, {DENOISER, *kept_networks(plan)}, paused=True)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix != ".safetensors"}
    tensors = {path: load_file(path)["video"].tobytes() for path in tmp_path.glob("*.safetensors")}
    monkeypatch.setattr("ltx2_cli.plan.decoding.device_memory", lambda devices: DeviceMemory(0, 0, 0))
    for start, names in ((START, made), (next(each for each in kept if each.written == 1), made[1:])):
        for path in [*map(Path, names), *(Path(name).with_suffix(".yaml") for name in names)]:
            path.unlink()
        memory = LiveBytes(order := Order())
        assert [path.name for path, _ in write(plan, open_components(plan), memory, start=start)] == names
        check_live_bytes(plan, memory.samples)
        assert order.names.count("decode") == len(names)
        assert len([name for name in order.names if name.endswith(" steps")]) == 1
        assert files == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name in files}
        assert tensors == {path: load_file(path)["video"].tobytes() for path in tensors}


def test_a_batch_is_recorded_video_by_video(checkpoint: Checkpoint, tmp_path: Path) -> None:
    plan = plan_of(checkpoint, SMALL, 3, num_videos=2, output=str(tmp_path / "clip.mp4"))
    paths = [path for path, _ in write(plan, open_components(plan))]
    assert [path.name for path in paths] == ["clip-s3.mp4", "clip-s4.mp4"]
    alone = read_spec(config=paths[1].with_suffix(".yaml"))
    assert (alone.seed, alone.num_videos) == ((4,), 1)
    assert alone == replace(plan.spec, seed=(4,), num_videos=1, output=None)


def test_an_unset_seed_is_drawn(checkpoint: Checkpoint) -> None:
    seeds = {plan_of(checkpoint, SMALL, None).spec.seeds[0] for _ in range(3)}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_networks_stay_loaded_only_on_request(checkpoint: Checkpoint) -> None:
    for keep in (True, False):
        plan = plan_of(checkpoint, SMALL, 3, keep_resident=keep)
        components = Components(plan)
        final_latents(plan, components)
        assert ("transformer" in components.resident) is keep


def test_a_phase_leaves_nothing_on_the_devices(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """But the text; and when a device decodes it has what the plan says of the decoders."""
    plan = plan_of(checkpoint, SMALL, 3, output=str(tmp_path / "clip.mp4"))
    report = LiveBytes(Report())
    list(write(plan, open_components(plan), report))
    check_live_bytes(plan, report.samples)
    (decoding,) = (size for line, size in report.samples if line == "decode")
    assert decoding == pytest.approx(phase_memory(plan, ["decode"])["decode"].weights, rel=0.05)


def test_noise_of_wrong_shape_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "noise.safetensors"
    save_file({"video": np.zeros((1, 8, 2, 2, 3), np.float32)}, path)
    with pytest.raises(
        UsageError, match=r"`video` is float32 \(1, 8, 2, 2, 3\), not float32 \(1, 8, 2, 2, 2\); there is no `audio`"
    ):
        final_latents(resolve(replace(plan_of(checkpoint, SMALL, 3).spec, initial_noise=str(path))))
