"""Prefill and mixed steps as graphs: which are captured, and that a replay reads nothing but its buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engines.reference_driver import Driver, tiny_spec

from pagoda.backends.torch_cuda.device import CPU
from pagoda.backends.torch_cuda.execution.mixed_steps import MAX_PROMPTS, MixedBuffers, MixedShapes, mixed_sizes
from pagoda.backends.torch_cuda.model.decoder import CudaDecoder
from pagoda.common.config.groups.compilation import CompilationConfig
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.steps.contract import PREVIOUS

SPEC = tiny_spec(window=6)
PROMPTS = {0: [5, 17, 3, 80, 41, 2, 9, 60], 1: [33, 21, 7, 8, 90] * 4, 2: [44, 3], 3: [61]}
GARBAGE = 2**30
NONE = CompilationConfig(compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"})


def driver(**make: Any) -> Driver:
    return Driver(SPEC, "scattered", backend="torch_cuda", device=CPU, **make)


def answers(d: Driver, rules: SamplingRules | None = None) -> list[tuple[int, int]]:
    """(row, token) of steps in which prompts join rows that decode, and one prompt comes in two chunks."""
    tokens = []

    def step(pieces: dict[int, list[int]], starts: tuple[int, ...] = (), unsampled: tuple[int, ...] = ()) -> None:
        begun = [d.start(row, PROMPTS[row], rules) for row in starts]
        rows, result = d.step(pieces, begun, dict.fromkeys(unsampled, False))
        sampled = [row for row in rows if row not in unsampled]
        tokens.extend(zip(sampled, result.token_ids.tolist()))

    step({0: PROMPTS[0]}, (0,))
    step({0: [PREVIOUS], 1: PROMPTS[1][:7], 2: PROMPTS[2]}, (1, 2), (1,))
    step({0: [PREVIOUS], 1: PROMPTS[1][7:], 2: [PREVIOUS], 3: PROMPTS[3]}, (3,))
    step({row: [PREVIOUS] for row in PROMPTS})
    return tokens


class Calls:
    """The graphs that steps replay, and the forward passes outside of them."""

    def __init__(self, d: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.replayed: list[int] = []
        self.eager, self._inside = 0, False
        programs, hidden = d.backend._runner.programs, CudaDecoder.hidden

        def replaying(size: int, run: Any) -> Any:
            def replay() -> None:
                self.replayed.append(size)
                self._inside = True
                run()
                self._inside = False

            return replay

        def count(decoder: CudaDecoder, *args: Any) -> torch.Tensor:
            self.eager += not self._inside
            return hidden(decoder, *args)

        programs._hidden = {size: replaying(size, run) for size, run in programs._hidden.items()}
        monkeypatch.setattr(CudaDecoder, "hidden", count)


def test_a_captured_step_is_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = SamplingRules(temperature=0.8, top_k=30, seed=7)
    want = answers(driver(compilation=NONE), rules)
    d = driver()
    d.backend.warmup()
    calls = Calls(d, monkeypatch)
    assert answers(d, rules) == want
    assert calls.replayed == [16, 16, 16], "8, 10 and 16 tokens"
    assert calls.eager == 1, "the last step decodes"


def test_a_replay_depends_on_its_buffers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    want, d = answers(driver(compilation=NONE)), driver()
    d.backend.warmup()
    fill = MixedBuffers.fill

    def poisoned(self: MixedBuffers, shape: Any, sent: torch.Tensor, seqs: int) -> None:
        self._prefix[:] = GARBAGE
        self._decode._tables[:] = GARBAGE
        fill(self, shape, sent, seqs)
        sent[shape.sections["sampling"].end : shape.sections["logits_indices"].begin] = GARBAGE

    monkeypatch.setattr(MixedBuffers, "fill", poisoned)
    assert answers(d) == want


def test_what_has_no_graph_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with logprobs, whose hidden states are all read."""
    d, want = driver(), answers(driver(compilation=NONE), SamplingRules(prompt_logprobs=1))
    calls = Calls(d, monkeypatch)
    assert answers(d, SamplingRules(prompt_logprobs=1)) == want
    assert not calls.replayed


@pytest.mark.setting("--compilation-config")
@pytest.mark.parametrize(
    ("settings", "captured"),
    [
        ({}, True),
        ({"enforce_eager": True}, False),
        ({"compilation_config": {"cudagraph_mode": "FULL"}}, True),
        ({"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, False),
        ({"compilation_config": {"cudagraph_mode": "NONE"}}, False),
    ],
)
def test_flags_choose_whether_mixed_steps_are_captured(settings: dict, captured: bool) -> None:
    d = driver(compilation=CompilationConfig(**settings))
    assert (d.backend.config.mixed_shapes is not None) == captured
    before = d.backend._stream.captures
    d.backend.warmup()
    decode = 2 * len(d.backend.config.graph_sizes.captured)
    assert d.backend._stream.captures - before == decode + (len(mixed_sizes(256)) if captured else 0)


def test_drafts_and_batch_invariance_run_eagerly() -> None:
    assert driver(max_drafts=2).backend.config.mixed_shapes is None
    assert driver(batch_invariant=True).backend.config.mixed_shapes is None


def test_sizes() -> None:
    assert mixed_sizes(8192) == (16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
    assert mixed_sizes(200) == (16, 32, 64, 128, 192, 208)
    assert mixed_sizes(3) == (16,)
    shapes = MixedShapes(mixed_sizes(200), tile=32, max_seqs=40)
    assert [shapes.size_for(tokens, 1, 1) for tokens in (1, 16, 17, 200, 208, 209)] == [16, 16, 32, 208, 208, None]
    assert shapes.size_for(64, 2 + MAX_PROMPTS, 40) == 64
    assert shapes.size_for(64, 3 + MAX_PROMPTS, 1) is None
    assert shapes.size_for(16, 1, 24) is None, "sizes of decodes may be far apart: more rows of logits than tokens"
    assert [shapes.seqs(size) for size in (16, 64)] == [16, 40]


def test_the_largest_is_captured_first() -> None:
    order: list[int] = []
    backend = driver().backend
    programs = backend._runner.programs
    programs._hidden = {size: lambda size=size: order.append(size) for size in programs._hidden}
    with backend._stream.running():
        programs.capture_mixed()
    assert order == sorted(order, reverse=True)
    assert len(order) == len(mixed_sizes(256))
