"""The denoiser against diffusers, perturbed and not, scanned and unrolled, in several shapes of model."""

import re
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel

from ltx2_cli.diffusion.conditions import UNCONDITIONED, ConditionTokens, merge_conditions
from ltx2_cli.diffusion.geometry import Geometry, VAECompression, clip_geometry
from ltx2_cli.models.arch import TransformerArch
from ltx2_cli.models.config import read_arch
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.transformer_inputs import DenoiserInputs, PassMasks, rope_tables
from ltx2_cli.nn.rope import over_tokens
from ltx2_cli.request.spec import Streams
from ltx2_cli.weights.declare import Scope, declared
from parity import adopt, published, randomise, relative_error

TINY = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "cross_attention_dim": 24,
    "audio_in_channels": 6,
    "audio_out_channels": 6,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 16,
    "num_layers": 2,
    "caption_channels": 20,
    "rope_type": "split",
    "perturbed_attn": True,
}
CONFIGS = {
    "ltx2": TINY,
    "other sizes": TINY
    | {
        "out_channels": 10,
        "num_attention_heads": 4,
        "attention_head_dim": 20,
        "cross_attention_dim": 80,
        "audio_num_attention_heads": 4,
        "audio_attention_head_dim": 4,
        "num_layers": 3,
        "caption_channels": 12,
        "rope_theta": 500.0,
        "pos_embed_max_pos": 7,
        "audio_pos_embed_max_pos": 9,
        "base_height": 300,
        "base_width": 500,
        "vae_scale_factors": [4, 16, 8],
        "audio_scale_factor": 2,
        "audio_hop_length": 256,
        "audio_sampling_rate": 22050,
        "causal_offset": 2,
        "timestep_scale_multiplier": 900,
        "cross_attn_timestep_scale_multiplier": 700,
        "norm_eps": 1e-3,
    },
    "gates and modulated text": TINY
    | {
        "gated_attn": True,
        "audio_gated_attn": True,
        "cross_attn_mod": True,
        "audio_cross_attn_mod": True,
        "use_prompt_embeddings": False,
        "ff_bias": False,
        "use_keyframes_abs_pos_embedding": True,
    },
}
SIGMA = 0.73
HEIGHT, WIDTH = 2, 3  # of latents
TOLERANCE = 5e-6  # float32 rounding makes 2e-7 to 3e-6 of it; 1e-5 once hid an epsilon
PERTURBED_LAYER = 1


class Case(NamedTuple):
    """One reference model with our twin of it, one set of inputs, and what the reference makes of them."""

    arch: TransformerArch
    model: Transformer
    geometry: Geometry
    latents: Streams
    text: Streams
    reference: LTX2VideoTransformer3DModel

    def marked(self) -> torch.Tensor:
        """The tokens of the first latent frame."""
        return torch.from_numpy(self.geometry.single_frames)[None, :, None].float()

    def wanted(self, perturbed: bool, isolated: bool, **others: object) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.latents.video.shape[0]
        timestep = torch.full((rows,), SIGMA * 1000)
        with torch.no_grad():
            return self.reference(
                hidden_states=torch.tensor(self.latents.video),
                audio_hidden_states=torch.tensor(self.latents.audio),
                encoder_hidden_states=torch.tensor(self.text.video),
                audio_encoder_hidden_states=torch.tensor(self.text.audio),
                timestep=timestep,
                sigma=timestep,
                num_frames=self.geometry.frames,
                height=self.geometry.height,
                width=self.geometry.width,
                fps=self.geometry.fps,
                audio_num_frames=self.geometry.audio_frames,
                isolate_modalities=isolated,
                spatio_temporal_guidance_blocks=[PERTURBED_LAYER] if perturbed else None,
                video_keyframes_mask=self.marked(),
                **{"use_cross_timestep": True, **others},
                return_dict=False,
            )


@pytest.fixture(scope="module", params=CONFIGS)
def case(request: pytest.FixtureRequest) -> Case:
    config = CONFIGS[request.param]
    arch = read_arch(TransformerArch, config, "config.json")
    geometry = Geometry(frames=3, height=HEIGHT, width=WIDTH, audio_frames=11, fps=12.5, scales=arch.scales)
    reference = randomise(LTX2VideoTransformer3DModel(**config), seed=1)
    model = adopt(Transformer(Scope(jnp.float32), arch), reference.state_dict())
    random = np.random.default_rng(2)
    draw = partial(random.standard_normal, dtype=np.float32)
    latents = Streams(
        draw((2, geometry.video_tokens, arch.in_channels)), draw((2, geometry.audio_frames, arch.audio_in_channels))
    )
    widths = (
        [arch.caption_channels] * 2
        if arch.use_prompt_embeddings
        else [arch.cross_attention_dim, arch.audio_cross_attention_dim]
    )
    return Case(arch, model, geometry, latents, Streams(*(draw((2, 7, width)) for width in widths)), reference)


def velocities(*given: object, scan_layers: bool = True, conditions: Streams = UNCONDITIONED) -> Streams:
    """Of one program for shapes that are equal: to jax, a call that leaves a default out is another."""
    return _velocities(*given, scan_layers, conditions)


@partial(jax.jit, static_argnames="scan_layers")
def _velocities(
    model: Transformer,
    latents: Streams,
    sigma: float,
    text: Streams,
    ropes: Streams,
    switches: PassMasks,
    scan_layers: bool,
    conditions: Streams,
) -> Streams:
    model.scan_layers = scan_layers
    context = model.text_context(text)
    rows, tokens, _ = latents.video.shape
    first_frame = np.arange(tokens) < HEIGHT * WIDTH
    inputs = DenoiserInputs(context, jnp.arange(rows), ropes, switches, conditions, keyframes=first_frame)
    return model(latents, sigma, inputs)


def switches(case: Case, perturbed: list[bool], isolated: list[bool]) -> PassMasks:
    attending = np.ones((case.arch.num_layers, len(perturbed)), bool)
    attending[PERTURBED_LAYER] = np.logical_not(perturbed)
    return PassMasks(jnp.asarray(attending), jnp.logical_not(jnp.asarray(isolated)))


@pytest.mark.parametrize(
    ("perturbed", "isolated", "scan_layers"),
    [(False, False, True), (True, False, True), (False, True, True), (True, True, False)],
)
def test_velocities_equal_the_reference(case: Case, perturbed: bool, isolated: bool, scan_layers: bool) -> None:
    ropes = rope_tables(case.geometry, case.arch)
    masks = switches(case, [perturbed] * 2, [isolated] * 2)
    got = velocities(case.model, case.latents, SIGMA, case.text, ropes, masks, scan_layers=scan_layers)
    for ours, theirs in zip(got, case.wanted(perturbed, isolated), strict=True):
        assert relative_error(ours, theirs) <= TOLERANCE


def test_rows_are_perturbed_and_isolated_separately(case: Case) -> None:
    """A mixed batch equals the uniform ones row by row."""
    ropes = rope_tables(case.geometry, case.arch)
    run = partial(velocities, case.model, case.latents, SIGMA, case.text, ropes)
    mixed = run(switches(case, [True, False], [False, True]))
    for stream in (0, 1):
        perturbed = case.wanted(True, False)[stream]
        isolated = case.wanted(False, True)[stream]
        assert relative_error(mixed[stream][0], perturbed[0]) <= TOLERANCE
        assert relative_error(mixed[stream][1], isolated[1]) <= TOLERANCE


@pytest.mark.parametrize("case", ["gates and modulated text"], indirect=True)
@pytest.mark.parametrize(("tokens", "strength"), [(11, 1.0), (4, 0.4)])
def test_a_given_sound_is_read_as_in_the_reference(case: Case, tokens: int, strength: float) -> None:
    """Whole and clean: text and picture read no noise of it. A part of it: its tokens have a level of their own."""
    sound = ConditionTokens(case.latents.audio[0, :tokens], strength, 3 if tokens == 4 else 0)
    shapes = Streams(*(stream.shape[1:] for stream in case.latents))
    conditions = merge_conditions(Streams((), [sound]), shapes, "token", "always", Streams(False, tokens == 11))
    ropes, masks = rope_tables(case.geometry, case.arch), switches(case, [False] * 2, [False] * 2)
    got = velocities(case.model, case.latents, SIGMA, case.text, ropes, masks, conditions=conditions)
    levels = torch.full((2, 11), SIGMA * 1000)
    levels[:, sound.start : sound.start + tokens] *= 1 - strength
    level = 0.0 if tokens == 11 else SIGMA * 1000
    noise = {"audio_timestep": levels, "audio_sigma": torch.full((2,), level), "use_cross_timestep": True}
    for ours, theirs in zip(got, case.wanted(False, False, **noise), strict=True):
        assert relative_error(ours, theirs) <= TOLERANCE


@pytest.mark.parametrize(("case", "stream"), [("ltx2", 1), ("gates and modulated text", 0)], indirect=["case"])
def test_a_stream_alone_is_as_if_both_were_kept_apart(case: Case, stream: int) -> None:
    """It takes the weights of the stream, and no others; also where a pass branches off."""
    running = Streams(stream == 0, stream == 1)
    alone = Transformer(Scope(jnp.float32), case.arch, running=running)
    assert {name for name in declared(alone) if "audio" in name or "v2a" in name} == (
        {name for name in declared(alone) if "a2v_gate" not in name} if stream else set()
    )
    name = Streams._fields[stream]
    for part, whole in ((alone, case.model), (alone.blocks, case.model.blocks)):
        setattr(part, name, getattr(whole, name))
    tokens = [x if run else x[:, :0] for x, run in zip(case.latents, running, strict=True)]
    geometry = replace(case.geometry, **({"frames": 0} if stream else {"audio_frames": 0}))
    ropes, masks = rope_tables(geometry, case.arch), switches(case, [False] * 2, [False] * 2)
    got = velocities(alone, Streams(*tokens), SIGMA, case.text, ropes, masks)
    assert relative_error(got[stream], case.wanted(False, True)[stream]) <= TOLERANCE
    assert got[1 - stream].size == 0


@pytest.mark.parametrize("case", ["ltx2", "gates and modulated text"], indirect=True)
def test_bfloat16_is_finite_and_within_its_rounding(case: Case) -> None:
    half = jax.tree.map(lambda array: array.astype(jnp.bfloat16), (case.model, case.latents, case.text))
    model, latents, text = half
    got = velocities(
        model, latents, SIGMA, text, rope_tables(case.geometry, case.arch), switches(case, [False] * 2, [False] * 2)
    )
    for ours, theirs in zip(got, case.wanted(False, False), strict=True):
        assert ours.dtype == jnp.bfloat16
        assert relative_error(ours, theirs) <= 3e-2  # bfloat16 rounds at 4e-3; layers add up


LTX2_3 = {
    "gated_attn": True,
    "audio_gated_attn": True,
    "cross_attn_mod": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
}


LTX2_5 = LTX2_3 | {"ff_bias": False, "use_keyframes_abs_pos_embedding": True}


@pytest.mark.parametrize(("model", "config"), [("ltx2", {}), ("ltx2.3", LTX2_3)])
def test_names_and_shapes_equal_the_published_ones(model: str, config: dict[str, bool]) -> None:
    arch = read_arch(TransformerArch, {"rope_type": "split", **config}, "config.json")
    assert declared(Transformer(Scope(jnp.bfloat16), arch)) == published(f"{model}/transformer.tsv")


def test_the_newest_differs_from_the_one_before_as_the_published_ones_do() -> None:
    arch = read_arch(TransformerArch, {"rope_type": "split", **LTX2_5}, "config.json")
    biases = re.compile(r"transformer_blocks\.\d+\.ff\.net\.(0\.proj|2)\.bias")
    kept = {name: shape for name, shape in published("ltx2.3/transformer.tsv").items() if not biases.fullmatch(name)}
    found = declared(Transformer(Scope(jnp.bfloat16), arch))
    assert found == kept | {"keyframes_abs_pos_embedding": (1, 4096)}
    assert (len(found), arch.model_version) == (4091, "ltx2.5")


@pytest.mark.parametrize("config", [{}, LTX2_3], ids=["ltx2", "ltx2.3"])
def test_the_real_size_is_traced_abstractly(config: dict[str, bool]) -> None:
    """512 x 768 x 121 with all four passes: shapes and dtypes alone, no memory."""
    arch = read_arch(TransformerArch, {"rope_type": "split", **config}, "config.json")
    geometry = clip_geometry(121, 512, 768, 24.0, VAECompression(8, 32, 25.0), arch.scales)
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    latents = Streams(shape((4, geometry.video_tokens, 128)), shape((4, geometry.audio_frames, 128)))
    widths = (3840, 3840) if arch.use_prompt_embeddings else (4096, 2048)
    text = Streams(*(shape((2, 1024, width)) for width in widths))
    sides = PassMasks(np.ones((48, 4), bool), np.ones(4, bool))

    def forward(model: Transformer, latents: Streams, text: Streams) -> Streams:
        contexts = jnp.asarray([0, 1, 0, 0])
        ropes = rope_tables(geometry, arch)
        return model(latents, jnp.float32(1), DenoiserInputs(model.text_context(text), contexts, ropes, sides))

    got = jax.eval_shape(forward, Transformer(Scope(jnp.bfloat16), arch), latents, text)
    assert [(stream.shape, stream.dtype) for stream in got] == [
        ((4, 6144, 128), jnp.bfloat16),
        ((4, 126, 128), jnp.bfloat16),
    ]


def test_the_rope_table_of_real_size() -> None:
    """6,144 tokens of 4,096 channels: two identity angles in front, then an angle of every axis per frequency."""
    arch = read_arch(TransformerArch, {"rope_type": "split"}, "config.json")
    config = {"num_layers": 1, "rope_type": "split"}
    with torch.device("meta"):
        reference = LTX2VideoTransformer3DModel(**config)
    geometry = clip_geometry(121, 512, 768, 24.0, VAECompression(8, 32, 25.0), arch.scales)
    assert (geometry.video_tokens, geometry.audio_frames) == (6144, 126)
    coordinates = reference.rope.prepare_video_coords(1, 16, 16, 24, torch.device("cpu"), fps=24.0)
    cosines, sines = reference.rope(coordinates, device="cpu")
    tables = rope_tables(geometry, arch)
    ours, sound = over_tokens(tables.video.own), over_tokens(tables.audio.cross)
    assert relative_error(ours.cos, cosines[0].swapaxes(0, 1)) <= 1e-6
    assert relative_error(ours.sin, sines[0].swapaxes(0, 1)) <= 1e-6
    seconds = reference.audio_rope.prepare_audio_coords(1, 126, torch.device("cpu"))
    cosines, _ = reference.cross_attn_audio_rope(seconds, device="cpu")
    assert relative_error(sound.cos, cosines[0].swapaxes(0, 1)) <= 1e-6
