"""GFLOP/s of the linear kernels that the reference backend chooses from.

usage: python linear.py [THREADS]     prints a Markdown table: one row per number of tokens
"""

from __future__ import annotations

import sys
import time

import torch
import torch.nn.functional as F

OUT, IN, COPIES = 3072, 576, 12  # the gate-up product of a 135M model; copies defeat the cache


def gflops(call, weights: list, tokens: int) -> float:
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for weight in weights:
            call(weight)
        best = min(best, (time.perf_counter() - begin) / len(weights))
    return 2 * tokens * OUT * IN / best / 1e9


@torch.inference_mode()
def main() -> None:
    if len(sys.argv) > 1:
        torch.set_num_threads(int(sys.argv[1]))
    print("| tokens | fp32 F.linear | fp32 prepacked | bf16 F.linear | bf16 prepacked |\n|---|---|---|---|---|")
    for tokens in (1, 2, 4, 8, 64, 512):
        cells = []
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(tokens, IN).to(dtype)
            plain = [(torch.randn(OUT, IN) * 0.02).to(dtype) for _ in range(COPIES)]
            packed = [torch.ops.mkldnn._reorder_linear_weight(w, 64) for w in plain]
            cells.append(gflops(lambda w, x=x: F.linear(x, w), plain, tokens))
            cells.append(
                gflops(lambda w, x=x: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""), packed, tokens)
            )
        print(f"| {tokens} | " + " | ".join(f"{cell:.0f}" for cell in cells) + " |")


if __name__ == "__main__":
    main()
