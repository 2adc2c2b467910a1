"""Passes that share what they have in common: the velocities are those of passes that share nothing."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ltx2_cli.diffusion.denoise import Pass
from ltx2_cli.diffusion.geometry import Geometry
from ltx2_cli.models.arch import TransformerArch
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.transformer_inputs import DenoiserInputs, PassMasks, PassReuse, rope_tables
from ltx2_cli.parallel.constrain import activate
from ltx2_cli.parallel.mesh import ShardingPlan, lay_out
from ltx2_cli.request.profiles import read_sharding
from ltx2_cli.request.spec import AttentionBackend, Streams
from ltx2_cli.weights.declare import Scope, map_weights, weights
from model_versions import LTX2, LTX2_3
from tools.weights import random_weights

LAYERS, TEXT_TOKENS, SIGMA = 3, 7, 0.7
ARCHS = {"2.0": LTX2.transformer, "2.3": LTX2_3.transformer}
ALL, APART = tuple(Pass), (Pass.COND, Pass.UNCOND, Pass.ISOLATED)


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(np.subtract(got, wanted, dtype=np.float64)) / np.linalg.norm(wanted))


class Case:
    """A denoiser, latents of some videos, and what it reads for these passes of each."""

    def __init__(self, arch: TransformerArch, passes: tuple[Pass, ...], videos: int):
        arch = replace(arch, num_layers=LAYERS)
        geometry = Geometry(frames=3, height=2, width=3, audio_frames=11, fps=12.5, scales=arch.scales)
        draw = partial(np.random.default_rng(2).standard_normal, dtype=np.float32)
        self.model = random_weights(Transformer(Scope(jnp.float32), arch), seed=1, scale=0.2)
        sizes = (geometry.video_tokens, arch.in_channels), (geometry.audio_frames, arch.audio_in_channels)
        self.latents = Streams(*(draw((videos, *size)) for size in sizes))
        self.text = Streams(*(jnp.asarray(draw((2, TEXT_TOKENS, stream.context_width))) for stream in arch.streams))
        self.ropes, self.passes, self.videos = rope_tables(geometry, arch), passes, videos

    def inputs(self, text: object, blocks: tuple[int, ...], reuses: bool) -> DenoiserInputs:
        attending = np.ones((LAYERS, len(self.passes)), bool)
        branch = None
        if Pass.PERTURBED in self.passes:
            attending[list(blocks), self.passes.index(Pass.PERTURBED)] = False
            branch = np.asarray(min(blocks), np.int32)
        meeting = np.array([name is not Pass.ISOLATED for name in self.passes])
        masks = PassMasks(np.tile(attending, self.videos), np.tile(meeting, self.videos))
        contexts = np.tile([int(name is Pass.UNCOND) for name in self.passes], self.videos)
        reuse = PassReuse(self.passes, branch) if reuses else None
        return DenoiserInputs(text, contexts, self.ropes, masks, reuse=reuse)

    def compare(self, choices: list[tuple[int, ...]], plan: ShardingPlan) -> None:
        """The velocities with each of these choices of perturbed blocks, of two programs in all."""
        model = map_weights(lambda w: w.with_value(jax.device_put(w.get_value(), plan.weight(w.axes))), self.model)
        latents = jax.device_put(self.latents, plan.replicated)

        @jax.jit
        def run(model: Transformer, latents: Streams, inputs: DenoiserInputs) -> Streams:
            with activate(plan):
                return model(latents, jnp.float32(SIGMA), inputs)

        text, found = jax.jit(lambda model: model.text_context(self.text))(model), []
        for blocks in choices:
            alone, shared = (run(model, latents, self.inputs(text, blocks, reuses)) for reuses in (False, True))
            for wanted, got in zip(alone, shared, strict=True):
                assert got.shape == wanted.shape == (self.videos * len(self.passes), *wanted.shape[1:])
                assert error(got, wanted) <= 1e-6
            found.append(np.asarray(alone.video))
        assert run._cache_size() == 2
        assert all(error(other, before) > 1e-4 for before, other in pairwise(found))


def layout(model: Transformer, profile: str, **mesh: int) -> ShardingPlan:
    spec = read_sharding(profile)
    spec = replace(spec, mesh={**spec.mesh, **mesh}, attention=AttentionBackend.blockwise)
    return lay_out(spec, jax.devices(), weights(model), rows=2, heads={"video": 4})


@pytest.mark.parametrize(("version", "passes", "videos"), [("2.0", ALL, 1), ("2.3", ALL, 2), ("2.3", APART, 2)])
def test_any_perturbed_blocks_are_exact(version: str, passes: tuple[Pass, ...], videos: int) -> None:
    case = Case(ARCHS[version], passes, videos)
    choices = [(0,), (1,), (1, 2)] if Pass.PERTURBED in passes else [()]
    case.compare(choices, layout(case.model, "single"))


@pytest.mark.parametrize(("profile", "mesh"), [("ironwood", (2, 4, 1)), ("trillium", (1, 4, 2, 1))])
def test_eight_devices_are_exact(profile: str, mesh: tuple[int, ...]) -> None:
    """With two videos beside each other, and with the tokens over all devices."""
    case = Case(LTX2_3.transformer, ALL, 2)
    plan = layout(case.model, profile, passes=mesh[0])
    assert plan.mesh.devices.shape == mesh
    case.compare([(0,), (2,)], plan)
