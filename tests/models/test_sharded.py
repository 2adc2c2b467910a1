"""Networks over eight devices: the same on every mesh; and in each block of the denoiser just the collectives meant."""

from collections import Counter
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.layout import Format, Layout

from ltx2_cli.diffusion.geometry import Geometry
from ltx2_cli.estimate.collectives import collectives
from ltx2_cli.models.arch import TransformerArch
from ltx2_cli.models.config import read_arch
from ltx2_cli.models.connectors import TextConnectors
from ltx2_cli.models.gemma import Gemma, gemma_arch
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.models.transformer_inputs import DenoiserInputs, PassMasks, rope_tables
from ltx2_cli.nn.token_parts import part_sizes
from ltx2_cli.parallel.constrain import activate
from ltx2_cli.parallel.mesh import ShardingPlan, lay_out
from ltx2_cli.request.profiles import read_sharding
from ltx2_cli.request.spec import AttentionBackend, Streams
from ltx2_cli.weights.declare import Scope, Weight, is_weight, map_weights, weights
from ltx2_cli.weights.quantized_matrix import QuantizedMatrix, places, quantize
from ltx2_cli.weights.tensors import MatrixType
from model_versions import LTX2, LTX2_3, LTX2_5
from tools.train_demo.arch import TEXT_CONFIG
from tools.weights import random_weights

LAYERS = 3
EARLIER = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "cross_attention_dim": 64,
    "audio_in_channels": 6,
    "audio_out_channels": 6,
    "audio_num_attention_heads": 4,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 32,
    "num_layers": LAYERS,
    "caption_channels": 20,
    "rope_type": "split",
    "perturbed_attn": True,
}
GATED = {"gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True, "audio_cross_attn_mod": True}
MARKED = {"ff_bias": False, "use_keyframes_abs_pos_embedding": True}  # of LTX-2.5
LATER = EARLIER | GATED | {"use_prompt_embeddings": False} | MARKED
CONFIGS = {"2.0": EARLIER, "2.5": LATER}
ROWS = 2
INT8 = MatrixType(np.dtype(np.int8), rounds_input=True)
TEXT_KEYS = {("all-reduce", ("heads",)): 2}  # their mean squares, where the noise level modulates the text
# Of the video's self-attention: queries, keys, values, and what they gather; and the norm of the queries.
TRADES = {("all-to-all", ("tokens",)): 4, ("all-gather", ("tokens",)): 1}
GATES = {("all-to-all", ("tokens",)): 1}  # of its heads, where it has them
MERGES = {("all-reduce", ("tokens",)): 3}  # of the sound looking at the picture: largest score, sum, weighted sum
# Of pairs of devices, which compute each stream in two parts: sums after self-attention, text attention and
# feed-forward, those of what the sound sees, and what the picture hears, before its projection.
SWAPS = {("collective-permute", ("heads",)): 2 * (3 + 3 + 1 + 1)}
# The mean squares of queries and keys, but not of the text's keys: of self-attention, and of each part's.
SQUARES = {("all-reduce", ("heads",)): 2 * 2 + 2 * (2 + 1 + 2) + 1}


def velocities(
    config: dict[str, object], plan: ShardingPlan | None, scan: bool = True, matrices: MatrixType | None = None
) -> tuple[Streams[jax.Array], str]:
    """Of one forward over two rows, and the program's text; 2 x 3 x 3 tokens fill no four devices evenly."""
    arch = read_arch(TransformerArch, config, "config.json")
    geometry = Geometry(frames=3, height=2, width=3, audio_frames=11, fps=12.5, scales=arch.scales)
    model = random_weights(Transformer(Scope(jnp.float32), arch, scan), seed=1, scale=0.2)
    model = jax.tree.map(
        rounded, Transformer(Scope(jnp.float32, matrices=matrices), arch, scan), model, is_leaf=is_weight
    )
    draw = partial(np.random.default_rng(2).standard_normal, dtype=np.float32)
    latents = Streams(draw((ROWS, geometry.video_tokens, 8)), draw((ROWS, geometry.audio_frames, 6)))
    widths = [20, 20] if arch.use_prompt_embeddings else [64, 32]
    text = Streams(*(jnp.asarray(draw((2, 7, width))) for width in widths))
    attending = np.ones((LAYERS, ROWS), bool)
    attending[1, 1] = False
    switches, contexts = PassMasks(attending, np.ones(ROWS, bool)), np.arange(ROWS)

    def forward(model: Transformer, latents: Streams[jax.Array], context: object) -> Streams[jax.Array]:
        ropes, marked = rope_tables(geometry, arch), geometry.single_frames
        inputs = DenoiserInputs(context, contexts, ropes, switches, keyframes=marked)
        return model(latents, jnp.float32(0.7), inputs)

    if plan is None:
        return jax.jit(forward)(model, latents, jax.jit(lambda model: model.text_context(text))(model)), ""

    model, latents = placed(model, plan), jax.device_put(latents, plan.replicated)
    with activate(plan):
        context = jax.jit(lambda model: model.text_context(text))(model)
        program = jax.jit(forward).lower(model, latents, context).compile()
    return program(model, latents, context), program.as_text()


def rounded(declared: Weight, weight: Weight) -> Weight:
    """A weight in the type that is declared."""
    value, wide = declared.get_value(), weight.get_value()
    return declared.with_value(quantize(wide, value.type) if isinstance(value, QuantizedMatrix) else wide)


def placed(network: nnx.Module, plan: ShardingPlan) -> nnx.Module:
    def place(weight: Weight) -> jax.Array:
        value = weight.get_value()
        return weight.with_value(jax.device_put(value, places(value, plan.weight(weight.axes))))

    return map_weights(place, network)


def plan_for(network: nnx.Module, profile: str, mesh: dict[str, int], rows: int = ROWS) -> ShardingPlan:
    spec, heads = read_sharding(profile), {"video": 4, "audio": 4}
    spec = replace(spec, mesh={**spec.mesh, **mesh}, attention=AttentionBackend.blockwise)
    return lay_out(spec, jax.devices(), weights(network), rows, heads)


def plan_of(config: dict[str, object], profile: str, mesh: dict[str, int], rows: int = ROWS) -> ShardingPlan:
    denoiser = Transformer(Scope(jnp.float32), read_arch(TransformerArch, config, "config.json"))
    return plan_for(denoiser, profile, mesh, rows)


@cache
def on_eight_devices(
    model_version: str,
    profile: str,
    mesh: tuple[tuple[str, int], ...],
    scan: bool,
    matrices: MatrixType | None,
) -> tuple[Streams[jax.Array], str]:
    config = CONFIGS[model_version]
    return velocities(config, plan_of(config, profile, dict(mesh)), scan, matrices)


@cache
def on_one_device(model_version: str, matrices: MatrixType | None) -> Streams[jax.Array]:
    return velocities(CONFIGS[model_version], None, matrices=matrices)[0]


@pytest.mark.parametrize(
    ("model_version", "profile", "mesh", "scan"),
    [
        ("2.0", "ironwood", {}, True),
        ("2.0", "trillium", {}, True),
        ("2.5", "ironwood", {}, True),
        ("2.5", "ironwood", {}, False),
        ("2.5", "ironwood", {"passes": 1}, True),  # eight parts of four heads
        ("2.5", "trillium", {}, True),
        ("2.5", "trillium", {"passes": 1, "embed": 2}, True),
        ("2.5", "gpu", {"heads": 4, "passes": 1}, True),
    ],
    ids=str,
)
def test_every_mesh_gives_the_same_velocities(
    model_version: str, profile: str, mesh: dict[str, int], scan: bool
) -> None:
    wanted = on_one_device(model_version, None)
    got, _ = on_eight_devices(model_version, profile, tuple(mesh.items()), scan, None)
    for one, eight in zip(wanted, got, strict=True):
        assert one.shape == eight.shape
        assert np.linalg.norm(eight - one) <= 1e-5 * np.linalg.norm(one)


@pytest.mark.parametrize(("profile", "mesh"), [("single", {}), ("gpu", {"passes": 1, "heads": 4})], ids=str)
def test_parts_that_a_gpu_computes_in_turn_give_the_same_velocities(
    profile: str, mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU divides more tokens than the CPU has here; no devices are a pair."""
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100")
    monkeypatch.setattr("ltx2_cli.nn.token_parts.device", lambda: gpu)
    monkeypatch.setattr("ltx2_cli.nn.token_parts.SAVING_POSITIONS", 2)
    plan = plan_of(CONFIGS["2.5"], profile, mesh)
    with activate(plan):
        assert len(part_sizes(ROWS, 2 * 3 * 3, "tokens", eight_bits=False)) > 2
    got, _ = velocities(CONFIGS["2.5"], plan)
    for one, eight in zip(on_one_device("2.5", None), got, strict=True):
        assert np.linalg.norm(eight - one) <= 1e-5 * np.linalg.norm(one)


@pytest.mark.parametrize(("profile", "parts"), [("ironwood", 1), ("trillium", 2)])
def test_products_in_eight_bits_give_nearly_the_same_velocities_on_a_mesh(profile: str, parts: int) -> None:
    """Where devices hold parts of a token, each rounds its own."""
    got, _ = on_eight_devices("2.5", profile, (), True, INT8)
    for one, eight in zip(on_one_device("2.5", INT8), got, strict=True):
        assert np.linalg.norm(eight - one) <= (0.02 if parts > 1 else 0.01) * np.linalg.norm(one)


MESHES: list[tuple[str, dict[str, int]]] = [
    ("ironwood", {}),
    ("trillium", {"passes": 1, "heads": 4, "embed": 2}),
    ("gpu", {"passes": 2, "heads": 4}),
]
TEXT_TOKENS = 24
MASK = np.arange(TEXT_TOKENS) >= np.array([[5], [19]])
TWO_LAYERS = TEXT_CONFIG | {"num_hidden_layers": 2}  # one of each kind
STATES, CHANNELS = 4, 64  # of the text encoder that the connectors are made for


def text_network(name: str) -> tuple[nnx.Module, np.ndarray]:
    """The text encoder, or a model version's connectors, with weights; and what it reads of two prompts."""
    scope, draw = Scope(jnp.float32), np.random.default_rng(3)
    encoders = {"text encoder": gemma_arch(TWO_LAYERS, name), "text encoder of 2.5": LTX2_5.text_encoder}
    if name in encoders:
        network, read = Gemma(scope, encoders[name]), draw.integers(1, 99, MASK.shape, np.int32)
    else:
        network = TextConnectors(scope, {"2.0": LTX2, "2.3": LTX2_3}[name].connectors)
        read = draw.standard_normal((len(MASK), STATES, TEXT_TOKENS, CHANNELS), np.float32)
    return random_weights(network, seed=4, scale=0.2), read


@pytest.mark.parametrize("name", ["text encoder", "text encoder of 2.5", "2.0", "2.3"])
def test_every_mesh_gives_the_same_text_features(name: str) -> None:
    network, read = text_network(name)

    def run(network: nnx.Module, plan: ShardingPlan) -> list[np.ndarray]:
        with activate(plan):
            found = jax.jit(lambda network, states, mask: network(states, mask))(network, read, MASK)
        return [np.asarray(each) for each in jax.tree.leaves(found)]

    wanted = run(network, plan_for(network, "single", {}))
    for profile, mesh in MESHES:
        plan = plan_for(network, profile, mesh)
        for one, eight in zip(wanted, run(placed(network, plan), plan), strict=True):
            assert one.shape == eight.shape
            assert np.linalg.norm(eight - one) <= 1e-5 * np.linalg.norm(one), (profile, mesh)


LATER_IRONWOOD = Counter(TRADES) + Counter(GATES) + Counter(MERGES)
EARLIER_TRILLIUM = Counter(TRADES) + Counter(MERGES) + Counter(MERGES) + Counter(SWAPS) + Counter(SQUARES)
LATER_TRILLIUM = EARLIER_TRILLIUM + Counter(GATES) + Counter(TEXT_KEYS)


@pytest.mark.parametrize(
    ("model_version", "profile", "matrices", "wanted"),
    [
        ("2.0", "ironwood", None, Counter(TRADES) + Counter(MERGES)),
        ("2.0", "trillium", None, EARLIER_TRILLIUM),
        ("2.5", "ironwood", None, LATER_IRONWOOD),
        ("2.5", "trillium", None, LATER_TRILLIUM),
        ("2.5", "ironwood", INT8, LATER_IRONWOOD),
        ("2.5", "trillium", INT8, LATER_TRILLIUM),
    ],
    ids=lambda value: None if isinstance(value, Counter) else str(value),
)
def test_a_block_has_exactly_the_collectives_of_its_profile(
    model_version: str, profile: str, matrices: MatrixType | None, wanted: Counter[tuple[str, tuple[str, ...]]]
) -> None:
    plan = plan_of(CONFIGS[model_version], profile, {})
    _, text = on_eight_devices(model_version, profile, (), True, matrices)
    inside: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for each in collectives(text, plan.mesh):
        if each.loops == (LAYERS,):
            # XLA may make one of several, and the CPU has a result a device of an all-to-all.
            inside[each.kind, each.axes] += 1 if each.kind == "all-to-all" else len(each.results)
    assert inside == wanted


@pytest.mark.parametrize(
    ("profile", "devices", "rows", "shape"),
    [
        ("ironwood", 8, 4, (4, 2, 1)),
        ("ironwood", 8, 2, (2, 4, 1)),
        ("ironwood", 8, 1, (1, 8, 1)),
        ("ironwood", 8, 3, (1, 8, 1)),
        ("ironwood", 2, 4, (2, 1, 1)),
        ("trillium", 8, 4, (4, 1, 2, 1)),
        ("trillium", 8, 1, (1, 4, 2, 1)),
        ("trillium", 4, 2, (2, 1, 2, 1)),
    ],
)
def test_devices_without_a_pass_share_the_tokens(profile: str, devices: int, rows: int, shape: tuple[int, ...]) -> None:
    plan = lay_out(read_sharding(profile), jax.devices()[:devices], [], rows)
    assert plan.mesh.devices.shape == shape


def test_stacked_16_bit_matrices_have_the_tiles_of_the_plan() -> None:
    """All others as the device has it."""
    on_cpu = lay_out(read_sharding("ironwood"), jax.devices(), [], ROWS)
    plan, arch = replace(on_cpu, bf16_tile_sublanes=16), read_arch(TransformerArch, EARLIER, "config.json")
    for dtype in (jnp.bfloat16, jnp.float32):
        for weight in weights(Transformer(Scope(dtype), arch)):
            matrix = weight.layers and weight.ndim == 3 and "table" not in weight.source  # of 2 to 9 rows, no full tile
            tiled = matrix and dtype == jnp.bfloat16
            layout = Layout((0, 1, 2), ((16, 128), (2, 1)))
            sharding = plan.weight(weight.axes)
            assert plan.place(weight) == (Format(layout, sharding) if tiled else sharding)


@pytest.mark.parametrize(
    ("shape", "sublanes", "order"),
    [
        ((256, 64), None, (0, 2, 1)),
        ((256, 64), 16, (0, 2, 1)),
        ((96, 64), None, None),  # fewer outputs than a tile has columns
        ((96, 64), 16, (0, 1, 2)),
        ((256, 36), None, None),
    ],
)
def test_stacked_matrices_lie_input_major_where_the_plan_says_so(
    shape: tuple[int, int], sublanes: int | None, order: tuple[int, ...] | None
) -> None:
    on_cpu = lay_out(read_sharding("trillium"), jax.devices(), [], ROWS)
    plan = replace(on_cpu, bf16_tile_sublanes=sublanes, input_major=True)
    matrix = Scope(jnp.bfloat16).stacked("blocks", range(LAYERS)).weight("weight", shape, ("embed", "mlp"))
    place = plan.place(matrix)
    assert place == (
        Format(Layout(order, ((sublanes or 8, 128), (2, 1))), plan.weight(matrix.axes))
        if order
        else plan.weight(matrix.axes)
    )
    assert plan.place(Scope(jnp.bfloat16).weight("weight", shape, ("embed", "mlp"))) == plan.weight(("embed", "mlp"))
