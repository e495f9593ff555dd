#!/bin/sh
# Every check and figure that needs an NVIDIA GPU, in one go: kernels against float64, tokens against the reference,
# decode, prefill and throughput against the machine's own rooflines and against transformers. Arguments go to gpu.py.
set -eu
cd "$(dirname "$0")"
unset TRITON_INTERPRET
exec "${PYTHON:-python3}" gpu.py "$@"
