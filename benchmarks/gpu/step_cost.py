"""What a step costs on an H200, by arithmetic: launches, bytes and FLOP of each kernel, and the time that they bound.

usage: python -m pagoda.benchmarks.gpu.step_cost [--decode 1x131072+95x1024] [--prefill 8192] [--json]

No GPU is used. Two columns: before decodes were balanced by length and short prefill and mixed steps were captured, and
as they are. A time is the larger of bytes by copy bandwidth and FLOP by tensor core rate; of attention, at least the
longest program's bytes by the rate that one program reaches. The host's time is that of its launches, hidden or not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import numpy as np

from pagoda.backends.torch_cuda.execution.mixed_steps import MAX_TOKENS
from pagoda.backends.torch_cuda.kernels.attention.decode_attention import PROGRAMS, choose_pieces
from pagoda.backends.torch_cuda.kernels.attention.work_list import pieces_of_each, plan_work
from pagoda.backends.torch_cuda.kernels.frame.launch import CHIPS
from pagoda.benchmarks.gpu import model

CHIP = CHIPS["sm_90"]
COPY = 4.2e12
"""Bytes per second of a large copy on an H200: 88 % of NVIDIA's 4.8e12. Not measured here."""
TENSOR = 0.75e15
"""FLOP per second of a large bfloat16 product: 76 % of NVIDIA's 0.99e15. Not measured here."""
PROGRAM = 80e9
"""Bytes per second that one attention program reads alone, with three tiles of 32 KiB in flight. Not measured here."""
LAUNCH_US, BOUND_US, GRAPH_US = 18.0, 6.6, 60.0
"""Host time of a launch by Triton, of one that is bound ahead, of a graph's replay and what surrounds it. The first two
are of a norm, its Python included, on one core of an Intel Xeon (Sapphire Rapids class); bound ahead it took 11 us
before its weights were fixed, 0.6 of which are left."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """All launches of a kernel in a step."""

    name: str
    launches: int
    bytes: float
    flop: float = 0.0
    longest: float = 0.0  # bytes that one program reads, of all layers

    @property
    def ms(self) -> float:
        """Milliseconds that it takes at least."""
        return 1e3 * max(self.bytes / COPY, self.flop / TENSOR, self.longest / PROGRAM)


@dataclass(frozen=True, slots=True)
class Step:
    """Prompts' tokens and decodes of one step, and how it is computed."""

    contexts: tuple[int, ...] = ()  # tokens of each decode
    prompt: int = 0  # tokens of one prompt
    balanced: bool = True
    captured: bool = True
    config: dict = field(default_factory=lambda: model.CONFIG)

    @property
    def tokens(self) -> int:
        return len(self.contexts) + self.prompt

    def kernels(self) -> Iterator[Kernel]:
        """Yield the step's kernels, sampling left out: its own kernels read the logits a few times."""
        config, tokens = self.config, self.tokens
        layers, d, f = (config[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size"))
        heads, kv_heads, h = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        width, kv_width, rows = heads * h, kv_heads * h, len(self.contexts) + bool(self.prompt)
        yield Kernel("embedding", 1, 4 * tokens * d)
        yield Kernel("norm and residual", 2 * layers + 1, (2 * layers + 1) * 8 * tokens * d)
        for name, inputs, outputs in (
            ("qkv product", d, width + 2 * kv_width),
            ("out product", width, d),
            ("gate and up product", d, 2 * f),
            ("down product", f, d),
        ):
            yield _product(name, layers, tokens, inputs, outputs)
        yield Kernel("rope and cache", layers, layers * 2 * 2 * tokens * (width + 2 * kv_width))
        yield Kernel("activation", layers, layers * 2 * tokens * 3 * f)
        if self.contexts:
            yield from self._decode_attention(layers, heads, kv_heads, h)
        if self.prompt:
            flop = layers * 2 * width * self.prompt * (self.prompt + 1)
            yield Kernel("prefill attention", layers, layers * 2 * tokens * 2 * (width + kv_width), flop)
        yield _product("head product", 1, rows, d, config["vocab_size"])

    def _decode_attention(self, layers: int, heads: int, kv_heads: int, h: int) -> Iterator[Kernel]:
        lens, item = np.array(self.contexts, np.int32), 2 * 2 * h  # bytes of K and V of a token and KV head
        read = layers * int(lens.sum()) * kv_heads * item
        if self.balanced:
            items, merges = plan_work(lens, choose_pieces(len(lens), kv_heads, CHIP))
            lengths = np.minimum(items[:, 2], lens[items[:, 0]]) - items[:, 1]
            parts = int(merges[merges[:, 1] > 1, 1].sum())
        else:
            pieces = pieces_of_each(len(lens), kv_heads, self.config["max_position_embeddings"], CHIP, PROGRAMS)
            lengths, parts = -(-lens // pieces), len(lens) * pieces if pieces > 1 else 0
        yield Kernel("decode attention", layers, read, longest=layers * int(lengths.max()) * item)
        if parts or self.balanced:
            yield Kernel("sum of parts", layers, layers * 2 * 4 * parts * heads * h)

    def host_ms(self, kernels: list[Kernel]) -> float:
        """Return milliseconds of host time."""
        eager = self.prompt > 0 and not (self.captured and self.tokens <= MAX_TOKENS)
        launch = BOUND_US if self.captured else LAUNCH_US
        return (sum(kernel.launches for kernel in kernels) * launch if eager else 2 * GRAPH_US) / 1e3


def _product(name: str, layers: int, tokens: int, inputs: int, outputs: int) -> Kernel:
    """Return the kernel of `layers` products [tokens, inputs] by [outputs, inputs], in 16 bits."""
    read = inputs * outputs + tokens * (inputs + outputs)
    return Kernel(name, layers, layers * 2 * read, layers * 2 * tokens * inputs * outputs)


def decodes(text: str) -> tuple[int, ...]:
    """Return the tokens of each decode of e.g. `1x131072+95x1024`."""
    parts = [part.split("x") for part in text.split("+")]
    return tuple(int(tokens) for count, tokens in parts for _ in range(int(count)))


def table(name: str, before: Step, after: Step) -> list[dict]:
    """Return a row per kernel, then the sums."""
    old, new = ({kernel.name: kernel for kernel in step.kernels()} for step in (before, after))
    rows = [
        {"step": name, "kernel": kernel, "before": asdict(old[kernel]) if kernel in old else None}
        | {"after": asdict(one), "ms": [round(old[kernel].ms, 3) if kernel in old else 0.0, round(one.ms, 3)]}
        for kernel, one in new.items()
    ]
    sums = [round(sum(kernel.ms for kernel in each.values()), 3) for each in (old, new)]
    host = [round(step.host_ms(list(each.values())), 2) for step, each in ((before, old), (after, new))]
    launches = [sum(kernel.launches for kernel in each.values()) for each in (old, new)]
    return [*rows, {"step": name, "kernel": "all", "ms": sums, "launches": launches, "host_ms": host}]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ["1x1024", "64x1024", "256x1024", "1x131072+95x1024"]
    parser.add_argument("--decode", action="append", help=f"default: {', '.join(usual)}")
    parser.add_argument("--prefill", action="append", type=int, help="tokens of a prompt; default: 512, 8192")
    parser.add_argument("--json", action="store_true", help="one line per row")
    args = parser.parse_args(arguments)
    steps = [(f"decode {each}", {"contexts": decodes(each)}) for each in args.decode or usual]
    steps += [(f"prefill {each}", {"prompt": each}) for each in args.prefill or (512, 8192)]
    for name, what in steps:
        rows = table(name, Step(**what, balanced=False, captured=False), Step(**what))
        if args.json:
            print("\n".join(map(json.dumps, rows)))
            continue
        print(f"\n{name}\n{'kernel':22}{'launches':>9}{'MB':>10}{'GFLOP':>10}{'ms before':>11}{'ms after':>10}")
        for row in rows[:-1]:
            kernel, (before, after) = row["after"], row["ms"]
            sizes = f"{kernel['launches']:9}{kernel['bytes'] / 1e6:10.1f}{kernel['flop'] / 1e9:10.1f}"
            print(f"{row['kernel']:22}{sizes}{before:11.3f}{after:10.3f}")
        (before, after), host = rows[-1]["ms"], rows[-1]["host_ms"]
        print(f"{'all':22}{rows[-1]['launches'][1]:9}{'':20}{before:11.3f}{after:10.3f}")
        print(f"host: {host[0]} ms before, {host[1]} ms after")


if __name__ == "__main__":
    main()
