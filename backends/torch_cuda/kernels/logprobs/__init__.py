"""Log-probabilities of given tokens, their ranks, and the best few."""

from pagoda.backends.torch_cuda.kernels.logprobs.api import logprobs

__all__ = ["logprobs"]
