"""Step times from the FLOP and bytes of a model and the peaks of a chip.

A step is a sum of parts that run one after the other, each the larger of its FLOP over the chip's rate and its bytes
over the bandwidth of its memory, both times the share that engines reach (hardware.py): linear layers, which read every
weight once; the head, of positions that are sampled; attention of sequences with one token, and of those with several;
recurrent states; exchanges between tensor-parallel devices; gaps. Times are those of one device; all work alike.

Of a mixture's experts a step reads those that its tokens choose: of E experts with k per token and T tokens
E (1 - (1 - k/E)^T) on average, where every expert is as likely.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from pagoda.backends.simulated.hardware import EFFICIENCY, ChipSpec, Efficiency, Rate
from pagoda.backends.simulated.step_time import Int64, StepLoad, StepTimeModel
from pagoda.common.errors import ConfigError
from pagoda.common.models.drafters import DrafterSpec, LanguageDrafter, drafter_params, mixers_of
from pagoda.common.models.mixers import Mixer
from pagoda.common.models.mixers.caches import CacheSpec, FullCache, StateCache, WindowCache
from pagoda.common.models.mixers.work import MixerWork
from pagoda.common.models.primitives import Param
from pagoda.common.models.shapes import params
from pagoda.common.models.spec import Layer, ModelSpec, Moe
from pagoda.common.weights.quantization.schemes import ScaledScheme, Scheme

DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
_SHARDED_AXES: Final = frozenset("NKFV")
_TABLES: Final = frozenset({"embed", "positions", "token_types", "per_layer.table"})
"""Parameters of which a step reads a row per token."""
_STATE_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as an engine serves it."""

    spec: ModelSpec
    dtype: str = "bfloat16"
    kv_dtype_bytes: int = 2
    schemes: Mapping[str, Scheme] = field(default_factory=dict)  # Parameter -> the scheme that it is quantised with.
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        """Raise ConfigError if the devices cannot share the model."""
        for mixer in self.spec.mixers:
            if part := mixer.indivisible(self.tensor_parallel):
                raise ConfigError(
                    "--tensor-parallel-size", f"{self.tensor_parallel} does not divide the model's {part}; use another"
                )

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an element of weights and activations that are not quantised."""
        return DTYPE_BYTES[self.dtype]

    def elements_of_device(self, param: Param) -> float:
        """Return the elements of a parameter on one device."""
        if not _SHARDED_AXES & set(param.axes):
            return param.size
        heads = param.groups if "K" in param.axes and param.groups > 1 else self.tensor_parallel
        return param.size / min(self.tensor_parallel, heads)

    def bytes_of_device(self, param: Param) -> float:
        """Return the bytes of a parameter on one device."""
        scheme = self.schemes.get(param.name)
        if scheme is not None:
            return self.elements_of_device(param) * scheme.bits_per_weight / 8
        return self.elements_of_device(param) * (4 if param.float32 else self.dtype_bytes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on one device."""
        return round(sum(map(self.bytes_of_device, params(self.spec).values())))

    def block_elements(self, kind: CacheSpec, block_size: int) -> int:
        """Return the elements of a cache's block and layer on one device."""
        match kind:
            case StateCache():
                return kind.elements_of_rank(self.tensor_parallel)
            case FullCache() | WindowCache():
                return kind.block_elements(block_size) // min(self.tensor_parallel, kind.kv_heads)
            case _:
                return kind.block_elements(block_size)

    def rate_of(self, name: str) -> Rate:
        """Return the type in which a parameter is multiplied: 8 bits where activations are rounded to them, too."""
        scheme = self.schemes.get(name)
        if scheme is not None and scheme.activations is not None:
            return "int8" if scheme.activations.numbers == "int8" else "float8"
        if isinstance(scheme, ScaledScheme) and scheme.numbers in ("int4", "e2m1"):
            return "bfloat16"
        return "float32" if self.dtype == "float32" else "bfloat16"


@dataclass(frozen=True, slots=True)
class ExpertSeconds:
    """The experts of all mixtures with as many experts, of which a token chooses as many."""

    experts: int
    chosen: float  # Mean number of experts that a token runs through.
    token: float = 0.0  # Seconds for the products of a token with all its experts.
    all: float = 0.0  # Seconds to read every expert.

    def reading(self, tokens: int) -> float:
        """Return the time to read the experts that `tokens` tokens choose."""
        return self.all * (1.0 - (1.0 - self.chosen / self.experts) ** tokens)


@dataclass(frozen=True, slots=True)
class AttentionSeconds:
    """The attention of all layers whose queries see equally many tokens."""

    span: int | None  # Number of tokens that a query attends to; None: all.
    read: float = 0.0  # Seconds to read the cache, per attended token and sequence.
    pair: float = 0.0  # Seconds for the products of sequences with one token, per pair.
    prefill_pair: float = 0.0  # Seconds for the products of sequences with several tokens, per pair.
    scan_read: float = 0.0  # Seconds to scan a token of the context.
    scan_pair: float = 0.0

    def decode(self, context: Int64) -> float:
        """Return the time of sequences with one token. `context` [S]: tokens after the step."""
        total = float(context.sum())
        seen = total if self.span is None else float(np.minimum(context, self.span).sum())
        return self.decode_seconds(seen, total)

    def decode_seconds(self, seen: float, total: float) -> float:
        """Return the time of sequences with one token.

        `seen`: tokens that they attend to, summed over sequences; `total`: tokens in their contexts.
        """
        return max(seen * self.read, seen * self.pair) + max(total * self.scan_read, total * self.scan_pair)

    def prefill(self, query: Int64, context: Int64) -> float:
        """Return the time of sequences with several tokens: [S] each."""
        before = context - query
        pairs = query * before + query * (query + 1) // 2
        total = float(context.sum())
        all_pairs = float(pairs.sum())
        seen = total
        seen_pairs = all_pairs
        if self.span is not None:
            # Queries below the span see all before them, the others see `span` tokens.
            short = np.clip(self.span - before, 0, query)
            seen_pairs = float((short * before + short * (short + 1) // 2 + (query - short) * self.span).sum())
            seen = float(np.minimum(context, query + self.span).sum())
        return self.prefill_seconds(seen, seen_pairs, total, all_pairs)

    def prefill_seconds(self, seen: float, seen_pairs: float, total: float, all_pairs: float) -> float:
        """Return the time of sequences with several tokens.

        `seen`, `total`: as of `decode_seconds`; `seen_pairs`, `all_pairs`: pairs of a query with each of these tokens.
        """
        attended = max(seen * self.read, seen_pairs * self.prefill_pair)
        return attended + max(total * self.scan_read, all_pairs * self.scan_pair)


@dataclass(frozen=True, slots=True)
class RooflineModel:
    """A StepTimeModel by the roofline of one device. All times in seconds; see `hardware_model`."""

    token: float  # Seconds for the products of a token with the weights of all layers but experts.
    weights: float  # Seconds to read these weights.
    experts: tuple[ExpertSeconds, ...]
    sampled: float  # Seconds for the products of a position with the head, and for its logits.
    head: float  # Seconds to read the head.
    attention: tuple[AttentionSeconds, ...]
    state: float  # Seconds to read and write the recurrent state of a sequence.
    recurrence: float  # Seconds of the recurrence, per token.
    exchanged: float  # Seconds of exchanges between tensor-parallel devices, per token.
    exchanged_row: float  # Seconds of these exchanges, per sampled position.
    fixed: float  # Seconds of the gaps, and of the latency of exchanges.
    drafter: StepTimeModel | None = None  # None: the host guesses the drafts, or guessing takes no time.

    def seconds(self, load: StepLoad) -> float:
        """Return the time of a step."""
        total = self._linear_seconds(load.num_tokens, len(load.query_lens), load.num_sampled)
        total += self.attention_seconds(load)
        if load.num_drafts:  # They read the states once more, and accepted ones run again in the next step.
            total += len(load.query_lens) * self.state / 2 + load.num_drafts * self.recurrence
        if load.num_guesses and self.drafter is not None:
            total += self._guessing(self.drafter, load)
        return total

    @property
    def adds_contexts(self) -> bool:
        """Whether the time depends on the sum of the contexts alone: no query sees a part of its context only."""
        return all(attention.span is None for attention in self.attention)

    def batch_seconds(self, decodes: int, context: int, chunks: Sequence[tuple[int, int]], sampled: int) -> float:
        """Return what `seconds` does, without arrays. Only if `adds_contexts`.

        `context`: tokens of the `decodes` sequences with one token, together, after the step. `chunks`: (tokens,
        context after the step) of the others.
        """
        tokens = decodes
        several = 0
        seen = 0
        pairs = 0
        for query, after in chunks:
            tokens += query
            if query == 1:
                context += after
            else:
                several += 1
                seen += after
                pairs += query * (after - query) + query * (query + 1) // 2
        total = self._linear_seconds(tokens, decodes + len(chunks), sampled)
        for attention in self.attention:
            total += attention.decode_seconds(context, context)
            if several:
                total += attention.prefill_seconds(seen, pairs, seen, pairs)
        return total

    def _linear_seconds(self, tokens: int, seqs: int, sampled: int) -> float:
        """Return the time of a step without attention."""
        products = tokens * self.token
        reading = self.weights
        for experts in self.experts:
            products += tokens * experts.token
            reading += experts.reading(tokens)
        total = self.fixed + max(products, reading) + self._sampling(sampled)
        return total + self.exchange_seconds(tokens, sampled) + seqs * self.state + tokens * self.recurrence

    def attention_seconds(self, load: StepLoad) -> float:
        """Return the time of attention in all layers."""
        query = load.query_lens
        context = load.context_lens
        if load.num_tokens == len(query):
            return sum(attention.decode(context) for attention in self.attention)
        several = query > 1
        one = context[~several]
        query = query[several]
        context = context[several]
        return sum(attention.decode(one) + attention.prefill(query, context) for attention in self.attention)

    def exchange_seconds(self, tokens: int, sampled: int) -> float:
        """Return the time to move activations and logits between devices, without latency."""
        return tokens * self.exchanged + sampled * self.exchanged_row

    def _sampling(self, positions: int) -> float:
        return max(positions * self.sampled, self.head) if positions else 0.0

    def _guessing(self, drafter: StepTimeModel, load: StepLoad) -> float:
        """Return the time of a drafter that runs on the tokens of the step, then once per further guess."""
        passes = -(-load.num_guesses // max(1, len(load.query_lens)))
        first = replace(load, num_guesses=0, num_sampled=len(load.query_lens))
        ones = replace(first, query_lens=np.ones_like(load.query_lens))
        return drafter.seconds(first) + (passes - 1) * drafter.seconds(ones)


def hardware_model(
    served: ServedModel, chip: ChipSpec, efficiency: Efficiency | None = None, drafter: DrafterSpec | None = None
) -> RooflineModel:
    """Return the step times of a model on `served.tensor_parallel` devices of a chip.

    `efficiency`: the shares of its peaks that are reached; None: those of its kind. `drafter`: makes the guesses of a
    step. Raise ConfigError for more devices than have fast links.
    """
    if served.tensor_parallel > chip.largest:
        raise ConfigError(
            "--tensor-parallel-size", f"{served.tensor_parallel}: at most {chip.largest} of {chip.name} share a model"
        )
    reached = efficiency or EFFICIENCY[chip.kind]
    linear = _Linear.of(served, chip, reached)
    width = served.dtype_bytes
    spec = served.spec
    layers = len(spec.layers)
    exchanges = _Exchanges(served.tensor_parallel, chip, reached)
    reductions = 1 + sum(_reductions(layer) for layer in spec.layers)  # The embedding has one reduction.
    state = 2 * _STATE_BYTES * sum(_state_elements(served)) / (chip.bandwidth * reached.weights)
    recurrence = sum(mixer.work().token_flops for mixer in spec.mixers) / served.tensor_parallel
    # Logits are float32; they are written and read.
    logits = 8 * spec.vocab / served.tensor_parallel / (chip.bandwidth * reached.weights)
    return RooflineModel(
        token=linear.token,
        weights=linear.weights,
        experts=linear.experts,
        sampled=linear.sampled + logits,
        head=linear.head,
        attention=_attention(spec.mixers, served, chip, reached),
        state=state,
        recurrence=recurrence / (chip.peak("float32") * reached.products),
        exchanged=reductions * exchanges.seconds(2 * spec.width * width),
        exchanged_row=exchanges.seconds(4 * spec.vocab),
        fixed=reached.step_seconds + layers * reached.layer_seconds + (reductions + 0.5) * exchanges.latency,
        drafter=None if drafter is None else _drafter_model(drafter, served, chip, reached),
    )


def _drafter_model(drafter: DrafterSpec, served: ServedModel, chip: ChipSpec, reached: Efficiency) -> RooflineModel:
    """Return the step times of a drafter on the same devices, with the target's head unless it is a whole model."""
    if isinstance(drafter, LanguageDrafter):
        model = hardware_model(replace(served, spec=drafter.model, schemes={}), chip, reached)
        return replace(model, fixed=model.fixed - reached.step_seconds)
    head = _Linear.of(served, chip, reached)
    elements = sum(served.elements_of_device(param) for param in drafter_params(drafter).values())
    mixers = mixers_of(drafter)
    exchanges = _Exchanges(served.tensor_parallel, chip, reached)
    return RooflineModel(
        token=2 * elements / (chip.peak("bfloat16") * reached.products),
        weights=elements * served.dtype_bytes / (chip.bandwidth * reached.weights),
        experts=(),
        sampled=head.sampled,
        head=head.head,
        attention=_attention(mixers, served, chip, reached),
        state=0.0,
        recurrence=0.0,
        exchanged=2 * len(mixers) * exchanges.seconds(2 * served.spec.width * served.dtype_bytes),
        exchanged_row=exchanges.seconds(4 * served.spec.vocab),
        fixed=len(mixers) * (reached.layer_seconds + 2 * exchanges.latency),
    )


@dataclass(frozen=True, slots=True)
class _Exchanges:
    """Collectives among tensor-parallel devices. An all-reduce is a reduce-scatter and an all-gather."""

    devices: int
    chip: ChipSpec
    reached: Efficiency

    def seconds(self, gathered: int) -> float:
        """Return the time to gather that many bytes on every device, or to reduce and scatter them."""
        sent = gathered * (self.devices - 1) / self.devices
        return sent / (self.chip.link * self.reached.links)

    @property
    def latency(self) -> float:
        """Seconds of an all-reduce of no bytes."""
        hops = self.devices - 1 if self.reached.ring else min(1, self.devices - 1)
        return 2 * hops * self.reached.hop_seconds


def _reductions(layer: Layer) -> int:
    """Return the all-reduces of a layer: one after its mixers, one after each ffn; or one for both, side by side."""
    parts = bool(layer.mixers) + (layer.ffn is not None)
    part_reductions = min(parts, 1) if layer.parallel else parts
    beside = (layer.block is not None) + (layer.shortcut is not None)
    return part_reductions + beside + (0 if layer.second is None else 3)


def _state_elements(served: ServedModel) -> Iterator[int]:
    for cache in served.spec.caches:
        if isinstance(cache, StateCache):
            yield served.block_elements(cache, 1)


def _attention(
    mixers: Iterable[Mixer], served: ServedModel, chip: ChipSpec, reached: Efficiency
) -> tuple[AttentionSeconds, ...]:
    """Return the attention of all layers, those with equal spans together."""
    groups: dict[int | None, AttentionSeconds] = {}
    bandwidth = chip.bandwidth * reached.attention_memory
    ranks = served.tensor_parallel
    peak = chip.peak("bfloat16") * reached.attention_products
    for mixer in mixers:
        work: MixerWork = mixer.work()
        if not work.read_elements:
            continue
        read = work.read_elements / min(ranks, work.kv_heads) * served.kv_dtype_bytes
        before = groups.get(work.span, AttentionSeconds(work.span))
        groups[work.span] = AttentionSeconds(
            span=work.span,
            read=before.read + read / bandwidth,
            pair=before.pair + work.pair_flops / ranks / peak,
            prefill_pair=before.prefill_pair + work.prefill_pair_flops / ranks / peak,
            scan_read=before.scan_read + work.scan_elements * served.kv_dtype_bytes / bandwidth,
            scan_pair=before.scan_pair + work.scan_flops / peak,
        )
    return tuple(groups.values())


@dataclass(slots=True)
class _Linear:
    """Seconds of linear layers, summed over the parameters."""

    token: float = 0.0
    weights: float = 0.0
    sampled: float = 0.0
    head: float = 0.0
    mixtures: dict[tuple[int, float], ExpertSeconds] = field(default_factory=dict)

    @property
    def experts(self) -> tuple[ExpertSeconds, ...]:
        return tuple(self.mixtures.values())

    @classmethod
    def of(cls, served: ServedModel, chip: ChipSpec, reached: Efficiency) -> _Linear:
        """Return the sums of a model on a chip."""
        sums = cls()
        spec = served.spec
        uses = Counter(layer.block.weights_of for layer in spec.layers if layer.block is not None)
        bandwidth = chip.bandwidth * reached.weights
        for name, param in params(spec).items():
            times = uses[_layer_of(name)] if _is_shared(name, spec) else 1
            matrix = len(param.shape) > 1
            products = times * 2 * served.elements_of_device(param) * matrix
            products /= chip.peak(served.rate_of(name)) * reached.products
            reading = times * served.bytes_of_device(param) / bandwidth
            if name in ("head", "head_bias") or (name == "embed" and spec.tied and spec.pooler is None):
                sums.sampled = sums.sampled + products
                sums.head = sums.head + reading
            elif ".experts." in name:
                sums._add_expert(_mixture_of(name, spec), products, reading)
            elif name not in _TABLES:
                sums.token = sums.token + products
                sums.weights = sums.weights + reading
        return sums

    def _add_expert(self, moe: Moe, products: float, reading: float) -> None:
        chosen = moe.computed
        key = moe.experts, chosen
        before = self.mixtures.get(key, ExpertSeconds(experts=moe.experts, chosen=chosen))
        share = chosen / moe.experts
        self.mixtures[key] = replace(before, token=before.token + products * share, all=before.all + reading)


def _layer_of(name: str) -> int:
    return int(name.split(".")[1])


def _is_shared(name: str, spec: ModelSpec) -> bool:
    """Whether a parameter is one of an input block, which several layers may use."""
    if not spec.block_owners or not name.startswith("layers."):
        return False
    number = _layer_of(name)
    part = name.split(".", 2)[2]
    return number in spec.block_owners and part.startswith(("block.", "mixers.0."))


def _mixture_of(name: str, spec: ModelSpec) -> Moe:
    """Return the mixture that an expert's parameter belongs to."""
    layer = spec.layers[_layer_of(name)]
    part = name.split(".", 2)[2]
    ffn = next(ffn for prefix, ffn in layer.ffns.items() if part.startswith(f"{prefix}."))
    assert isinstance(ffn, Moe), "experts belong to a mixture"
    return ffn
