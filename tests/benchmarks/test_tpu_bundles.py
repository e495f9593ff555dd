"""The cycle counter on a hand-written listing: a loop over an operand, a branch around its body, a DMA."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from tpu_bundles import Listing

OPERAND = "inlined_call_operand.vmem [shape: s32[2], index: 1, kind: input] /* operand 1 */"
WINDOW = "inlined_call_operand.vmem [shape: bf16[4,8], index: 2, kind: input] /* window */"
EMPTY = "  0x1   :  {}"
LISTING = f"""
LH: loop header
     0   :  {{ %s1_s0 = inlined_call_operand.<no> [shape: s32[], index: 0, kind: input]  ;;  %s2_s1 = {OPERAND} }}
  0x1   :  {{ %s3_s2 = sshll.u32 %s2_s1, 4  ;;  %s9_s9 = {WINDOW} }}
  0x2   :  {{ %s4_s3 = smov.u32 [#allocation5] }}
  0x3   :  {{ %5 = dma.vmem_to_smem /*vmem=*/%s3_s2, /*size_in_granules=*/16, /*smem=*/%s4_s3, /*flag=*/[#a] }}
  0x4   :  {{ %s6_s4 = smov.u32 0 }} /* Start region 1 */
  0x5 LB: > {{ %s7_s5 = sld [smem:[#allocation5 + %s8_s4]]  ;;  %s8_s4 = sphi %s6_s4, %s10_s4 }} /* Start region 2 */
  0x6   : > {{ %p1_p0 = scmp.le.s32.totalorder %s7_s5, 3 }}
  0x7   : > {{ %11 = sbr.rel (%p1_p0) target = $region4 }}
{EMPTY}
{EMPTY}
{EMPTY}
{EMPTY}
  0xc   : > {{ %12 = dma.hbm_to_vmem /*hbm=*/%s4_s3, /*size_in_granules=*/%s7_s5, /*vmem=*/%s4_s3 }} /* End region 3 */
  0xd   : > {{ %s10_s4 = sadd.s32 1, %s8_s4 }} /* Start/End empty region 4 */
  0xe   : > {{ %p2_p1 = scmp.lt.s32.totalorder %s10_s4, %s1_s0 }}
  0xf   : > {{ %13 = sbr.rel (%p2_p1) target = $region2 }}
{EMPTY}
{EMPTY}
{EMPTY}
{EMPTY}
  0x14 PF:  {{ %14 = vst [vmem:[%s4_s3] sm:$0xff] 0.0 }}
"""


@pytest.fixture
def listing(tmp_path: Path) -> Listing:
    bundles = [line for line in LISTING.splitlines() if "{" in line]
    (tmp_path / "1-attend-03-final_bundles.txt").write_text(LISTING)
    table = "== CAPACITY:\n1 1\n== UTILIZATION:\n" + "\n".join(" ".join(["1"] + ["0"] * 10) for _ in bundles)
    (tmp_path / "1-attend-01-final_hlo-static-per-bundle-utilization.txt").write_text(table)
    return Listing(tmp_path, "attend")


@pytest.mark.parametrize(("values", "taken"), [([1, 2], 0), ([1, 9], 1), ([7, 9], 2)])
def test_bundles_are_counted_as_the_operands_branch(listing: Listing, values: list[int], taken: int) -> None:
    trace = listing.run([np.array([2], np.int32), np.array(values, np.int32)])
    assert trace.cycles == 5 + 2 * 14 + taken + 1  # every branch has four delay slots
    assert trace.use(listing, "MATMUL") == trace.cycles
    assert trace.moved["hbm_to_vmem"] == 32 * sum(x for x in values if x > 3)
    assert listing.in_vmem == {1: 8, 2: 64}


def test_a_dump_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="xla_jf_dump_llo_text"):
        Listing(tmp_path, "attend")
