"""The CPU backend in plain PyTorch."""

import os

# Compute threads wait for each other hundreds of times a step. By default the OpenMP runtime spins while it waits, and
# when anything else wants a core (the server, another program) a spinning thread keeps it from the one it waits for:
# measured ten times slower beside one busy process. A short spin, then sleep, costs nothing on a quiet machine. The
# runtime reads this once, when torch is imported; see benchmarks/LOG.md.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "8000")
