"""Encoder-decoder models that transformers computes over our paged KV cache, against the same models by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from models.cases import tiny
from support.engines.backend_options import make_options

from pagoda.backends.fallback.describe import describe
from pagoda.backends.reference.memory import plan_memory
from pagoda.backends.reference.model.numerics import numerics
from pagoda.backends.registry import load_backend
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, generation_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.models.transformers_spec import TransformersSpec
from pagoda.common.weights.checkpoint import open_checkpoint

TOLERANCE = 3e-5
START, EOS = 3, 2
T5: dict[str, Any] = {
    **{"vocab_size": tiny.VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    **{"num_decoder_layers": 3, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    **{"decoder_start_token_id": START, "eos_token_id": EOS, "n_positions": 64, "feed_forward_proj": "gated-gelu"},
}
BART: dict[str, Any] = {
    **{"vocab_size": tiny.VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"max_position_embeddings": 64, "decoder_start_token_id": START, "forced_eos_token_id": None},
    **{"eos_token_id": EOS, "pad_token_id": 1},
}
CASES = [
    tiny.Tiny("one relative bias for all layers", "T5ForConditionalGeneration", base=T5),
    tiny.Tiny("a relative bias in each layer", "UMT5ForConditionalGeneration", base=T5),
    tiny.Tiny("learned positions", "BartForConditionalGeneration", base=BART),
    tiny.Tiny("sinusoidal positions", "MarianMTModel", base=BART | {"pad_token_id": START}),
]
MORE = [
    tiny.Tiny("MT5ForConditionalGeneration", "MT5ForConditionalGeneration", base=T5),
    tiny.Tiny("MBartForConditionalGeneration", "MBartForConditionalGeneration", base=BART),
    tiny.Tiny("PegasusForConditionalGeneration", "PegasusForConditionalGeneration", base=BART),
    tiny.Tiny("PegasusXForConditionalGeneration", "PegasusXForConditionalGeneration", base=BART),
    tiny.Tiny("BlenderbotForConditionalGeneration", "BlenderbotForConditionalGeneration", base=BART),
    tiny.Tiny("PLBartForConditionalGeneration", "PLBartForConditionalGeneration", base=BART),
]


@dataclass
class OnDisk:
    model: transformers.PreTrainedModel
    folder: Path
    spec: TransformersSpec

    @classmethod
    def save(cls, case: tiny.Tiny, folder: Path) -> OnDisk:
        case.save(folder)
        model = getattr(transformers, case.architecture).from_pretrained(folder)  # sinusoids are not read
        return cls(model.eval(), folder, described(folder))

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        return open_checkpoint(self.folder).tensors()

    def greedy(self, encoder: list[int], decoder: list[int], count: int) -> list[int]:
        """What transformers generates."""
        ids = self.model.generate(
            torch.tensor([encoder]),
            decoder_input_ids=torch.tensor([decoder]),
            max_new_tokens=count,
            do_sample=False,
            use_cache=False,  # its cache has as many layers as the encoder
        )
        return ids[0, len(decoder) :].tolist()

    @torch.inference_mode()
    def logprobs(self, encoder: list[int], decoder: list[int]) -> torch.Tensor:
        """Of each token of the decoder, [T, V]."""
        logits = self.model(input_ids=torch.tensor([encoder]), decoder_input_ids=torch.tensor([decoder])).logits[0]
        return logits.log_softmax(-1)


def described(folder: Path, **changes: Any) -> TransformersSpec:
    return describe(folder, open_checkpoint(folder, "dummy").config() | changes, trust_remote_code=False)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name[:24])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    return OnDisk.save(request.param, tmp_path_factory.mktemp("model"))


LIMITS = Limits(max_model_len=64, max_num_batched_tokens=10, max_num_seqs=4, block_size=4, prefix_caching=False)
"""Decoder prompts longer than 10 tokens are prefilled in chunks."""


def engine(saved: OnDisk, blocks: int = 60) -> EngineCore:
    layout = kv_layout(saved.spec, LIMITS.block_size)
    backend = load_backend("reference").create(make_options(saved.spec, limits=LIMITS, layout=layout))
    backend.load(saved.weights())
    backend.plan_memory()
    backend.init_cache((blocks,))
    backend.warmup()
    return generation_core(backend, layout, LIMITS, (blocks,))


def ask(name: str, encoder: list[int], decoder: list[int], count: int, **rules: Any) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=decoder,
        encoder_token_ids=encoder,
        rules=SamplingRules(**rules),
        max_tokens=count,
        stop_token_ids=frozenset({EOS}),
    )


def answers(core: EngineCore, requests: list[EngineRequest]) -> list[list[int]]:
    """Greedy tokens; one request joins per step."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    waiting = requests[::-1]
    while waiting or core.has_work:
        if waiting:
            core.add_request(waiting.pop())
        for output in core.step().outputs:
            tokens[output.request_id] += output.new_token_ids
    core.check_integrity()
    return list(tokens.values())


PROMPTS = [
    (tiny.tokens(count=3 + 7 * index, seed=index), [START, *tiny.tokens(count=9 * (index % 3), seed=50 + index)])
    for index in range(6)
]
"""Of the encoder and of the decoder: more requests than rows, of different lengths."""


def test_batches_and_chunks(saved: OnDisk) -> None:
    requests = [ask(str(index), *prompts, 12) for index, prompts in enumerate(PROMPTS)]
    assert answers(engine(saved), requests) == [saved.greedy(*prompts, 12) for prompts in PROMPTS]


def test_preempted_requests_are_encoded_again(saved: OnDisk) -> None:
    prompts = [(encoder, decoder) for encoder, decoder in PROMPTS if len(decoder) < 12]
    core = engine(saved, blocks=12)
    requests = [ask(str(index), *each, 20) for index, each in enumerate(prompts)]
    assert answers(core, requests) == [saved.greedy(*each, 20) for each in prompts]
    assert core.stats.preemptions > 0


def test_a_row_of_an_aborted_request_is_encoded_anew(saved: OnDisk) -> None:
    core = engine(saved)
    for index, prompts in enumerate(PROMPTS[:4]):
        core.add_request(ask(f"gone {index}", *prompts, 30))
    for _ in range(3):
        core.step()
    core.abort([f"gone {index}" for index in range(3)])
    requests = [ask(str(index), *prompts, 8) for index, prompts in enumerate(PROMPTS)]
    core.abort(["gone 3"])
    assert answers(core, requests) == [saved.greedy(*prompts, 8) for prompts in PROMPTS]


@pytest.mark.parametrize("case", [*CASES, *MORE], ids=lambda case: case.name)
def test_logprobs(case: tiny.Tiny, tmp_path: Path) -> None:
    """Of prompts in chunks beside others of other lengths, and of the tokens generated after them."""
    saved = OnDisk.save(case, tmp_path)
    rules = {"temperature": 0.0, "prompt_logprobs": 0, "logprobs": 0}
    core, prompts = engine(saved), PROMPTS[1:4]
    for index, each in enumerate(prompts):
        core.add_request(ask(str(index), *each, 6, **rules))
    outputs = [output for _ in range(20) for output in core.step().outputs]
    for index, (encoder, decoder) in enumerate(prompts):
        parts = [output for output in outputs if output.request_id == str(index)]
        tokens = decoder + [token for part in parts for token in part.new_token_ids]
        positions = [*(parts[0].prompt_logprobs or []), *(each for part in parts for each in part.logprobs or [])]
        ours = torch.tensor([position.logprobs[0] for position in positions])
        theirs = saved.logprobs(encoder, tokens[:-1])
        assert theirs.std() > 0.1, "a flat answer proves nothing"
        torch.testing.assert_close(
            ours, theirs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0], atol=TOLERANCE, rtol=0
        )


def test_memory_of_cross_attention_is_counted(saved: OnDisk) -> None:
    spec = saved.spec
    assert spec.encoder is not None
    assert spec.encoder.cross_elements == 3 * 2 * 32  # layers, keys and values, width
    options = make_options(spec, limits=LIMITS, layout=kv_layout(spec, LIMITS.block_size))
    plan = load_backend("reference").create(options).plan_memory(0)
    assert plan.cross_attention == LIMITS.max_num_seqs * 64 * spec.encoder.cross_elements * 4
    assert "cross-attention 0.00 GiB" in str(plan)
    many = replace(LIMITS, max_num_seqs=1 << 30, max_num_batched_tokens=1 << 30)
    with pytest.raises(ConfigError, match=r"--max-num-seqs: the cross-attention of .* takes .* bytes, more than are"):
        plan_memory(spec, many, options.layout, options.cache, numerics("float32"), 0)


def test_a_forced_first_token_is_in_the_decoder_prompt(saved: OnDisk) -> None:
    assert saved.spec.encoder is not None
    assert saved.spec.encoder.decoder_start == (START,)
    forced = described(saved.folder, forced_bos_token_id=7).encoder
    assert forced is not None
    assert forced.decoder_start == (START, 7)
    generated = saved.model.generate(torch.tensor([[5, 6]]), forced_bos_token_id=7, max_new_tokens=1, use_cache=False)
    assert generated[0].tolist() == [START, 7]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("MBartForConditionalGeneration", {"decoder_start_token_id": None}, "states no decoder_start_token_id; use --hf"),
    ("LEDForConditionalGeneration", {}, "its decoder attends 0 times to its own tokens and 0 times to the encoder's"),
    ("SwitchTransformersForConditionalGeneration", {}, "does not attend to all tokens of the encoder"),
    ("BartForConditionalGeneration", {"is_encoder_decoder": False}, "is_encoder_decoder is False; of encoder-decoder"),
    ("BartForCausalLM", {"is_encoder_decoder": True}, "is_encoder_decoder is True; of encoder-decoder models those"),
]


@pytest.mark.parametrize(("architecture", "changes", "words"), REFUSED, ids=[row[0] + str(row[1]) for row in REFUSED])
def test_refusals(architecture: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    kind = getattr(transformers, architecture).config_class
    sizes = T5 if kind.model_type == "switch_transformers" else BART
    config = {**sizes, **changes, "architectures": [architecture], "model_type": kind.model_type}
    with pytest.raises(ModelError, match=rf"^{architecture}.*{words}"):
        describe(tmp_path, config, trust_remote_code=False)


def test_a_decoder_that_counts_tokens_is_refused_at_load(tmp_path: Path) -> None:
    saved = OnDisk.save(tiny.Tiny("counts", "M2M100ForConditionalGeneration", base=BART), tmp_path)
    with pytest.raises(ModelError, match=r"^M2M100.* its decoder cannot be given the position of each token \("):
        engine(saved)
