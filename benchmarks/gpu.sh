#!/bin/sh
# A stage of what an NVIDIA GPU has to show: gpu.sh --carry build/gpu-carry --output DIR smoke|decode|prefill|throughput|
# peers|kernels|tune. gpu/run.py says what the arguments and the exit status mean.
set -eu
unset TRITON_INTERPRET
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu/run.py" "$@"
