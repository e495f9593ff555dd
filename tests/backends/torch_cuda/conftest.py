"""Every test here may run kernels in Triton's interpreter."""

import support.triton_interpreter  # noqa: F401
