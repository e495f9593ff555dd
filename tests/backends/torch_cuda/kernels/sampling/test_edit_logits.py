"""Edits in Triton's interpreter against their references; what the references mean, test_sampler holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagoda.backends.torch_cuda.kernels.sampling import edit_logits
from pagoda.backends.torch_cuda.kernels.sampling.edit_logits import kernel as module
from pagoda.common.engine.sampling.logit_edits import LogitEdits, allowed_bits
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.sampling.state import (
    SampledRow,
    SamplingState,
    additions,
    banned_words,
    penalties,
)
from pagoda.common.engine.steps.contract import EMBEDDED

VOCAB, ROWS, LENGTH = 90, 4, 70


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 32)


def make_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [ROWS, V] and a history with wrong tokens in positions that must not be read."""
    torch.manual_seed(0)
    history = torch.full((ROWS + 2, LENGTH), VOCAB - 1, dtype=torch.int32)
    history[:, :40] = torch.randint(0, 12, (ROWS + 2, 40))
    return torch.randn(ROWS, VOCAB) * 3, history


def place(index: int, row: int, prompt: int, known: int, **rules) -> SampledRow:
    made = SamplingRules(**rules)
    state = SamplingState(made, np.zeros(prompt, np.int32), LogitEdits.of(made, VOCAB))
    return SampledRow(index, row, known, state)


def both(edit, *arguments) -> torch.Tensor:
    """Logits after an edit by the kernel, which are those after the edit by the reference."""
    logits, history = make_inputs()
    actual, want = logits.clone(), logits.clone()
    for values, use_kernel in ((actual, True), (want, False)):
        edit(values, history, *arguments, use_kernel=use_kernel)
    torch.testing.assert_close(actual, want, rtol=1e-6, atol=1e-6)
    assert not torch.equal(want, logits)
    return want


@pytest.mark.parametrize("prompt", [0, 33, 40])
def test_penalties(prompt: int) -> None:
    places = [
        place(3, 5, prompt, 40, repetition_penalty=1.7, frequency_penalty=0.3, presence_penalty=-0.4),
        place(0, 1, 2, 3, presence_penalty=2.0),
    ]
    after = both(edit_logits.penalise, torch.from_numpy(penalties(places, 2)))
    torch.testing.assert_close(after[1:3], make_inputs()[0][1:3])
    torch.testing.assert_close(after[:, 12:], make_inputs()[0][:, 12:])


def test_an_embedding_of_the_prompt_is_no_token() -> None:
    """A row of them and two tokens is punished for the two."""
    logits, history = make_inputs()
    history[5, :38] = EMBEDDED
    history[5, 38:40] = torch.tensor([3, 8])
    after = logits.clone(), logits.clone()
    packed = torch.from_numpy(penalties([place(3, 5, 39, 40, repetition_penalty=1.7, presence_penalty=0.5)], 1))
    for values, use_kernel in zip(after, (True, False)):
        edit_logits.penalise(values, history, packed, use_kernel=use_kernel)
    torch.testing.assert_close(after[0], after[1], rtol=1e-6, atol=1e-6)
    changed = (after[1] != logits).nonzero().tolist()
    assert changed == [[3, 3], [3, 8]]


def test_additions() -> None:
    bias = ((4, 1.5), (89, -2.0))
    places = [
        place(2, 0, 5, 6, logit_bias=bias, bad_words=((7,),), min_tokens=2, stop_ids=(4, 8)),
        place(0, 1, 5, 6, logit_bias=bias),
    ]
    (packed,) = additions(places, ROWS)
    after = both(lambda logits, history, *a, **k: edit_logits.add(logits, *a, **k), torch.from_numpy(packed))
    assert torch.isneginf(after[2]).nonzero()[:, 0].tolist() == [4, 7, 8]


def test_banned_words() -> None:
    history = make_inputs()[1]
    newest = tuple(history[3, 30:40].tolist())
    words = ((*newest, 50), (*newest[-2:], 51), (newest[-1], 52), (newest[-1] + 1, 53), (*newest[:-1], 99, 54))
    (packed,) = banned_words([place(1, 3, 0, 40, bad_words=words), place(2, 3, 39, 40, bad_words=words)], ROWS)
    after = both(edit_logits.ban_words, *map(torch.from_numpy, packed))
    assert torch.isneginf(after).nonzero().tolist() == [[1, 50], [1, 51], [1, 52], [2, 52]]


def test_masks() -> None:
    bits = allowed_bits({0: (0, 31, 32, 89), 1: (63,)}, 2, VOCAB).view(np.int32)
    sequences = torch.tensor([3, 1], dtype=torch.int32)
    edit = lambda logits, history, *a, **k: edit_logits.mask(logits, *a, **k)  # noqa: E731
    after = both(edit, sequences, torch.from_numpy(bits))
    assert torch.isfinite(after[3]).nonzero()[:, 0].tolist() == [0, 31, 32, 89]
    assert torch.isfinite(after[1]).nonzero()[:, 0].tolist() == [63]
    assert torch.isfinite(after[[0, 2]]).all()
    with pytest.raises(ValueError, match="bits"):
        edit_logits.mask(after, sequences, torch.zeros((2, 2), dtype=torch.int32), use_kernel=True)
