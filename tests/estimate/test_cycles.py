"""What a program takes by its compiler: of a small one compiled for a TPU, and of a text whose sums can be seen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compilers import needs_libtpu
from ltx2_cli.chips import chip
from ltx2_cli.estimate import cycles as module
from ltx2_cli.estimate.cycles import SCHEDULE, XLA, attention_flops, program_cycles

# A layer of a product and a sum in a loop of five turns, two kernels in it, and a copy outside.
PROGRAM = """\
HloModule jit_f

FileNames
1 "/usr/lib/elsewhere.py"
2 "/home/me/site-packages/ltx2_cli/nn/layers.py"

FunctionNames
1 "main"

FileLocations
1 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=0 end_column=1}
2 {file_name_id=2 function_name_id=1 line=41 end_line=41 column=0 end_column=1}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=1 parent_frame_id=3}

%product (p: bf16[8,8]) -> bf16[8,8] {
  ROOT %dot.1 = bf16[8,8] convolution(%p, %p), metadata={op_name="jit(f)/while/body/feed_forward/dot" stack_frame_id=2}
}

%body (s: (s32[], bf16[8,8])) -> (s32[], bf16[8,8]) {
  %a.1 = bf16[8,8] fusion(%x), calls=%product, backend_config={"estimated_cycles":"100"}
  %a.2 = f32[8] fusion(%x), metadata={op_name="jit(f)/self_attention/sum" stack_frame_id=3}, b={"estimated_cycles":"20"}
  %a.3 = bf16[8,8] all-reduce(%x), replica_groups={{0,1}}, backend_config={"estimated_cycles":"7000"}
  %a.4 = bf16[8,8] copy-start(%x), backend_config={"estimated_cycles":"7000"}
  %a.5 = bf16[8,8] copy(%x), backend_config={"estimated_cycles":"9223372036854775807"}
}

%condition (s: (s32[], bf16[8,8])) -> pred[] {
  %limit = s32[] constant(5)
}

ENTRY %main (p0: bf16[8,8]) -> bf16[8,8] {
  %loop = (s32[], bf16[8,8]) while(%t), condition=%condition, body=%body
  ROOT %copy.9 = bf16[8,8] copy(%y), backend_config={"estimated_cycles":"3"}
}
"""
ATTENTION = (
    '%k = bf16[2,64,256] custom-call(%a), custom_call_target="tpu_custom_call", operand_layout_constraints='
    "{s32[2]{0}, bf16[2,64,256]{2,1,0}, bf16[2,32,256]{2,1,0}, bf16[2,32,256]{2,1,0}, f32[64,256]{1,0}}"
)
SMALL = """
import json
from dataclasses import asdict
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ltx2_cli.core.programs import Program
from ltx2_cli.estimate.compiled import compile_program
from ltx2_cli.estimate.cycles import dumped_schedules
from ltx2_cli.estimate.offline import topology

def f(x, w, small):
    with jax.named_scope("feed_forward"):
        y = x @ w
    return y, jnp.tanh(x.astype(jnp.float32)), jnp.matmul(small, small, precision="highest")

with dumped_schedules():
    mesh = Mesh(list(topology("v6e:2x2"))[:1], ("one",))
    whole = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16, sharding=whole)
    small = jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=whole)
    cycles = compile_program(Program("f", (), jax.jit(f), lambda: (x, x, small)), mesh).cycles
print(json.dumps(asdict(cycles)))
"""


def test_estimates_are_summed_by_scope() -> None:
    """Five turns; collectives, what runs beside, and a number that stands for none are left out."""
    cycles = program_cycles(PROGRAM, chip("v6e"))
    assert cycles
    assert cycles.clock == XLA
    assert cycles.by_scope == {"feed-forward": 500, "self-attention": 100, "outside the layers": 3}
    assert cycles.total == cycles.by_xla == 603
    assert cycles.seconds == pytest.approx(603 * 2**19 / 918e12)
    assert (cycles.dearest, cycles.dearest_cycles) == ("a.2, nn/layers.py:41", 100)


def test_unreadable_schedules_leave_the_estimates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another libtpu may write them."""
    (tmp_path / "123-a.1-00-final_bundles.txt").write_text("no bundles")
    monkeypatch.setattr(module, "_files", lambda: [*tmp_path.iterdir()])
    cycles = program_cycles(PROGRAM, chip("v6e"))
    assert cycles
    assert (cycles.clock, cycles.total) == (XLA, 603)


def test_kernels_that_are_alike_have_one_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three cycles, the loop's sum in each of its five turns, and the copy; the product has an estimate alone."""
    (tmp_path / "123-a.2-00-final_bundles.txt").write_text("     0   :  {}\n   0x2   :  {}\n")
    alike = "key:<top>\nordinal:0\nequivalent_hlos[size=0]:\nkey:a.2\nordinal:1\nequivalent_hlos[size=1]:\n  copy.9\n"
    (tmp_path / "123-TLP-00-deduplication-map.txt").write_text(alike)
    monkeypatch.setattr(module, "_files", lambda: [*tmp_path.iterdir()])
    cycles = program_cycles(PROGRAM, chip("v6e"))
    assert cycles
    assert cycles.clock == SCHEDULE
    assert cycles.by_scope == {"feed-forward": 500, "self-attention": 15, "outside the layers": 3}
    assert cycles.by_xla == 603


def test_products_bound_a_schedule_with_fewer_bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bundles, and three instructions of four cycles each, in each of five turns."""
    product = "%1 = vmatmul.bf16.gmra.mxu0 %v1_v1  ;;  %2 = vmatmul.bf16.gmra.mxu1 %v1_v1"
    bundles = f"     0   :  {{ {product} }}\n   0x1   :  {{ {product.partition('  ;;')[0]} }}\n"
    (tmp_path / "123-a.1-00-final_bundles.txt").write_text(bundles)
    monkeypatch.setattr(module, "_files", lambda: [*tmp_path.iterdir()])
    cycles = program_cycles(PROGRAM, chip("v5e"))
    assert cycles
    assert cycles.by_scope["feed-forward"] == cycles.products == 5 * 3 * 4


@pytest.mark.parametrize("name", ["H100", "no chip"])
def test_other_devices_have_no_cycles(name: str) -> None:
    assert program_cycles(PROGRAM, chip(name)) is None


def test_attention_is_counted_by_its_operands() -> None:
    """Of 64 queries and 32 keys, twice each of 256 channels, two products."""
    assert attention_flops(ATTENTION) == 2 * 2 * 2 * 64 * 32 * 256
    kernel = PROGRAM.replace("ROOT %copy.9 = bf16[8,8] copy(%y)", f"ROOT {ATTENTION}")
    cycles = program_cycles(kernel, chip("v6e"))
    assert cycles
    assert cycles.kernels == cycles.by_scope["outside the layers"] == pytest.approx(2**22 / 2**19 / 0.6)


@needs_libtpu
def test_the_schedule_of_a_compiled_program_is_read() -> None:
    """A product of 2048 in each direction, 2^34 operations at 2^19 a cycle; one of 512 in float32, six of bfloat16; a
    tanh of 2048 x 2048 numbers, whose copies take longer: 4 bytes out, and 2 in unless they are on the core for the
    product."""
    as_for_users = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_T"))}
    done = subprocess.run([sys.executable, "-c", SMALL], env=as_for_users, capture_output=True, check=True, text=True)
    cycles = json.loads(done.stdout)
    assert cycles["clock"] == "the compiler's schedule"
    assert cycles["kernels"] == cycles["searching"] == 0
    product = 2**34 / 2**19
    assert cycles["products"] == product + 6 * product / 4**3
    assert product < cycles["by_scope"]["feed-forward"] < 1.2 * product
    byte = 2048**2 / 1638e9 * 918e12 / 2**19
    assert 4 * byte <= cycles["dearest_cycles"] <= 6.1 * byte
    assert cycles["dearest"].startswith("convert_tanh_fusion, core/programs.py:")  # the innermost line of the package
