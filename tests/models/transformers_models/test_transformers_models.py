"""Models that transformers computes over our paged KV cache, against the same models by themselves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from fakes import row_items
from models.cases import tiny
from support.devices.torch_cuda_model import TorchCudaModel
from support.engines.backend_options import make_options
from support.engines.replaying import Replaying, drafting
from support.kernels.paged_model import BLOCK, PagedModel

from pagoda.backends.fallback.attention import TracedCalls
from pagoda.backends.fallback.describe import describe
from pagoda.backends.reference.model.numerics import numerics
from pagoda.backends.reference.model.transformers.decoder import TransformersDecoder
from pagoda.backends.registry import load_backend
from pagoda.backends.torch_cuda.attention_backends.triton import TritonAttn
from pagoda.backends.torch_cuda.device import CPU
from pagoda.backends.torch_cuda.model.transformers_decoder import CudaTransformersDecoder
from pagoda.backends.torch_cuda.parallel.tensor_parallel import RankShard
from pagoda.common.config.engine import Limits
from pagoda.common.engine.core import EngineCore, MakeScheduler, generation_core
from pagoda.common.engine.kv_cache.spec import kv_layout
from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.sampling.rules import SamplingRules
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.common.engine.steps.contract import EMBEDDED
from pagoda.common.errors import ModelError, WeightError
from pagoda.common.models.transformers_spec import TransformersSpec
from pagoda.common.weights.checkpoint import open_checkpoint

TOLERANCE = 3e-5
MOE: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
SINKS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128}
CASES = [
    tiny.Tiny("learned positions, scaled embeddings", "BioGptForCausalLM"),
    tiny.Tiny("two calls of attention in a layer", "DiffLlamaForCausalLM"),
    tiny.Tiny("softcaps in attention and head, windows", "Gemma2ForCausalLM", {"head_dim": 8, "sliding_window": 7}),
    tiny.Tiny("experts stored one by one", "MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": None}),
    tiny.Tiny(
        "windows, experts, one dense layer",
        "AfmoeForCausalLM",
        {**MOE, "num_hidden_layers": 3, "num_dense_layers": 1, "head_dim": 8, "sliding_window": 7},
    ),
    tiny.Tiny("sinks, windows, biased experts", "GptOssForCausalLM", {"head_dim": 8, "sliding_window": 7, **SINKS}),
    tiny.Tiny(
        "values narrower than keys",
        "YoutuForCausalLM",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
        },
    ),
]
LONGROPE = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 5.0, 9.0]}
ROPES = {
    "dynamic": tiny.Tiny(
        "dynamic",
        "LlamaForCausalLM",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
    "longrope": tiny.Tiny(
        "longrope",
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LONGROPE},
            **{"pad_token_id": 0, "max_position_embeddings": 64},
        },
    ),
    "by layer": tiny.Tiny(
        "by layer",
        "Gemma3ForCausalLM",
        {
            **{"head_dim": 8, "sliding_window": 7, "max_position_embeddings": 16, "num_hidden_layers": 3},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
            },
        },
    ),
}
"""Frequencies depend on the length of the sequence."""
EXPERTS: dict[str, Any] = {**MOE, "head_dim": 8, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
THREE: dict[str, Any] = {"num_hidden_layers": 3, "sliding_window": 7, "head_dim": 8}
TYPES: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MORE = [
    tiny.Tiny("BeamForCausalLM", "BeamForCausalLM", {**THREE, **TYPES}),
    tiny.Tiny("CTRLLMHeadModel", "CTRLLMHeadModel", {"dff": 48}),
    tiny.Tiny("HrmTextForCausalLM", "HrmTextForCausalLM", {"head_dim": 8, "num_key_value_heads": 4}),
    tiny.Tiny("Kolibri1ForCausalLM", "Kolibri1ForCausalLM", {**EXPERTS, **THREE, **TYPES}),
    tiny.Tiny("LagunaForCausalLM", "LagunaForCausalLM", {**EXPERTS}),
    tiny.Tiny("MinistralForCausalLM", "MinistralForCausalLM", {**THREE, **TYPES}),
    tiny.Tiny("ModernBertDecoderForCausalLM", "ModernBertDecoderForCausalLM", {"pad_token_id": 0, "sliding_window": 7}),
]
"""Architectures that no other case has: their logits once, on the reference backend."""
NANO = tiny.Tiny("nano", "NanoChatForCausalLM", {"max_position_embeddings": 128})


@dataclass
class OnDisk:
    """A tiny model, and what it is to us."""

    model: transformers.PreTrainedModel
    folder: Path
    spec: TransformersSpec

    @classmethod
    def save(cls, case: tiny.Tiny, folder: Path) -> OnDisk:
        model = case.save(folder)
        return cls(model, folder, described(folder))

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        return open_checkpoint(self.folder).tensors()


def described(folder: Path, *, trust: bool = False, **changes: Any) -> TransformersSpec:
    return describe(folder, open_checkpoint(folder, "dummy").config() | changes, trust_remote_code=trust)


class PagedTransformers(PagedModel):
    def __init__(self, saved: OnDisk, dtype: str = "float32") -> None:
        self.numerics, self.slot = numerics(dtype), None  # no adapters
        with torch.inference_mode():
            self.decoder = TransformersDecoder(saved.spec, saved.weights(), self.numerics, tiny.TOKENS)
        self.layout = kv_layout(saved.spec, BLOCK)


class CudaTransformers(TorchCudaModel):
    def __init__(self, saved: OnDisk, dtype: str = "float32") -> None:
        self.shard, self.dtype = RankShard(), getattr(torch, dtype)
        self.decoder = CudaTransformersDecoder(
            saved.spec, saved.weights(), self.dtype, tiny.TOKENS, CPU, TritonAttn(CPU)
        )
        self.decoder.place()
        self.layout = kv_layout(saved.spec, BLOCK)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    return OnDisk.save(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    return OnDisk.save(NANO, tmp_path_factory.mktemp("nano"))


@pytest.mark.parametrize("implementation", [PagedTransformers, CudaTransformers])
def test_logits(saved: OnDisk, implementation: type[PagedTransformers | CudaTransformers]) -> None:
    prompt = tiny.tokens()
    theirs = tiny.logits(saved.model, prompt)
    assert theirs.std() > 0.1, "a flat answer proves nothing"
    with torch.inference_mode():
        ours = implementation(saved).logits(prompt)
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", MORE, ids=lambda case: case.name)
def test_logits_of_architectures_without_specification(case: tiny.Tiny, tmp_path: Path) -> None:
    saved, prompt = OnDisk.save(case, tmp_path), tiny.tokens()
    theirs = tiny.logits(saved.model, prompt)
    assert theirs.std() > 0.05, "a flat answer proves nothing"
    torch.testing.assert_close(PagedTransformers(saved).logits(prompt), theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_of_the_served_context(name: str, tmp_path: Path) -> None:
    """Chunks of a prompt have those of a sequence as long as the context, as transformers has for the whole prompt."""
    saved, prompt = OnDisk.save(ROPES[name], tmp_path), tiny.tokens()
    assert saved.spec.max_positions == 64
    theirs = tiny.logits(saved.model, prompt)
    torch.testing.assert_close(PagedTransformers(saved).logits(prompt), theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("implementation", [PagedTransformers, CudaTransformers])
def test_the_head_does_not_round_to_16_bits(
    nano: OnDisk, implementation: type[PagedTransformers | CudaTransformers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    decoder = implementation(nano, "bfloat16").decoder
    hidden = torch.randn(3, nano.spec.width, generator=torch.Generator().manual_seed(4)).bfloat16()
    with torch.inference_mode():
        logits = decoder.logits(hidden)
    cap, weight = nano.model.config.final_logit_softcapping, nano.model.lm_head.weight.detach().bfloat16()
    expected = cap * torch.tanh(hidden.float() @ weight.float().T / cap)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_a_window_is_a_cache_of_its_own(saved: OnDisk) -> None:
    windows = {attention.window for attention in saved.spec.attention}
    kinds = getattr(saved.model.config, "layer_types", None) or ["full_attention"]
    assert windows == {7 if kind == "sliding_attention" else None for kind in kinds}
    groups = kv_layout(saved.spec, BLOCK).groups
    assert len(groups) >= len(windows)
    assert sum(len(group.layers) for group in groups) == len(saved.spec.attention)


needs_torchax = pytest.mark.skipif(find_spec("torchax") is None, reason="make test-torchax has torchax")


@needs_torchax
@pytest.mark.parametrize(
    "case", [CASES[2], CASES[4], CASES[5], CASES[6], ROPES["longrope"]], ids=lambda case: case.name
)
def test_logits_of_jax_tpu(case: tiny.Tiny, tmp_path: Path) -> None:
    from models.oracles.torchax_model import TorchaxTiny

    saved, prompt = OnDisk.save(case, tmp_path), tiny.tokens()
    ours = TorchaxTiny(saved.spec, saved.weights(), tiny.TOKENS).logits(prompt)
    torch.testing.assert_close(ours, PagedTransformers(saved).logits(prompt), atol=TOLERANCE, rtol=0)


@needs_torchax
def test_the_head_of_jax_tpu_does_not_round_to_16_bits(nano: OnDisk) -> None:
    from models.oracles.torchax_model import TorchaxTiny

    logits = TorchaxTiny(nano.spec, nano.weights(), tiny.TOKENS, "bfloat16").logits(tiny.tokens(count=6))
    assert (logits != logits.bfloat16().float()).float().mean() > 0.5


@needs_torchax
def test_jax_tpu_compiles_for_tpus(tmp_path: Path) -> None:
    """A decode step in bfloat16: windows, experts and the Pallas kernel, with the cache updated in place."""
    from models.oracles.torchax_model import compiled_for

    wide = {**CASES[4].extra, "hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 128}
    saved = OnDisk.save(tiny.Tiny("wide", "AfmoeForCausalLM", wide), tmp_path)
    program, cache_bytes = compiled_for("v6e:1x1", saved.spec, "bfloat16")
    assert program.memory_analysis().alias_size_in_bytes == cache_bytes


LIMITS = Limits(max_model_len=96, max_num_batched_tokens=20, max_num_seqs=4, block_size=8, media_rows=52)
"""Prompts longer than 20 tokens are prefilled in chunks."""


BACKENDS = [("reference", {}), ("torch_cuda", {"device": CPU}), pytest.param("jax_tpu", {}, marks=needs_torchax)]


def engine(
    saved: OnDisk, backend: str, limits: Limits = LIMITS, scheduler: MakeScheduler = Scheduler, **make: Any
) -> EngineCore:
    layout, blocks = kv_layout(saved.spec, limits.block_size), (30,)
    options = make_options(saved.spec, limits=limits, layout=layout)
    made = load_backend(backend).create(options, **make)
    made.load(saved.weights())
    made.plan_memory()
    made.init_cache(blocks)
    made.warmup()
    return generation_core(made, layout, limits, blocks, scheduler)


def ask(name: str, prompt: list[int], count: int, embeds: bytes | None = None) -> EngineRequest:
    media = () if embeds is None else row_items(prompt, embeds)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, media=media, rules=SamplingRules(), max_tokens=count)


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


def expected_greedy(model: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(tiny.logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(("backend", "make"), BACKENDS)
def test_batches_chunks_and_cached_prefixes(nano: OnDisk, backend: str, make: dict[str, Any]) -> None:
    start = tiny.tokens(count=34, seed=3)
    prompts = [start + tiny.tokens(count=3 + index, seed=index) for index in range(5)] + [[5]]
    core = engine(nano, backend, **make)
    requests = [ask(str(index), prompt, 6) for index, prompt in enumerate(prompts)]
    assert answers(core, requests) == [expected_greedy(nano.model, prompt, 6) for prompt in prompts]
    assert core.stats.prefix_hits > 0


@pytest.mark.parametrize(("backend", "make"), BACKENDS)
def test_prompt_embeddings(nano: OnDisk, backend: str, make: dict[str, Any]) -> None:
    prompt = tiny.tokens(count=22, seed=5)
    rows = nano.model.get_input_embeddings()(torch.tensor(prompt[4:])).detach().numpy()
    embedded = ask("0", prompt[:4] + [EMBEDDED] * len(rows), 4, rows.tobytes())
    assert answers(engine(nano, backend, **make), [embedded]) == [expected_greedy(nano.model, prompt, 4)]


@pytest.mark.parametrize(("backend", "make"), BACKENDS[:2])
def test_drafts(nano: OnDisk, backend: str, make: dict[str, Any]) -> None:
    """Right drafts save steps; with a wrong one in three the tokens are the same."""
    prompts = {"long": tiny.tokens(count=25, seed=6), "short": [5, 9]}
    texts = {name: expected_greedy(nano.model, prompt, 12) for name, prompt in prompts.items()}
    steps = []
    for wrong in (lambda request, place: False, lambda request, place: place % 3 == 1):
        proposer = Replaying(texts, wrong)
        scheduler = drafting(proposer, nano.spec.vocab)
        core = engine(nano, backend, replace(LIMITS, max_drafts=3), scheduler, **make)
        requests = [ask(name, prompt, 12) for name, prompt in prompts.items()]
        assert answers(core, requests) == list(texts.values())
        steps.append(len(proposer.contexts))
    assert steps[0] < steps[1] < 2 * 12


def test_a_checkpoint_must_have_every_tensor_and_no_other(nano: OnDisk) -> None:
    whole = dict(nano.weights())
    name = next(name for name in whole if "up_proj" in name or "fc1" in name)
    for weights, words in (
        ({other: array for other, array in whole.items() if other != name}, "1 missing tensors"),
        (whole | {"model.extra": np.zeros(2, np.float32)}, "1 unexpected tensors .* model.extra"),
        (whole | {name: whole[name][:-1]}, "mismatch"),
    ):
        with pytest.raises(WeightError, match=words):
            TransformersDecoder(nano.spec, iter(weights.items()), numerics("float32"), tiny.TOKENS)


# What cannot run is refused by name, from the configuration alone where it can be.

CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel


class PebbleConfig(LlamaConfig):
    model_type = "pebble"


class PebbleModel(LlamaModel):
    config_class = PebbleConfig

    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None, **more):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        {change}
        return super().forward(inputs_embeds=inputs_embeds, position_ids=position_ids, **more)


class PebbleForCausalLM(LlamaForCausalLM):
    config_class = PebbleConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = PebbleModel(config)
        self.post_init()
"""
"""The code of a model's folder. `change`: what it does before the layers."""


def write_code(folder: Path, llama: Path, change: str = "pass") -> Path:
    """A model whose folder defines it, with the weights of a Llama."""
    shutil.copytree(llama, folder)
    config = json.loads((folder / "config.json").read_text())
    parts = {"AutoConfig": "PebbleConfig", "AutoModelForCausalLM": "PebbleForCausalLM", "AutoModel": "PebbleModel"}
    config |= {"architectures": ["PebbleForCausalLM"], "model_type": "pebble"}
    config["auto_map"] = {part: f"modeling_pebble.{name}" for part, name in parts.items()}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_pebble.py").write_text(CODE.replace("{change}", change))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    return OnDisk.save(tiny.llama("plain"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def code_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers copies code to."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.mark.usefixtures("code_cache")
def test_custom_code_runs_if_it_is_trusted(llama: OnDisk, tmp_path: Path) -> None:
    folder = write_code(tmp_path / "pebble", llama.folder)
    with pytest.raises(ModelError, match=r"PebbleForCausalLM is defined by Python code .* --trust-remote-code"):
        described(folder)
    custom = OnDisk(llama.model, folder, described(folder, trust=True))
    prompt = tiny.tokens()
    with torch.inference_mode():
        ours = PagedTransformers(custom).logits(prompt)
    torch.testing.assert_close(ours, tiny.logits(llama.model, prompt), atol=TOLERANCE, rtol=0)


def test_a_map_of_code_that_is_none_is_refused(llama: OnDisk, tmp_path: Path) -> None:
    folder = write_code(tmp_path / "pebble", llama.folder)
    with pytest.raises(ModelError, match=r"auto_map is 1\.5, not an object"):
        described(folder, trust=True, auto_map=1.5)


@pytest.mark.usefixtures("code_cache")
def test_code_of_another_repository_is_not_fetched(llama: OnDisk, tmp_path: Path) -> None:
    folder = write_code(tmp_path / "pebble", llama.folder)
    code = {"AutoConfig": "org/other--modeling.A", "AutoModelForCausalLM": "org/other--modeling.B"}
    with pytest.raises(ModelError, match=r"in another repository \(org/other--modeling.A\); copy it into the folder"):
        described(folder, trust=True, auto_map=code)


@pytest.mark.usefixtures("code_cache")
@pytest.mark.parametrize(
    "change",
    [
        "inputs_embeds = inputs_embeds + inputs_embeds.cumsum(1)",
        "position_ids = torch.arange(inputs_embeds.shape[1])[None].to(inputs_embeds.device)",
    ],
    ids=["tokens mixed outside attention", "positions ignored"],
)
def test_hidden_dependence_on_other_tokens_is_found(llama: OnDisk, tmp_path: Path, change: str) -> None:
    folder = write_code(tmp_path / "pebble", llama.folder, change)
    custom = OnDisk(llama.model, folder, described(folder, trust=True))
    with pytest.raises(
        ModelError, match=r"PebbleForCausalLM cannot run on the paged KV cache: .* depend on each other"
    ):
        PagedTransformers(custom)


REFUSED = [
    (
        "GPTNeoForCausalLM",
        {"attention_types": [[["global", "local"], 1]]},
        "its attention does not go through transformers' attention interface",
    ),
    ("GPTNeoXJapaneseForCausalLM", {}, r"0 of 2 layers attend through transformers' attention interface"),
    ("JambaForCausalLM", {}, "it has recurrent layers, whose state is not a KV cache"),
    ("DogeForCausalLM", {}, "DogeAttention computes a mask or bias of attention by itself"),
    ("BertLMHeadModel", {}, "attends neither to all earlier tokens nor to a sliding window"),
    (
        "BioGptForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "its own code computes the frequencies of dynamic RoPE .*; choose another rope_type by --hf-overrides",
    ),
    ("BloomForCausalLM", {"max_position_embeddings": None}, "states no maximum context; use --hf-overrides"),
]


def test_unknown_options_of_attention_are_refused() -> None:
    q, k, calls = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8), TracedCalls(64)
    with pytest.raises(ModelError, match="Linear gives attention the option indices, which the paged attention"):
        calls(torch.nn.Linear(1, 1), q, k, k, None, {"scaling": 1.0, "indices": k})
    with pytest.raises(ModelError, match=r"Linear has attention sinks \[2\], not one per head of 4"):
        calls(torch.nn.Linear(1, 1), q, k, k, None, {"s_aux": torch.zeros(2)})


@pytest.mark.parametrize(("architecture", "changes", "words"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refusals(architecture: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    model_type = getattr(transformers, architecture).config_class.model_type
    config = {**tiny.SMALL, **changes, "architectures": [architecture], "model_type": model_type}
    config = {key: value for key, value in config.items() if value is not None}
    with pytest.raises(ModelError, match=rf"^{architecture}.*{words}"):
        describe(tmp_path, config, trust_remote_code=False)
