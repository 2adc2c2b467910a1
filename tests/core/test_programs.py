"""What is compiled, and when: the programs of a run are known without its weights, and are all that it compiles."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh
from jax.stages import Lowered

from clips import ALL_ON, Case, Checkpoint, Size, plan_of
from compilers import needs_libtpu
from ltx2_cli import chips, read_spec
from ltx2_cli.chips import chip
from ltx2_cli.core.components import abstract_network
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import open_components, programs, run
from ltx2_cli.core.stage_programs import stage_programs
from ltx2_cli.estimate import offline
from ltx2_cli.estimate.compiled import Compiled, compile_program
from ltx2_cli.estimate.estimate import forward_programs
from ltx2_cli.parallel import jit
from ltx2_cli.parallel.jit import jitted
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.plan.resolve import plan_offline
from ltx2_cli.weights.declare import Weight, weights
from ltx2_cli.weights.transfer import Place

SMALL = Case(Size(9, 64, 64, 24.0), 2, ALL_ON.video, ALL_ON.audio, (0,))


OPTIONS: list[dict[str, object]] = [
    {"num_videos": 2, "sharding": {"profile": "single", "use_batched_text_encoder": False}},
    {"sharding": {"profile": "gpu", "mesh": {"passes": 4, "heads": 2}}},
]
TRILLIUM: dict[str, object] = {"sharding": {"profile": "trillium", "mesh": {"heads": 2}}}


def turned(plan: ShardingPlan, weight: Weight) -> Place:
    """As on a TPU stacked matrices are in other tiles, here they are in another order."""
    sharding = plan.weight(weight.axes)
    return Format(Layout((0, 2, 1), ()), sharding) if weight.layers and weight.ndim == 3 else sharding


@pytest.mark.parametrize(
    ("option", "place"),
    [*((option, ShardingPlan.place) for option in OPTIONS), (TRILLIUM, turned)],
    ids=[*map(str, OPTIONS), "trillium, another layout"],
)
def test_a_run_compiles_only_its_listed_programs(
    checkpoint: Checkpoint,
    compilations: list[str],
    option: dict[str, object],
    place: Callable[[ShardingPlan, Weight], Place],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside those by which weights arrive on several devices; and weights lie as the programs were told."""
    monkeypatch.setattr(ShardingPlan, "place", place)
    plan = plan_of(checkpoint, SMALL, 3, keep_resident=True, **option)
    jax.clear_caches()
    found = list(programs(plan))
    compilations.clear()
    for program in found:
        program.lower().compile()
    assert len(compilations) == len(found) == 7
    components = open_components(plan)
    for name in plan.networks.present():
        with components.use(name, Report()) as network:
            for weight, promised in zip(weights(network), weights(abstract_network(plan, name)), strict=True):
                array, wanted = weight.get_value(), promised.get_value()
                assert array.sharding == wanted.sharding, weight.source
                assert wanted.format.layout in (None, array.format.layout), weight.source
    compilations.clear()
    list(run(plan, components))
    assert not compilations


def test_every_device_reads_its_part_of_the_text() -> None:
    """Of the tokens, and with heads of the weights; where the devices do not divide them, all of them."""

    def flops(**keys: object) -> float:
        plan = plan_offline(read_spec(prompt="rain", model="demo", **keys), jax.devices())
        (program,) = (program for program in programs(plan) if program.name == "text encoder")
        return program.lower().compile().cost_analysis()["flops"]

    whole = flops(sharding="single")
    for profile, mesh in (("ironwood", {}), ("trillium", {"heads": 2}), ("gpu", {"passes": 4, "heads": 2})):
        assert flops(sharding={"profile": profile, "mesh": mesh}) == pytest.approx(whole / 8, rel=0.05)
    assert flops(sharding="ironwood", max_sequence_length=36) > whole


def test_programs_of_many_sizes_leave_the_devices(checkpoint: Checkpoint) -> None:
    """As in a batch: those of one size are apart from those of another, and only the newest stay."""
    sizes = (SMALL, SMALL._replace(size=SMALL.size._replace(width=96)))
    first, second = ([*programs(plan_of(checkpoint, case, 3))] for case in sizes)
    same = {one.name for one, other in zip(first, second, strict=True) if one.function is other.function}
    assert same == {"text encoder", "connectors", "text context"}
    client, count = jax.devices()[0].client, jit.PROGRAMS
    before = len(client.live_executables())
    for number in range(count + 10):
        jitted(_plus, None, number=number)(np.zeros(1, np.float32))
    assert len(client.live_executables()) <= before + count


def _plus(x: jax.Array, number: int) -> jax.Array:
    return x + number


def test_a_forward_is_a_separate_program(checkpoint: Checkpoint) -> None:
    plan = plan_of(checkpoint, SMALL, 3)
    lowered = stage_programs(plan, 0).forward.lower()
    passes = len(plan.stages[0].passes)
    assert jax.tree.map(lambda out: out.shape, lowered.out_info) == ((passes, 1, 8, 8), (passes, 1, 9, 16))
    assert "while" in lowered.as_text()  # over the layers
    located = lowered.as_text(debug_info=True)  # as a trace shows it
    assert all(f"{part}/" in located for part in ("self_attention", "text_attention", "exchange", "feed_forward"))


@needs_libtpu
def test_the_compiler_of_a_chip_gets_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_for(topology: str) -> None:
        plan = ShardingPlan(Mesh(np.asarray(offline.topology(topology)[:1]), ("device",)), (), ())
        x = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16, sharding=plan.replicated)
        jitted(lambda x: x @ x, plan.replicated, plan).lower(x).compile()

    compile_for("v6e:2x4")  # libtpu knows them
    v6e = chip("v6e")
    assert v6e.compiler_options
    other = replace(v6e, compiler_options=(("no_such_option", "1"),))
    monkeypatch.setattr(chips, "CHIPS", tuple(other if known is v6e else known for known in chips.CHIPS))
    compile_for("tpu7x:2x2x1")
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        compile_for("v6e:2x4")


@pytest.fixture(scope="module")
def lowered_steps() -> Lowered:
    """The demo's steps for two by two devices of a TPU, whose tokens are traded for heads."""
    sharding = {"profile": "trillium", "mesh": {"passes": 1, "tokens": 2, "heads": 2}}
    asked = {"prompt": "rain", "model": "demo", "dtype": "bfloat16", "seed": 1, "sharding": sharding}
    plan = plan_offline(read_spec(asked, width=64, height=64, num_frames=9), offline.topology("v6e:2x2"))
    return stage_programs(plan, 0).steps.lower()


@needs_libtpu
def test_streams_and_traded_tokens_lie_row_major(lowered_steps: Lowered) -> None:
    """Else XLA may put tokens along the lanes, where products are slow. In both loops over the layers: three rows, and
    four after the branch."""
    row_major = r"@LayoutConstraint.* result_layouts = \[dense<\[2, 1, 0\]> .* tensor<(\w+)xbf16>"
    found = Counter(re.findall(row_major, lowered_steps.as_text()))
    streams, traded = {"4x128": 1, "9x64": 1}, {"4x64": 3, "4x2": 1}  # queries, keys and values; gates
    assert found == {f"{rows}x{part}": count for rows in (3, 4) for part, count in (streams | traded).items()}


@needs_libtpu
@pytest.mark.parametrize(
    ("slice_", "mesh", "kind"),
    [
        ("v6e:2x4", {"passes": 4, "heads": 2}, "collective-permute"),  # of pairs, in parts of the tokens
        ("tpu7x:2x2x1", {"passes": 2, "tokens": 4}, "all-to-all"),  # of tokens and heads
    ],
)
def test_devices_compute_while_they_send(slice_: str, mesh: dict[str, int], kind: str) -> None:
    """What a layer sends has left before it is needed, and arithmetic stands between."""
    profile = "trillium" if "heads" in mesh else "ironwood"
    asked = {"prompt": "rain", "model": "demo", "dtype": "bfloat16", "sharding": {"profile": profile, "mesh": mesh}}
    plan = plan_offline(read_spec(asked, width=384, height=256, num_frames=49), offline.topology(slice_))
    (forward,) = (compile_program(program, plan.sharding.mesh) for program in forward_programs(plan))
    assert isinstance(forward, Compiled)
    large = [each for each in forward.collectives if each.loops and each.bytes > 50_000]
    assert {(each.kind, each.asynchronous) for each in large} == {(kind, True)}
    lines = forward.text.splitlines()
    for number, line in enumerate(lines):
        if begun := re.match(rf"\s*%?([\w.-]+) = .* {kind}-start\(", line):
            ended = next(
                index for index, later in enumerate(lines) if re.search(rf"{kind}-done\(.*{begun[1]}\)", later)
            )
            assert any(re.search(r" (fusion|custom-call)\(", between) for between in lines[number:ended]), begun[1]


@needs_libtpu
@pytest.mark.parametrize(
    ("keys", "parts", "tokens"),
    [({}, 6, 1024), ({"weights": "int8"}, 6, 1024), ({"weights": "int8", "compute": "full"}, 4, 1536)],
    ids=str,
)
def test_what_is_sent_in_parts_goes_by_the_type_of_products(keys: dict[str, str], parts: int, tokens: int) -> None:
    sharding = {"profile": "trillium", "mesh": {"passes": 4, "heads": 2}}
    asked = {"prompt": "rain", "model": "demo", "dtype": "bfloat16", "sharding": sharding, **keys}
    plan = plan_offline(read_spec(asked, width=768, height=512, num_frames=121), offline.topology("v6e:2x4"))
    (forward,) = forward_programs(plan)
    lowered = forward.lower().as_text()
    sent = re.findall(r"collective_permute.*tensor<[\dx]*?(\d+)x\d+xbf16>$", lowered, re.M)
    a_layer = 4  # sums: of three attentions and the feed-forward. The audio is not split
    assert Counter(sent) == {str(tokens): a_layer * parts, "126": a_layer}
    # Rotary tables are behind a barrier outside the loop over layers: XLA would add their axes up in each.
    tables = [at.start() for at in re.finditer(r"optimization_barrier .*tensor<6144x\d+xf32>$", lowered, re.M)]
    assert tables
    assert max(tables) < lowered.index("stablehlo.while")


@needs_libtpu
@pytest.mark.slow
def test_steps_that_skip_blocks_compile_for_tpus() -> None:
    """In windows, of four devices that split rows and tokens; the cache comes out where it went in."""
    sharding = {"profile": "trillium", "mesh": {"passes": 2, "tokens": 2, "heads": 1}}
    asked = {"prompt": "rain", "model": "demo", "dtype": "bfloat16", "seed": 1, "sharding": sharding}
    cached = {"first_block_cache": 0.1, "windows": 2, "window_overlap": 0.3, "width": 64, "height": 64}
    plan = plan_offline(read_spec({**asked, **cached}), offline.topology("v6e:2x2"))
    compiled = stage_programs(plan, 0).steps.lower().compile()
    before, after = compiled.input_shardings[0][-2], compiled.output_shardings[2]
    assert jax.tree.leaves(before) == jax.tree.leaves(after)
    kept = sum(map(prod, (x.shape for x in jax.tree.leaves(stage_programs(plan, 0).cache.outputs().layers))))
    assert compiled.memory_analysis().alias_size_in_bytes >= kept // plan.sharding.mesh.size


@pytest.mark.slow
@needs_libtpu
def test_the_steps_read_stacked_weights_as_they_lie(lowered_steps: Lowered) -> None:
    """In the loop of steps, and in both loops over the layers: else XLA copies all of them before the first step. Each
    device reads its own part."""
    text = lowered_steps.compile().as_text()
    assert set(re.findall(r"bf16\[6,256,128\]\{([\d,]+):", text)) == {"1,2,0"}  # of the video's feed-forward
    gathered = [
        prod(map(int, shape.split(","))) for shape in re.findall(r"(?:bf16|f32)\[([\d,]+)\]\S* all-gather\(", text)
    ]
    assert 0 < max(gathered) < 128 * 64  # activations alone
