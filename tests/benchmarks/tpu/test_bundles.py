"""The cycle counter on hand-written listings: a loop over an operand, a branch, a DMA, popped values."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "tpu"))

from bundles import Listing

OPERAND = "inlined_call_operand.vmem [shape: s32[2], index: 1, kind: input] /* operand 1 */"
WINDOW = "inlined_call_operand.vmem [shape: bf16[4,8], index: 2, kind: input] /* window */"
UNREAD = "inlined_call_operand.hbm [shape: s32[8], index: 3, kind: input] /* dead: its register is taken */"
EMPTY = "  0x1   :  {}"
LISTING = f"""
LH: loop header
     0   :  {{ %s1_s0 = inlined_call_operand.<no> [shape: s32[], index: 0, kind: input]  ;;  %s2_s1 = {OPERAND} }}
  0x1   :  {{ %s3_s2 = sshll.u32 %s2_s1, 4  ;;  %s9_s9 = {WINDOW} }}
  0x2   :  {{ %s4_s3 = smov.u32 [#allocation5]  ;;  %s20_s3 = {UNREAD} }}
  0x3   :  {{ %5 = dma.vmem_to_smem /*vmem=*/%s3_s2, /*size_in_granules=*/16, /*smem=*/%s4_s3, /*flag=*/[#a] }}
  0x4   :  {{ %s6_s4 = smov.u32 0 }} /* Start region 1 */
  0x5 LB: > {{ %s7_s5 = sld [smem:[#allocation5 + %s8_s4]]  ;;  %s8_s4 = sphi %s6_s4, %s10_s4 }} /* Start region 2 */
  0x6   : > {{ %p1_p0 = scmp.le.s32.totalorder %s7_s5, 3 }}
  0x7   : > {{ %11 = sbr.rel (%p1_p0) target = $region4 }}
{EMPTY}
{EMPTY}
{EMPTY}
{EMPTY}
  0xc   : > {{ %12 = dma.hbm_to_vmem /*hbm=*/%s4_s3, /*size_in_granules=*/%s7_s5, /*vmem=*/%s4_s3 /*
base_bounds: (4)
strides: (1) */ }} /* End region 3 */
  0xd   : > {{ %s10_s4 = sadd.s32 1, %s8_s4 }} /* Start/End empty region 4 */
  0xe   : > {{ %p2_p1 = scmp.lt.s32.totalorder %s10_s4, %s1_s0 }}
  0xf   : > {{ %13 = sbr.rel (%p2_p1) target = $region2 }}
{EMPTY}
{EMPTY}
{EMPTY}
{EMPTY}
  0x14 PF:  {{ %14 = vst [vmem:[%s4_s3] sm:$0xff] 0.0 }}
"""
SEARCH = f"""
     0   :  {{ %s1_s0 = inlined_call_operand.<no memory space> [shape: s32[1], index: 0, kind: input] }}
  0x1   :  {{ %2 = vpush %v1_v0  ;;  %s3_s1 = spop %2 }}
  0x2   :  {{ %p4_p0 = scmp.gt.f32.partialorder %s3_s1, 0.5 }}
  0x3   :  {{ %5 = sbr.rel (!%p4_p0) target = $region9 }}
{EMPTY}
{EMPTY}
{EMPTY}
{EMPTY}
  0x8 LB: > {{ %s6_s2 = spop %2  ;;  %s8_s3 = spop.sfrf %7 }} /* Start region 5 */
  0x9   : > {{ %p7_p1 = scmp.gt.f32.partialorder %s6_s2, -0.5  ;;  %s9_s0 = sadd.s32 4294967295, %s1_s0 }}
  0xa   : > {{ %p8_p2 = scmp.gt.s32.totalorder %s9_s0, 0 }}
  0xb   : > {{ %p9_p3 = pnand %p7_p1, %p8_p2 }}
  0xc   : > {{ %13 = sbr.rel (!%p9_p3) target = $region5 }}
{EMPTY}
{EMPTY}
{EMPTY}
{EMPTY}
  0x11   :  {{ %s10_s4 = smulhi.u32 2863311531, %s9_s0 }} /* Start region 9 */
"""


@pytest.fixture
def listing(tmp_path: Path) -> Listing:
    return dumped(tmp_path, LISTING)


def dumped(dump: Path, text: str) -> Listing:
    bundles = [line for line in text.splitlines() if "{" in line]
    (dump / "1-attend-03-final_bundles.txt").write_text(text)
    units = "MXU, VLOAD, VLOAD:FILL"
    table = f"== CAPACITY:\n{units}\n 2 3 3\n== UTILIZATION:\n" + "\n".join("1 0 2" for _ in bundles)
    (dump / "1-attend-01-final_hlo-static-per-bundle-utilization.txt").write_text(table)
    return Listing(dump, "attend")


@pytest.mark.parametrize(("values", "taken"), [([1, 2], 0), ([1, 9], 1), ([7, 9], 2)])
def test_bundles_are_counted_as_the_operands_branch(listing: Listing, values: list[int], taken: int) -> None:
    trace = listing.run([np.array([2], np.int32), np.array(values, np.int32)])
    assert trace.cycles == 5 + 2 * 14 + taken + 1  # every branch has four delay slots
    assert trace.use(listing, "MXU") == trace.cycles
    assert trace.use(listing, "FILL") == 2 * trace.cycles
    assert trace.moved["hbm_to_vmem"] == 32 * sum(x for x in values if x > 3)
    assert listing.in_vmem == {1: 8, 2: 64}


@pytest.mark.parametrize(("comment", "direction"), [("hbm-to-hbm", "general"), ("window", "vmem_strided_hbm")])
def test_blocks_whose_parts_lie_apart_are_counted(tmp_path: Path, comment: str, direction: str) -> None:
    text = LISTING.replace("dma.hbm_to_vmem", "dma.general").replace("base_bounds: (4)", comment)
    assert dict(dumped(tmp_path, text).run([np.array([1], np.int32), np.array([7], np.int32)]).moved) == {
        "vmem_to_smem": 32 * 16,
        direction: 32 * 7,
    }


@pytest.mark.parametrize(
    ("most", "popped", "turns"),
    [(9, [0.25], 0), (9, [1, -1], 1), (9, [1, 0, -0.25, -1], 3), (2, [1, 0, 0], 2), (9, None, 0)],
)
def test_popped_values_determine_the_passes(tmp_path: Path, most: int, popped: list[float] | None, turns: int) -> None:
    values = None if popped is None else np.array(popped, np.float32)
    assert dumped(tmp_path, SEARCH).run([np.array([most], np.int32)], values).cycles == 8 + 9 * turns + 1


@pytest.mark.parametrize(("popped", "says"), [([1.0], "pops more values"), ([1.0, -1.0, 0.0], "left 1")])
def test_popped_values_that_do_not_fit_are_an_error(tmp_path: Path, popped: list[float], says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        dumped(tmp_path, SEARCH).run([np.array([9], np.int32)], np.array(popped, np.float32))


def test_a_missing_dump_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="xla_jf_dump_llo_text"):
        Listing(tmp_path, "attend")


def test_an_unparsable_bundle_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="20 of 21 bundles"):
        dumped(tmp_path, LISTING.replace("0x14 PF:", "0x14 XX:"))
