"""Every test here may run kernels in Triton's interpreter."""

import support.kernels.triton_interpreter  # noqa: F401
