"""The CPU backend in plain PyTorch."""

import os

# Compute threads synchronise hundreds of times per step. By default the OpenMP runtime spins while it waits, so when
# another process needs a core, a spinning thread takes it from the one that it waits for: measured ten times slower
# beside one busy process. A short spin, then sleep, costs nothing on an idle machine. The runtime reads this once, when
# torch is imported; see benchmarks/LOG.md.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "8000")

# Tensors of megabytes (weights, logits, activations of prompts) in huge pages, where the system allows them on request:
# a fault then maps 2 MiB, not 4 KiB, so that a step does not clear its memory page by page. torch reads this once.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
