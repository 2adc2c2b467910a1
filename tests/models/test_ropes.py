"""Rotary tables, which the devices make of tables by axis: to the bit what their definition gives token by token."""

from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest

from ltx2_cli.diffusion.geometry import Geometry, ReferenceGrid, ReferenceScale, VAECompression, clip_geometry
from ltx2_cli.models.arch import TransformerArch
from ltx2_cli.models.config import read_arch
from ltx2_cli.models.transformer_inputs import rope_tables
from ltx2_cli.nn.attention import TokenAxis, prepare_rope
from ltx2_cli.nn.rope import RopeGrids, over_tokens
from ltx2_cli.parallel.constrain import activate
from ltx2_cli.parallel.mesh import lay_out
from ltx2_cli.request.profiles import read_sharding
from ltx2_cli.request.spec import AttentionBackend
from model_versions import LTX2, LTX2_3

VIDEO, AUDIO = TokenAxis("tokens"), TokenAxis("audio_tokens")
Tables = tuple[np.ndarray, np.ndarray]


def definition(fractions: np.ndarray, width: int, heads: int, theta: float) -> Tables:
    """Cosines and sines [tokens, heads, head_dim / 2] of positions [tokens, axes]: angles are float32, their functions
    are taken in float64."""
    tokens, axes = fractions.shape
    count = width // (2 * axes)
    grid = theta ** np.linspace(0.0, 1.0, count, dtype=np.float64) * (np.pi / 2)
    angles = ((fractions * 2 - 1)[:, None, :] * grid.astype(np.float32)[None, :, None]).reshape(tokens, count * axes)
    exact = np.pad(angles, ((0, 0), (width // 2 - count * axes, 0))).astype(np.float64).reshape(tokens, heads, -1)
    return np.cos(exact).astype(np.float32), np.sin(exact).astype(np.float32)


def positions(geometry: Geometry) -> np.ndarray:
    """Of the video tokens: pictures at other times and references lie behind the grid."""
    cells = (np.meshgrid(*axes, indexing="ij") for axes in geometry.video_axes())
    return np.concatenate([np.stack(grid, axis=-1).reshape(-1, 3) for grid in cells])


def cases(arch: TransformerArch, geometry: Geometry) -> Iterator[tuple[RopeGrids, Tables, TokenAxis, TokenAxis]]:
    """The tables of both streams by axis and by token, and the tokens and those that they attend with."""
    streams, seconds = arch.streams, np.float32(max(stream.max_positions[0] for stream in arch.streams))
    where = positions(geometry), geometry.audio_axes()[0][0][:, None]
    of_streams = zip(streams, rope_tables(geometry, arch), where, (VIDEO, AUDIO), (AUDIO, VIDEO), strict=True)
    for stream, (own, cross), places, tokens, others in of_streams:
        rest = stream.heads, arch.rope_theta
        fractions = places / np.asarray(stream.max_positions, np.float32)
        yield own, definition(fractions, stream.width, *rest), tokens, tokens
        yield cross, definition(places[:, :1] / seconds, streams.audio.width, *rest), tokens, others


PUBLISHED = read_arch(TransformerArch, {"rope_type": "split"}, "config.json")  # of both generations, in this


def test_what_travels_is_small() -> None:
    """24,576 tokens: their tables would be 606 MB."""
    geometry = clip_geometry(121, 1024, 1536, 24.0, VAECompression(8, 32, 25.0), PUBLISHED.scales)
    assert sum(table.nbytes for table in jax.tree.leaves(rope_tables(geometry, PUBLISHED))) < 5e6


@pytest.mark.parametrize("arch", [PUBLISHED, LTX2.transformer, LTX2_3.transformer], ids=["published", "ltx2", "ltx2.3"])
def test_tables_of_tokens_equal_their_definition_to_the_bit(arch: TransformerArch) -> None:
    """Compiled, whole and in the parts of eight devices, packed or not."""
    references = (ReferenceGrid(2, ReferenceScale(2, 3)), ReferenceGrid(1, ReferenceScale(1, 1)))
    compression, keyframes = VAECompression(8, 32, 25.0), ((4.0, 5.0), (-8.0, 1.0))
    geometry = clip_geometry(25, 64, 128, 23.976, compression, arch.scales, keyframes, references)
    spec = replace(read_sharding("ironwood"), attention=AttentionBackend.xla)
    plan = lay_out(spec, jax.devices(), (), 4)
    for grids, wanted, tokens, others in cases(arch, geometry):
        np.testing.assert_array_equal(jax.jit(over_tokens)(grids), wanted)
        for attention in (AttentionBackend.xla, AttentionBackend.fused):
            with activate(replace(plan, attention=attention)):
                table = jax.jit(lambda grids, tokens=tokens, others=others: prepare_rope(grids, tokens, others))(grids)
            packed = np.concatenate(wanted, axis=-1).reshape(len(wanted[0]), -1)
            for got, exact in zip(*((table, wanted) if isinstance(table, tuple) else ([table], [packed])), strict=True):
                np.testing.assert_array_equal(got[: len(exact)], exact)
                assert got.addressable_shards[0].data.size * (2 if tokens is VIDEO else 1) == got.size
