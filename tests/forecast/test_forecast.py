"""A forecast's sums: phases, what stays resident, work, the least time of a step and of a clip; and what would fit."""

from dataclasses import replace

import jax
import pytest

from ltx2_cli.core.programs import Program
from ltx2_cli.core.report import Silent
from ltx2_cli.forecast import chips
from ltx2_cli.forecast.chips import Chip
from ltx2_cli.forecast.compiled import Compiled, Memory, Refused
from ltx2_cli.forecast.configs import foresee
from ltx2_cli.forecast.forecast import DECODE, PHASES, Forecast, forecast
from ltx2_cli.forecast.hlo import Collective
from ltx2_cli.forecast.record import record
from ltx2_cli.forecast.remedies import check_fit, remedies
from ltx2_cli.plan import Plan
from ltx2_cli.profiles import read_spec
from ltx2_cli.spec import FitError

# A device that does, reads and sends a billion a second.
SLOW = Chip("slow", ("cpu",), hbm_bytes=40e9, flops=1e9, hbm_bandwidth=1e9, wire_bandwidth=1e9)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the CPU counts as."""
    monkeypatch.setattr(chips, "CHIPS", (SLOW,))


@pytest.fixture(scope="module")
def one() -> Plan:
    """LTX-2 on one device."""
    return foresee(read_spec(prompt="rain", model="ltx2", sharding="single"), jax.devices())


def compiled(peak: int, weights: int, network: str = "transformer", name: str = "forward") -> Compiled:
    return Compiled(name, network, 1.0, Memory(weights, peak - weights, peak), weights, (), "HloModule")


@pytest.fixture(scope="module")
def two() -> Plan:
    """LTX-2.3 in two stages on one device, the second's LoRA held as factors."""
    spec = read_spec({"prompt": "rain", "model": "ltx2.3", "recipe": "two_stage", "refinement.hold": "low_rank"})
    return foresee(spec, jax.devices()[:1])


def test_every_network_has_its_phase(one: Plan, two: Plan) -> None:
    for plan in (one, two):
        phases = Forecast(plan).phases
        assert {name for names in phases.values() for name in names} == plan.networks.present().keys()
    assert phases.keys() == PHASES.keys()


def test_a_second_stage_holds_what_it_changes_beside_the_first(two: Plan) -> None:
    """The published LoRA has 3,802,497,024 factors, two bytes each; a copy is the 1,660 matrices again."""
    held = Forecast(two).weight_bytes
    assert held["refiner"] == 2 * 3_802_497_024
    found = Forecast(two).phase_bytes
    assert found["refine"] == held["transformer"] + held["refiner"]
    assert found["upsample"] == held["transformer"] + held["upsampler"] + held["statistics"]
    assert held["upsampler"] == 2 * 497_867_904
    copied = replace(two, networks=two.networks._replace(refiner=two.networks.transformer))
    copy = Forecast(copied).weight_bytes["refiner"]
    assert 0.99 * held["transformer"] < copy < held["transformer"]
    assert record(Forecast(copied))["hold"] == "copy"
    assert Forecast(copied).read_bytes("refine") == held["transformer"]


def test_each_stage_has_its_own_figures(two: Plan, slow: None) -> None:
    """A quarter of the tokens, four passes, thirty steps; then all of them, one pass, three steps."""
    made = (compiled(700, 500), replace(compiled(900, 400, "refiner", "forward 2"), stage=1))
    found = Forecast(two, made)
    said = record(found)
    first, second = said["stages"]
    assert [(each["width"], each["height"], each["num_frames"]) for each in said["stages"]] == [
        (384, 256, 121),
        (768, 512, 121),
    ]
    assert [each["tokens"]["video"] for each in said["stages"]] == [1536, 6144]
    assert [(len(each["passes"]), each["steps"]) for each in said["stages"]] == [(4, 30), (1, 3)]
    assert [each["memory"]["peak_bytes"] for each in said["stages"]] == [700, 900]
    figures = ("memory", "flops", "wire_bytes", "collectives", "compile_seconds", "seconds_per_step", "tokens")
    assert {key: said[key] for key in figures} == {key: first[key] for key in figures}
    assert (found.beside_bytes("denoise"), found.beside_bytes("refine")) == (200, 500)
    clip = said["phase_seconds"]
    assert clip["denoise"] == pytest.approx(30 * first["seconds_per_step"])
    assert clip["refine"] == pytest.approx(3 * second["seconds_per_step"])
    assert said["seconds_per_clip"] == pytest.approx(sum(clip.values()))


def test_upsampling_is_its_convolutions(two: Plan, slow: None) -> None:
    """27 cells of 128 to 1024 channels, eight of 1024 to 1024, nine of 1024 to 4096, each frame of 8 x 12 latents; then
    eight of 1024 and one to 128, of 16 x 24."""
    inner, outer, cells = 27 * 1024**2, 27 * 1024 * 128, 9 * 1024 * 4096
    flops = 2 * 1536 * (outer + 8 * inner + cells) + 2 * 6144 * (8 * inner + outer)
    assert Forecast(two).rooflines["upsample"].compute == pytest.approx(flops / 1e9)


def test_each_phase_holds_its_own_networks(one: Plan) -> None:
    """In bfloat16, two bytes a parameter: 18,876,174,592 of the denoiser, 11,766,034,176 of the text encoder."""
    alone = Forecast(one)
    assert alone.weight_bytes["transformer"] == alone.phase_bytes["denoise"] == 2 * 18_876_174_592
    assert alone.phase_bytes["encode"] == 2 * 11_766_034_176
    decoders = ("vae", "audio_vae", "vocoder")
    assert alone.present_bytes["decode"] == sum(alone.weight_bytes[name] for name in decoders)


def test_decoding_that_is_not_compiled_takes_what_the_plan_estimates(one: Plan) -> None:
    """Compiled, it takes what the compiler says; the sound alone says nothing of the picture."""
    held, estimate = Forecast(one).present_bytes["decode"], one.decoding.bytes
    sound, picture = compiled(estimate // 2, 0, "vocoder", "sound"), compiled(3 * estimate, 0, "vae", "frames")
    assert Forecast(one).phase_bytes["decode"] == Forecast(one, (sound,)).phase_bytes["decode"] == held + estimate
    assert Forecast(one, (sound, picture)).phase_bytes["decode"] == held + 3 * estimate
    assert [Forecast(one, made).is_estimated(DECODE) for made in ((sound,), (picture,))] == [True, False]


def test_what_stays_resident_is_there_in_every_phase(one: Plan) -> None:
    kept = replace(one, spec=replace(one.spec, keep_resident=True))
    everything = sum(Forecast(one).weight_bytes.values())
    assert set(Forecast(kept).present_bytes.values()) == {everything}
    held = Forecast(one).weight_bytes["transformer"]
    working = Forecast(kept, (compiled(held + 500, held),)).phase_bytes
    assert (working["denoise"], working["encode"]) == (everything + 500, everything)


def test_what_a_program_needs_comes_on_top_of_all_networks_of_its_phase(one: Plan) -> None:
    """Also where it reads only some of their weights."""
    held = Forecast(one).weight_bytes
    made = (compiled(held["transformer"], held["transformer"] - 900), compiled(1500, 1000, "vae", "frames"))
    found = Forecast(one, made).phase_bytes
    assert found["denoise"] == held["transformer"] + 900
    assert found["decode"] == held["vae"] + held["audio_vae"] + held["vocoder"] + 500


def test_the_work_of_a_forward_is_spread_over_the_devices(one: Plan) -> None:
    """Four passes of 48 layers over 6,144 video tokens 4,096 wide. A token meets 14 matrices that are square (4 of
    self-attention, 2 towards text, 8 of the feed-forward), 4 that halve it (towards sound and back), each other token
    and 1,024 of text, twice. Sound is the rest, below a hundredth."""
    whole = Forecast(one)
    assert whole.devices == 1
    split = foresee(read_spec(prompt="rain", model="ltx2", sharding="gpu"), jax.devices())
    assert Forecast(split).flops == whole.flops
    assert record(Forecast(split))["flops"] == whole.flops / 8
    token = 2 * 14 * 4096**2 + 2 * 4 * 4096 * 2048 + 2 * 2 * (6144 + 1024) * 4096
    assert whole.flops == pytest.approx(4 * 48 * 6144 * token, rel=0.01)


def test_a_step_takes_as_long_as_its_longest_part(one: Plan, slow: None) -> None:
    sent = Collective("all-gather", (), 7_000_000_000, 8, ("heads",), (2, None), (None, None), "")
    step = Forecast(one, (replace(compiled(2, 1), collectives=(sent,)),)).rooflines["denoise"]
    assert step.wire == pytest.approx(14.0)
    assert step.memory == pytest.approx(2 * 18.876174592)
    assert step.compute == pytest.approx(Forecast(one).flops / 1e9)
    assert step.seconds == step.compute


def test_a_clip_takes_its_steps_and_the_rest_once(one: Plan, slow: None) -> None:
    found = Forecast(one)
    clip, line = found.clip_seconds, found.rooflines
    assert clip["denoise"] == pytest.approx(40 * line["denoise"].seconds)
    assert clip["decode"] == line["decode"].seconds
    matrices = 11_766_034_176 - 262208 * 3840  # without the embeddings; norms are below a thousandth
    assert clip["encode"] == pytest.approx(2 * 2048 * matrices / 1e9, rel=1e-3)
    said = record(found)
    assert said["seconds_per_clip"] == pytest.approx(sum(clip.values()))
    assert said["seconds_per_step"] == line["denoise"].seconds
    assert len(said["assumptions"]) > 3


def test_an_unknown_device_has_no_times_and_no_limit(one: Plan) -> None:
    said = record(Forecast(one))
    assert [said[key] for key in ("seconds_per_step", "seconds_per_clip", "hbm_bytes")] == [None] * 3
    assert said["fits"] is True
    assert said["memory"]["arguments_bytes"] == 2 * 18_876_174_592
    assert said["memory"]["peak_bytes"] is None


def test_what_fits_is_let_through(one: Plan, slow: None) -> None:
    check_fit(Forecast(one), jax.devices())


def test_too_little_memory_is_said_with_what_would_fit(one: Plan, slow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Forecast(one).weight_bytes["transformer"]
    with pytest.raises(FitError, match=r"to denoise takes 42\.8 GB of a device, a cpu has 40\.0 GB$") as error:
        check_fit(Forecast(one, (compiled(held + 5_000_000_000, held),)), jax.devices())
    # 16 latent frames need 5 GB beside the weights, and 40 - 37.75 GB are there for 7 of them: 6 · 8 + 1 frames
    assert "about --num-frames 49" in error.value.hint
    assert "more devices" in error.value.hint


def test_a_clip_that_cannot_be_decoded_is_made_shorter(one: Plan, slow: None) -> None:
    """What else is asked for is compiled all the same. Of 16 latent frames there is room for 16 · 38.7 / 60, which is
    10 of them: 9 · 8 + 1 frames."""
    long = replace(one, decoding=replace(one.decoding, bytes=60_000_000_000))
    made = forecast(long, [Program("forward", "transformer", lambda: jax.jit(lambda x: x + 1).lower(1.0))], Silent())
    assert made.forward is not None
    with pytest.raises(FitError, match=r"to decode takes 61\.3 GB of a device, a cpu has 40\.0 GB$") as error:
        check_fit(made, jax.devices())
    assert "about --num-frames 73" in error.value.hint


def test_a_refusal_by_the_compiler_does_not_fit(one: Plan, slow: None) -> None:
    refused = Refused("forward", "transformer", "RESOURCE_EXHAUSTED: too much", True, 45_000_000_000)
    assert Forecast(one, refused=(refused,)).phase_bytes["denoise"] == 45_000_000_000
    with pytest.raises(FitError, match=r"to denoise takes 45\.0 GB"):
        check_fit(Forecast(one, refused=(refused,)), jax.devices())
    silent = replace(refused, needed_bytes=0)
    with pytest.raises(FitError, match=r"to denoise takes more of a device than the 40\.0 GB that a cpu has"):
        check_fit(Forecast(one, refused=(silent,)), jax.devices())


def test_networks_that_need_not_stay_are_let_go(one: Plan, slow: None) -> None:
    kept = replace(one, spec=replace(one.spec, keep_resident=True))
    assert remedies(Forecast(kept), jax.devices())[0] == "a network at a time: --set keep_resident=false"


def test_another_mesh_holds_what_this_one_does_not(slow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "CHIPS", (replace(SLOW, hbm_bytes=20e9),))
    settings = [f"sharding.mesh.{axis}={size}" for axis, size in (("passes", 4), ("heads", 1), ("embed", 2))]
    devices = jax.devices()
    trillium = foresee(read_spec(prompt="rain", model="ltx2", sharding="trillium", dotlist=settings), devices)
    whole = Forecast(replace(trillium, sharding=replace(trillium.sharding, weights=())))  # as if nothing were split
    (mesh, *_) = (each for each in remedies(whole, devices) if each.startswith("another mesh"))
    sizes = mesh.removeprefix("another mesh: --set ").split(" --set ")
    other = foresee(read_spec(prompt="rain", model="ltx2", sharding="trillium", dotlist=sizes), devices)
    assert Forecast(other).fits
