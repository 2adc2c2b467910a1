"""How often the bundles of a kernel's schedule are issued, counted by eye in short schedules."""

from pathlib import Path

import pytest

from ltx2_cli.estimate.bundles import issued

# Eight turns of 14 bundles; in the first and the fifth also the eight of 0x8 to 0xf, which copy 64 granules of
# 32 bytes and have three instructions for matrix units.
LOOP = """\
= control target key end

     0   :  { %s10_s0 = smov 0 /* copy for cssa */ }
   0x1 LB: > { %s11_s0 = sphi %s10_s0, %s14_s0 /* phi copy */  ;;  %s12_s1 = sand.u32 3, %s11_s0 } /* Start region 1 */
   0x2   : > { %p13_p0 = scmp.ne.s32.totalorder %s12_s1, 0  ;;  %v50_v0 = vld [vmem:[%s41_s6] sm:$0xff] }
   0x3   : > { %20 = sbr.rel (%p13_p0) target = $region2 }
   0x8   : > { %31 = shalt.err (!%p39_p3) /* BoundsCheck 0 [deref of %s4] for %30 = dma.hbm_to_vmem [thread:$0] /*
hlo: copy
 */ }
   0x9   : > { %30 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s40_s5, /*size_in_granules=*/64, /*vmem=*/%s41_s6 }
   0xa   : > { %51 = vmatmul.mubr.bf16.gmra.mxu0 %v50_v0  ;;  %52 = vmatmul.mubr.bf16.gmra.mxu1 %v50_v0 }
   0xb   : > { %53 = vmatmul.mubr.bf16.gmra.mxu0 %v50_v0 }
  0x10   : > { %s14_s0 = sadd.s32 1, %s11_s0 } /* Start/End empty region 2 */
  0x11   : > { %p15_p1 = scmp.ge.s32.totalorder %s14_s0, 8 /* loop exit test */ }
  0x12   : > { %21 = sbr.rel (!%p15_p1) target = $region1 }
  0x17   :  { %60 = vsyncpa [#allocation9], 1 } /* exit bundle */
"""


def schedule(*bundles: str) -> str:
    """One bundle at each address, and a region of eleven bundles that is skipped where register p0 holds."""
    numbered = "".join(f"  {address:#x}   :  {{ {bundle} }}\n" for address, bundle in enumerate(bundles, start=1))
    branch, behind = len(bundles) + 1, len(bundles) + 17
    return (
        f"     0   :  {{}}\n{numbered}  {branch:#x}   :  {{ %1 = sbr.rel (%p9_p0) target = $region7 }}\n"
        f"  {behind:#x}   :  {{}} /* Start region 7 */\n"
    )


def is_skipped(*bundles: str, bounds_hold: bool = True) -> bool:
    """Whether the region behind `bundles` is skipped."""
    cycles = issued(schedule(*bundles), bounds_hold=bounds_hold).cycles - len(bundles)
    assert cycles in (7, 18)
    return cycles == 7


def test_turns_and_skipped_regions_are_counted() -> None:
    assert issued(LOOP) == (1 + 8 * 14 + 2 * 8 + 1, 2 * 3 * 4, 2 * 64 * 32)


def test_a_pointer_is_the_number_that_it_is_made_of() -> None:
    """The register of a counter was a pointer's before: libtpu says so once more, behind the counter's first value."""
    pointer = "%s16_s0 = int_to_ptr.vmem [resolvable:$true] %s16_s0"
    assert issued(LOOP.replace("  ;;  %v50_v0 = vld", f"  ;;  {pointer}  ;;  %v50_v0 = vld", 1)) == issued(LOOP)


def test_copies_of_a_window_of_an_array_are_counted() -> None:
    """As libtpu wrote them for v6e, but for the instructions for vectors: a loop of eleven turns from 0x4 to the delay
    of its branch at 0x12e copies bf16[3,4,1536,512] in nine windows; the first and the last turn skip a region from
    0x22 to 0x12a. Where a copy goes between cores, as a collective's, it does not count."""
    text = (Path(__file__).parent / "v6e_window_copy.txt").read_text()
    turns = 11 * (0x133 - 0x4) - 2 * (0x12B - 0x22)
    assert issued(text) == (4 + turns + 2, 0, 3 * 4 * 1536 * 512 * 2)
    assert issued(text.replace("second_minor_factor: 1 */", "*/ /* vmem-to-vmem */")).copied_bytes == 0


def test_eight_rows_of_float32_multiply_in_two_cycles() -> None:
    assert issued(LOOP.replace("bf16", "f32")).matrix_cycles == 2 * 3 * 2


def test_on_v7x_six_bundles_follow_a_branch_and_none_of_them_branches() -> None:
    loop = """
     0   :  { %s1_s0 = smov 0 }
   0x1 LB: > { %s2_s1 = sadd.s32 1, %s3_s0 } /* Start region 1 */
   0x2   : > { %p4_p0 = scmp.ge.s32.totalorder %s2_s1, 8  ;;  %p5_p1 = scmp.ge.s32.totalorder %s2_s1, 0 }
   0x3   : > { %6 = sbr.rel (!%p4_p0) target = $region1 }
   0x6   : > { %7 = sbr.rel (%p5_p1) target = $region2 }
   0x9   : > { %s8_s0 = smov %s2_s1 }
  0x14   :  {} /* Start region 2 */
"""
    # where four follow, the counter would stay as it is
    assert issued(loop, branch_delay=6).cycles == 1 + 7 * 9 + 12 + 1


def test_a_branch_skips_the_regions_behind_it() -> None:
    """A loop of four turns inside another of three; what begins each of them anew is not of the one before."""
    loops = """
     0   :  { %s1_s0 = smov 0  ;;  %s2_s1 = smov 0 }
   0x1 LB: > { %s3_s0 = sadd.s32 1, %s1_s0 } /* Start region 1 */
   0x2   : > { %p4_p0 = scmp.ge.s32.totalorder %s3_s0, 4 }
   0x3   : > { %5 = sbr.rel (!%p4_p0) target = $region1 }
   0x5 PF: > { %s6_s0 = smov 0  ;;  %s7_s1 = sadd.s32 1, %s2_s1 } /* Start/End empty region 3 */
   0x6   : > { %p8_p1 = scmp.ge.s32.totalorder %s7_s1, 3 }
   0x7   :  { %9 = sbr.rel (!%p8_p1) target = $region1 }
   0x9   :  { %s10_s1 = smov 0 } /* Start region 4 */
"""
    assert issued(loops).cycles == 1 + 3 * (4 * 4 + 4) + 1


def test_a_copy_on_a_condition_counts_where_it_holds() -> None:
    once = LOOP.replace("[thread:$0]  /*hbm=", "[thread:$0]  (%p15_p1), /*hbm=").replace("smov 0 ", "smov 4 ")
    assert issued(once).copied_bytes == 64 * 32  # in the first of four turns the predicate is one not yet computed


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("%p9_p0 = scmp.lt.s32.totalorder %s2_s1, 0", True),
        ("%p9_p0 = scmp.lt.u32.totalorder %s2_s1, 0", False),
        ("%p9_p0 = scmp.eq.s32.totalorder %s3_s2, 2147483643", True),  # shifted without the sign
        ("%p9_p0 = scmp.eq.s32.totalorder %s4_s3, 7", True),  # chosen
        ("%p9_p0 = scmp.eq.s32.totalorder %s5_s4, 4294967286", True),  # kept
        ("%p9_p0 = scmp.eq.s32.totalorder %s6_s5, 4294967286", True),  # stored and loaded
        ("%p9_p0 = pnand %p7_p1, %p7_p1", False),
        ("%p9_p0 = scmp.ne.s32.totalorder %s8_s6, 16843009", False),  # each byte of an argument is 1
        ("%p9_p0 = scmp.eq.s32.totalorder %s9_s8, 17", True),  # divided
        ("%p9_p0 = scmp.eq.s32.totalorder %s9_s9, 3", True),  # what remains
    ],
)
def test_scalar_instructions_are_executed(instruction: str, expected: bool) -> None:
    before = (
        "%s2_s1 = smov 4294967286 ;; %p7_p1 = scmp.eq.s32.totalorder %s99_s9, 1",  # -10; an argument
        "%s3_s2 = sshrl.u32 %s2_s1, 1  ;;  %s4_s3 = smov (%p7_p1, %s2_s1), 7",
        "%s5_s4 = smov (!%p7_p1, %s2_s1), 7  ;;  %8 = sst [smem:[#allocation3_spill]] %s2_s1",
        "%s6_s5 = sld [smem:[#allocation3_spill]]  ;;  %s8_s6 = sld [smem:[#allocation4]]",
        "%s7_s7 = smov 139",
        "%20 = sdivrem.u32 (%p7_p1), %s7_s7, 8 /* kDiv */  ;;  %21 = sdivrem.u32 (%p7_p1), %s7_s7, 8 /* kRem */",
        "%s9_s8 = spop.drf %20  ;;  %s9_s9 = spop.drf %21",
    )
    assert is_skipped(*before, instruction) is expected


@pytest.mark.parametrize("bounds_hold", [True, False])
def test_a_bound_of_floating_point_numbers_holds_or_not(bounds_hold: bool) -> None:
    compared = "%p9_p0 = scmp.le.f32.partialorder %s8_s6, 8100.0"
    assert is_skipped(compared, bounds_hold=bounds_hold) is bounds_hold
