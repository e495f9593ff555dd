#!/bin/sh
# Run one stage of the GPU benchmarks: gpu.sh --carry build/gpu-carry --output DIR smoke|decode|prefill|throughput|
# invariance|peers|kernels|mixers|experts|tune|tune_mixers|tune_experts. Arguments and exit statuses: see gpu/run.py.
set -eu
unset TRITON_INTERPRET
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu/run.py" "$@"
