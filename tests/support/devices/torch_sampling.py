"""Steps for the samplers that run on a torch device, and a device whose kernels are interpreted."""

from __future__ import annotations

import support.kernels.triton_interpreter  # noqa: F401
import torch

from pagoda.backends.torch_cuda.device import CPU, Device


class _Interpreted(Device):
    """A CPU that runs the kernels themselves, in Triton's interpreter."""

    __slots__ = ()

    @property
    def use_kernels(self) -> bool:
        return True


INTERPRETED = _Interpreted(CPU.torch, CPU.chip, "interpreted")


class Now:
    """A stream whose copies are over when they have begun."""

    def fetch(self, tensor):
        return _HostArray(tensor.clone())


class _HostArray:
    def __init__(self, tensor):
        self._tensor = tensor

    def array(self):
        return self._tensor.numpy()


def run(sampler, logits, plan, room=None, masks=None):
    """A step through the sampler as a backend runs it: tokens int32 [S], logprobs. Padding is full of NaN."""
    seqs = room or plan.num_seqs
    padded = torch.full((seqs, logits.shape[1]), torch.nan)
    padded[: plan.num_seqs] = torch.from_numpy(logits)
    packed = torch.from_numpy(sampler.pack(plan, seqs))
    shown = sampler.edit(padded, plan, masks)
    record = sampler.recorder(plan, packed)
    tokens = sampler.sample(padded, packed)
    record(tokens)
    found = sampler.logprobs(shown, tokens, plan, Now())
    return tokens[: plan.num_seqs].numpy(), found()
