"""Collectives of programs small enough to count by hand: compiled here for eight devices, and stored from TPU compiles.

The stored texts are what libtpu 0.0.42 made of twenty lines of jax for 2 x 4 devices along `a` and `b`, thinned:
configurations, signatures and most layouts and metadata are cut out.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ltx2_cli.estimate.collectives import Collective, axes_of, collectives, groups, sent_bytes

AXES = ("a", "b")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.asarray(jax.devices()).reshape(2, 4), AXES)


def stored(name: str, mesh: Mesh) -> list[Collective]:
    return collectives((Path(__file__).parent / name).read_text(encoding="utf-8"), mesh)


def compiled(function: Callable[..., jax.Array], mesh: Mesh, spec: PartitionSpec, *arguments: object) -> str:
    others = (PartitionSpec(),) * (len(arguments) - 1)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(spec, *others), out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(*arguments).compile().as_text()


def five_kinds(x: jax.Array) -> jax.Array:
    gathered = jax.lax.all_gather(x, "b", axis=0, tiled=True)
    summed = jax.lax.psum(jnp.sin(gathered), "a")
    scattered = jax.lax.psum_scatter(jnp.cos(summed), "b", scatter_dimension=0, tiled=True)
    turned = jax.lax.all_to_all(scattered, "a", 1, 0, tiled=True)
    return jax.lax.ppermute(turned, "b", [(0, 1), (1, 2), (2, 3), (3, 0)])


def outlines(found: list[Collective]) -> dict[str, tuple[int, int, tuple[str, ...]]]:
    return {collective.kind: (collective.bytes, collective.devices, collective.axes) for collective in found}


def test_the_five_kinds_of_collectives_are_counted(mesh: Mesh):
    text = compiled(five_kinds, mesh, PartitionSpec(AXES), np.zeros((64, 16), np.float32))
    found = collectives(text, mesh)  # 8 x 16 floats on a device are 512 bytes
    assert outlines(found) == {
        "all-gather": (3 * 512, 4, ("b",)),
        "all-reduce": (2048, 2, ("a",)),
        "reduce-scatter": (3 * 512, 4, ("b",)),
        "all-to-all": (512 // 2, 2, ("a",)),
        "collective-permute": (512, 2, ("b",)),
    }
    assert sent_bytes(found) == 1536 + 2048 + 1536 + 256 + 512
    assert {collective.times for collective in found} == {1}
    assert next(collective.results for collective in found if collective.kind == "all-gather") == ("f32[32,16]",)
    assert next(collective.op_name for collective in found if collective.kind == "all-reduce").endswith("/psum")


def test_asynchronous_collectives_of_tpus_are_counted(mesh: Mesh):
    found = stored("tpu7x_five_kinds.txt", mesh)
    megabyte = 512 * 1024 * 2
    assert len(found) == 5
    assert outlines(found) == {
        "all-gather": (3 * megabyte, 4, ("b",)),
        "all-reduce": (megabyte, 2, ("a",)),
        "reduce-scatter": (3 * megabyte, 4, ("b",)),
        "all-to-all": (megabyte // 2, 2, ("a",)),
        "collective-permute": (megabyte, 2, ("b",)),
    }
    assert next(collective.results for collective in found if collective.kind == "collective-permute") == (
        "bf16[1024,512]",
    )
    assert {collective.kind for collective in found if collective.asynchronous} == {
        "all-gather",
        "all-reduce",
        "reduce-scatter",
        "collective-permute",
    }


def summing(length: int, over: str, inner: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, _: (jax.lax.psum(jnp.sin(inner(x)), over), None), x, None, length=length)[0]


def test_collectives_in_a_loop_are_multiplied_by_its_trip_count(mesh: Mesh):
    text = compiled(partial(summing, 6, "b", lambda x: x), mesh, PartitionSpec("a"), np.zeros((8, 4), np.float32))
    (found,) = collectives(text, mesh)
    assert (found.loops, found.times, found.bytes) == ((6,), 6, 2 * 64 * 3 // 4)
    assert sent_bytes([found]) == 6 * 96
    assert not found.in_traced_loop


def test_nested_loops_multiply_and_unknown_lengths_count_once(mesh: Mesh):
    def program(x: jax.Array, steps: jax.Array) -> jax.Array:
        layers = partial(summing, 6, "b", partial(summing, 3, "a", lambda x: x))
        return jax.lax.fori_loop(0, steps, lambda _, x: layers(x), x)

    found = collectives(compiled(program, mesh, PartitionSpec("a"), np.zeros((8, 4), np.float32), 7), mesh)
    assert {collective.axes: (collective.loops, collective.times) for collective in found} == {
        ("a",): ((None, 6, 3), 18),
        ("b",): ((None, 6), 6),
    }
    assert all(collective.in_traced_loop for collective in found)
    assert sent_bytes(found) == 18 * 64 + 6 * 96


def test_loops_of_unknown_length_count_once(mesh: Mesh):
    (found,) = stored("tpu7x_nested_loops.txt", mesh)
    assert (found.kind, found.axes, found.loops) == ("all-reduce", ("b",), (None, 6))
    assert found.sent_bytes == 6 * (256 * 1024 * 2) * 2 * 3 // 4


def test_a_collective_split_over_fusions_counts_once(mesh: Mesh):
    found = stored("v5e_fused_gather.txt", mesh)
    assert [(collective.kind, collective.axes, collective.loops) for collective in found].count(
        ("all-gather", ("a",), (6,))
    ) == 2
    assert len(found) == 3
    assert [collective.asynchronous for collective in found] == [False, True, False]


LOOP = """
%body (turn: (s32[], f32[4])) -> (s32[], f32[4]) {
  %x = f32[4] get-tuple-element(%turn), index=1
  %y = f32[4] all-reduce(%x), replica_groups={}, to_apply=%add
}

%less (i: s32[], end: s32[]) -> pred[] {
  ROOT %more = pred[] compare(%i, %end), direction=LT
}

%condition (turn: (s32[], f32[4])) -> pred[] {
  %i = s32[] get-tuple-element(%turn), index=0
  %end = s32[] BOUND
  ROOT %more = pred[] fusion(%i, %end), kind=kLoop, calls=%less
}

ENTRY %main (x: f32[4], n: s32[]) -> f32[4] {
  %loop = (s32[], f32[4]) while(%begin), condition=%condition, body=%body
  ROOT %y = f32[4] get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(("bound", "iterations"), [("constant(5)", 5), ("get-tuple-element(%turn), index=1", None)])
def test_the_trip_count_is_the_bound_in_the_condition(mesh: Mesh, bound: str, iterations: int | None):
    (found,) = collectives(LOOP.replace("BOUND", bound), mesh)
    assert (found.loops, found.times) == ((iterations,), iterations or 1)


def test_a_trip_count_stated_by_xla_takes_precedence(mesh: Mesh):
    stated = 'body=%body, backend_config={"known_trip_count":{"n":"9"},"known_init_step":{"init":"0","step":"1"}}'
    (found,) = collectives(LOOP.replace("BOUND", "constant(5)").replace("body=%body", stated), mesh)
    assert found.loops == (9,)


ASYNCHRONOUS = """
%wrapped (x: f32[8]) -> f32[1] {
  %x = f32[8] parameter(0)
  ROOT %scattered = f32[1] reduce-scatter(%x), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}

%either (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  ROOT %summed = f32[8] all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
}

%or (x: f32[8]) -> f32[8] {
  ROOT %x = f32[8] parameter(0)
}

ENTRY %main (x: f32[8], which: s32[]) -> f32[8] {
  %x = f32[8] parameter(0)
  %which = s32[] parameter(1)
  %a = (f32[8], f32[64]) all-gather-start(%x), replica_groups=[1,8]<=[8], dimensions={0}
  %b = f32[64] all-gather-done(%a)
  %c = (f32[8], f32[2]) all-reduce-start(%x, %x), replica_groups=[1,8]<=[8], to_apply=%add
  %d = (f32[8], f32[2]) all-reduce-done(%c)
  %e = ((f32[8]), f32[1], u32[]) async-start(%x), calls=%wrapped
  %f = f32[1] async-done(%e), calls=%wrapped
  ROOT %g = f32[8] conditional(%which, %x, %x), branch_computations={%either, %or}
}
"""


def test_a_start_and_its_wrapped_collective_count_once(mesh: Mesh):
    found = collectives(ASYNCHRONOUS, mesh)
    assert [(collective.kind, collective.bytes, collective.axes) for collective in found] == [
        ("all-gather", 256 * 7 // 8, AXES),
        ("all-reduce", 40 * 2 * 7 // 8, AXES),
        ("reduce-scatter", 4 * 7, AXES),
        ("all-reduce", 32, ("b",)),
    ]
    assert [collective.asynchronous for collective in found] == [True, True, True, False]


ROWS, COLUMNS = [(0, 1, 2, 3), (4, 5, 6, 7)], [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}", ROWS),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", COLUMNS),
        ("replica_groups=[2,4]<=[8], dimensions={0}", ROWS),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", COLUMNS),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}", ROWS),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4,'axis_2'=1] {'axis_0'}", COLUMNS),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", COLUMNS),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=(0,4,1,5,2,6,3,7) {'axis_1'}", COLUMNS),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(1)2}", COLUMNS),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(2)4}", ROWS),
        ("replica_groups={}, dimensions={0}", [tuple(range(8))]),
        ("channel_id=1, dimensions={0}", [tuple(range(8))]),
        ("channel_id=1, source_target_pairs={{0,4},{1,5},{2,6},{3,7}}, metadata={}", COLUMNS),
    ],
)
def test_every_spelling_of_groups_is_read(spelling: str, expected: list[tuple[int, ...]]):
    assert groups(spelling, 8) == expected


def test_axes_are_those_that_any_group_spans(mesh: Mesh):
    assert axes_of(ROWS, mesh) == ("b",)
    assert axes_of(COLUMNS, mesh) == ("a",)
    assert axes_of([(0, 1), (2, 3), (4, 5), (6, 7)], mesh) == ("b",)
    assert axes_of([(0, 0), (1, 5)], mesh) == ("a",)
    assert axes_of([(0,), (1,)], mesh) == ()


def test_devices_are_counted_in_the_order_of_the_mesh():
    mesh = Mesh(np.asarray(jax.devices())[[0, 1, 2, 3, 6, 7, 4, 5]].reshape(2, 2, 2), ("x", "y", "z"))
    whole = NamedSharding(mesh, PartitionSpec())
    for axis in mesh.axis_names:
        split = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(mesh, PartitionSpec(axis)))
        text = jax.jit(jnp.sin, out_shardings=whole).lower(split).compile().as_text()
        assert [(collective.kind, collective.axes) for collective in collectives(text, mesh)] == [
            ("all-gather", (axis,))
        ]


SIZES = {"bf16[3,5]": 30, "pred[4]": 4, "s4[3]": 2, "f8e4m3fn[7]": 7, "u32[]": 4, "token[]": 0}


@pytest.mark.parametrize(("array", "size"), SIZES.items())
def test_bytes_of_arrays_are_counted(mesh: Mesh, array: str, size: int):
    text = f"ENTRY %main () -> x {{\n  %y = {array}{{0}} collective-permute(%x), source_target_pairs={{{{0,1}}}}\n}}"
    (found,) = collectives(text, mesh)
    assert (found.results, found.bytes) == ((array,), size)


def test_text_of_no_compiled_program_is_refused(mesh: Mesh):
    with pytest.raises(ValueError, match="no ENTRY"):
        collectives("module @jit_f {}", mesh)
