"""Steps for the samplers that run on a torch device, and a device whose kernels are interpreted."""

from __future__ import annotations

import numpy as np
import torch
from support.sampling_definition import VOCAB, decode_step, define, draw_logits

from pagoda.backends.torch_cuda.device import CPU, Device
from pagoda.backends.torch_cuda.sampling import CudaSampler
from pagoda.common.engine.step import RowStart


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


def follows_the_definition(device: Device, rows, seed: int, spread: float) -> None:
    """`draw_logits` for `rows` of support.sampling_definition, among padding."""
    logits = draw_logits(len(rows), seed, spread)
    sampler, want = CudaSampler(VOCAB, 8, 32, device), []
    for row, (rules, history, prompt) in enumerate(rows):
        num_prompt = min(prompt, len(history))
        sampler.start(RowStart(row, np.array(history, np.int32), num_prompt, rules))
        want.append(define(logits[row].copy(), rules, history, num_prompt))
    tokens, _ = run(sampler, logits, decode_step([len(history) for _, history, _ in rows]), 8)
    assert [t for t, w in zip(tokens.tolist(), want) if w is not None] == [w for w in want if w is not None]
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
