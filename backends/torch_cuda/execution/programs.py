"""What runs in a step: decode steps padded to a size of the ladder and captured, all others as they come.

A captured step is two graphs, so that what only some requests ask for can run between them: "forward" takes the
buffers' inputs to logits, "choose" takes logits and rules to tokens. Prefill and mixed steps run their own forward and
share the choosing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pagoda.backends.torch_cuda.execution.buffers import Buffers
from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch
from pagoda.backends.torch_cuda.execution.stream import DeviceStream, Run
from pagoda.backends.torch_cuda.memory.cache import CudaLayerCache
from pagoda.backends.torch_cuda.model.decoder import CudaDecoder
from pagoda.backends.torch_cuda.sampling import CudaSampler
from pagoda.common.engine.shapes import GraphSizes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepParts:
    """What every program works with."""

    decoder: CudaDecoder
    caches: Mapping[int, CudaLayerCache]
    sampler: CudaSampler
    buffers: Buffers


class StepPrograms:
    """The programs of one engine. Runs of a size that is not captured start what the graph would have held."""

    def __init__(self, parts: StepParts, ladder: GraphSizes, splits: Mapping[int, int], stream: DeviceStream) -> None:
        self.parts, self.ladder, self.splits, self._stream = parts, ladder, splits, stream
        self._pool = stream.pool()
        self._forward: dict[int, Run] = {size: self._forward_of(size) for size in ladder.sizes}
        self._choose: dict[int, Run] = {size: self._choose_of(size) for size in ladder.sizes}

    def capture(self, sizes: tuple[int, ...] | None = None) -> None:
        """Capture these sizes, by default all that the ladder wants: the largest first, the others reuse its memory."""
        begin = time.perf_counter()
        wanted = sorted(self.ladder.captured if sizes is None else sizes, reverse=True)
        self.parts.buffers.clear()  # a capture runs on what they hold
        for size in wanted:
            self._forward[size] = self._stream.capture(self._forward[size], self._pool)
            self._choose[size] = self._stream.capture(self._choose[size], self._pool)
        if wanted:
            logger.info("%d graphs captured in %.1f s", 2 * len(wanted), time.perf_counter() - begin)

    def decode(self, size: int) -> None:
        """The buffers' inputs -> logits of `size` sequences, in the buffers."""
        self._forward[size]()

    def hidden(self, batch: CudaStepBatch) -> Tensor:
        """Hidden states [T, D] of any step."""
        return self.parts.decoder.hidden(batch, self.parts.caches)

    def logits(self, hidden: Tensor) -> None:
        """Hidden [R, D] -> the first R rows of logits in the buffers."""
        self.parts.decoder.logits(hidden, self.parts.buffers.logits[: len(hidden)])

    def choose(self, size: int) -> Tensor:
        """The buffers' logits and rules -> tokens int32 [size], which the sampler remembers."""
        self._choose[size]()
        return self.parts.buffers.tokens[:size]

    def _forward_of(self, size: int) -> Run:
        parts, splits = self.parts, self.splits[size]

        def run() -> None:
            self.logits(self.hidden(parts.buffers.batch(size, parts.sampler.last, splits)))

        return run

    def _choose_of(self, size: int) -> Run:
        buffers, sampler = self.parts.buffers, self.parts.sampler
        logits, tokens, rules = buffers.logits[:size], buffers.tokens[:size], buffers.rules(size)

        def run() -> None:
            tokens.copy_(sampler.choose(logits, rules))

        return run
