"""What K drafts per step give on an accelerator, from bytes and FLOP alone: a roofline model of decode steps.

    python benchmarks/speculation_cost.py [--drafts 3] [--context 1024]

A step reads every weight once, and K and V of each sequence's context once; it computes 2 FLOP per weight and token,
and 4 per channel, query head and cached token. Its time is the larger of bytes over bandwidth and FLOP over peak, at
80 % of either, and a fixed time per pass (launch, sampling, host) for target and drafter each. With the acceptance rate
p per draft a step makes (1 - p^(K+1)) / (1 - p) tokens. The drafter runs once on the tokens of the step, then K - 1
times.

Llama 3.1 8B in bfloat16, with its EAGLE drafter of one layer (shared embedding and head) and with Llama 3.2 1B.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any, Final

from pagoda.common.models.drafters import DrafterSpec, LanguageDrafter, drafter_params
from pagoda.common.models.families.drafters import drafter_of, language_drafter
from pagoda.common.models.mixers import Attention
from pagoda.common.models.registry import spec_from_config
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import ModelSpec
from pagoda.kernels_pallas.chips import CHIPS

_LLAMA: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "hidden_act": "silu",
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
TARGET: Final = {
    **_LLAMA,
    **{"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
SMALL: Final = {
    **_LLAMA,
    **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    **{"head_dim": 64, "tie_word_embeddings": True},
}
BATCHES: Final = (1, 16, 64)
RATES: Final = (0.5, 0.6, 0.7, 0.8, 0.9)
SHARE: Final = 0.8
"""Of peak bandwidth and peak FLOP that kernels reach."""

PASS_SECONDS: Final = 50e-6
"""Fixed time of a pass of target or drafter."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Bytes and FLOP per second, in bfloat16."""

    name: str
    bandwidth: float
    peak: float

    def seconds(self, num_bytes: float, flops: float) -> float:
        """Return the time of one pass."""
        return max(num_bytes / self.bandwidth, flops / self.peak) / SHARE + PASS_SECONDS


ACCELERATORS: Final = (
    Accelerator("H200", 4.8e12, 9.89e14),
    Accelerator("v6e", CHIPS["v6e"].hbm_bandwidth, CHIPS["v6e"].peak_flops),
)


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass reads and computes."""

    weights: int  # parameters that every pass reads
    head: int  # of these, those of the head, which runs on fewer tokens
    cache: int  # numbers per cached token
    channels: int  # query heads times head dim, over all layers

    @classmethod
    def of(cls, spec: ModelSpec, weights: int, layers: int) -> Pass:
        """Return that of a model or drafter; `layers`: as those of `spec`."""
        (mixer,) = {layer.mixers[0] for layer in spec.layers}
        assert isinstance(mixer, Attention)
        head = spec.vocab * spec.width
        cache = 2 * mixer.kv_heads * mixer.head_dim * layers
        return cls(weights, head, cache, mixer.heads * mixer.head_dim * layers)

    def seconds(self, on: Accelerator, batch: int, tokens: int, scored: int, context: int) -> float:
        """Return the time for `tokens` of each sequence, of which the head reads `scored`."""
        num_bytes = 2 * (self.weights + self.cache * batch * context)
        flops = 2 * batch * ((self.weights - self.head) * tokens + self.head * scored)
        return on.seconds(num_bytes, flops + 4 * batch * tokens * context * self.channels)


def read_weights(spec: ModelSpec) -> int:
    """Return the parameters that a pass reads: all but the rows of the embedding that no token needs."""
    own = {name: param.size for name, param in params(spec).items()}
    return sum(own.values()) - (0 if spec.tied else own["embed"])


def drafter_pass(drafter: DrafterSpec, target: ModelSpec) -> Pass:
    if isinstance(drafter, LanguageDrafter):
        return Pass.of(drafter.model, read_weights(drafter.model), len(drafter.model.layers))
    own = sum(param.size for param in drafter_params(drafter).values())
    return Pass.of(replace(target, layers=target.layers[:1]), own + target.vocab * target.width, 1)


def expected_tokens(rate: float, drafts: int) -> float:
    """Return the tokens per step."""
    return (1 - rate ** (drafts + 1)) / (1 - rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--context", type=int, default=1024)
    args = parser.parse_args()
    spec, _ = spec_from_config(TARGET)
    eagle = drafter_of("eagle", {**TARGET, "num_hidden_layers": 1}, (), spec).drafter
    drafters = {"EAGLE, 1 layer": eagle, "Llama 3.2 1B": language_drafter(SMALL, spec.vocab).drafter}
    target, k = Pass.of(spec, read_weights(spec), len(spec.layers)), args.drafts
    header = " | ".join(f"p = {rate}" for rate in RATES)
    print(f"Speed with {k} drafts over that without; context {args.context}.\n")
    print(f"| chip | drafter | batch | step without, ms | with, ms | of it drafter, ms | {header} | pays from p |")
    print("|---" * (7 + len(RATES)) + "|")
    for on in ACCELERATORS:
        for name, drafter in drafters.items():
            own = drafter_pass(drafter, spec)
            first = 2 if isinstance(drafter, LanguageDrafter) else 1
            for batch in BATCHES:
                plain = target.seconds(on, batch, 1, 1, args.context)
                guess = own.seconds(on, batch, k + first, 1, args.context)
                guess += (k - 1) * own.seconds(on, batch, 1, 1, args.context)
                step = target.seconds(on, batch, k + 1, k + 1, args.context) + guess
                gains = " | ".join(f"{expected_tokens(rate, k) * plain / step:.2f}" for rate in RATES)
                least = next((r / 100 for r in range(1, 100) if expected_tokens(r / 100, k) * plain > step), None)
                print(
                    f"| {on.name} | {name} | {batch} | {plain * 1e3:.2f} | {step * 1e3:.2f} | {guess * 1e3:.2f} | "
                    f"{gains} | {'never' if least is None else least} |"
                )


if __name__ == "__main__":
    main()
