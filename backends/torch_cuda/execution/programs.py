"""Step programs: decode steps padded to a graph size and captured; prefill and mixed steps run eagerly.

A captured step is two graphs, so that logit edits of some requests can run between them: "forward" computes logits from
the input buffers, "sample" computes tokens from logits and sampling parameters. Prefill and mixed steps run their own
forward and share the sample graph.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pagoda.backends.torch_cuda.execution.step_input import CudaStepBatch, DecodeBuffers
from pagoda.backends.torch_cuda.execution.stream import DeviceStream, Run
from pagoda.backends.torch_cuda.memory.cache import CudaLayerCache
from pagoda.backends.torch_cuda.model.decoder import CudaDecoder
from pagoda.backends.torch_cuda.sampling import CudaSampler
from pagoda.common.engine.shapes import GraphSizes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepParts:
    """The objects that every program uses."""

    decoder: CudaDecoder
    caches: Mapping[int, CudaLayerCache]
    sampler: CudaSampler
    buffers: DecodeBuffers


class StepPrograms:
    """The programs of one engine; sizes that are not captured run eagerly."""

    def __init__(
        self, parts: StepParts, graph_sizes: GraphSizes, splits: Mapping[int, int], stream: DeviceStream
    ) -> None:
        self.parts, self.graph_sizes, self.splits, self._stream = parts, graph_sizes, splits, stream
        self._pool = stream.graph_pool()
        self._forward: dict[int, Run] = {size: self._make_forward(size) for size in graph_sizes.sizes}
        self._sample: dict[int, Run] = {size: self._make_sample(size) for size in graph_sizes.sizes}

    def capture(self, sizes: tuple[int, ...] | None = None) -> None:
        """Capture these sizes (default: all configured), largest first: the others reuse its memory."""
        begin = time.perf_counter()
        sizes_to_capture = sorted(self.graph_sizes.captured if sizes is None else sizes, reverse=True)
        self.parts.buffers.clear()  # the capture runs on them
        for size in sizes_to_capture:
            self._forward[size] = self._stream.capture(self._forward[size], self._pool)
            self._sample[size] = self._stream.capture(self._sample[size], self._pool)
        if sizes_to_capture:
            logger.info("%d graphs captured in %.1f s", 2 * len(sizes_to_capture), time.perf_counter() - begin)

    def decode(self, size: int) -> None:
        """Compute the logits of `size` sequences from the input buffers, into the buffers."""
        self._forward[size]()

    def hidden(self, batch: CudaStepBatch) -> Tensor:
        """Return the hidden states [T, D] of any step."""
        return self.parts.decoder.hidden(batch, self.parts.caches)

    def logits(self, hidden: Tensor) -> None:
        """Compute logits from hidden [R, D] into the first R rows of the buffer."""
        self.parts.decoder.logits(hidden, self.parts.buffers.logits[: len(hidden)])

    def sample(self, size: int) -> Tensor:
        """Return tokens int32 [size], sampled from the buffers' logits and parameters and recorded by the sampler."""
        self._sample[size]()
        return self.parts.buffers.tokens[:size]

    def _make_forward(self, size: int) -> Run:
        parts, splits = self.parts, self.splits[size]

        def run() -> None:
            self.logits(self.hidden(parts.buffers.batch(size, parts.sampler.last, splits)))

        return run

    def _make_sample(self, size: int) -> Run:
        buffers, sampler = self.parts.buffers, self.parts.sampler
        logits, tokens, packed = buffers.logits[:size], buffers.tokens[:size], buffers.sampling(size)

        def run() -> None:
            tokens.copy_(sampler.sample(logits, packed))

        return run
