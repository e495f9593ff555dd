"""The effect of engine flags, on a fake backend or a tiny random model."""

import json
from pathlib import Path

import pytest
from fakes import FakeBackend
from support.checkpoints import tiny_folder
from support.checkpoints.byte_text import byte_tokenizer
from support.engines.fake_engine import build

from pagoda.backends.reference.backend import ReferenceBackend
from pagoda.common.config.engine import EngineConfig
from pagoda.common.errors import ConfigError, ModelError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.llm import LLM
from pagoda.server.llm_engine import LLMEngine
from pagoda.server.outputs import RequestOutput
from pagoda.server.settings.flags import EngineArgs, FlagParser
from pagoda.server.settings.resolve import resolve

TEXT = byte_tokenizer()
TINY = tiny_folder.CONFIG | {"vocab_size": 96, "eos_token_id": 2}
TINY_BLOCK_BYTES = 2 * 2 * 8 * 32 * 2 * 4
"""K and V, 2 heads of 8, 32 tokens, 2 layers, float32."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def config(*flags: str) -> EngineConfig:
    parser = FlagParser()
    EngineArgs.add_cli_args(parser)
    return EngineArgs.from_cli_args(parser.parse_args(flags)).create_engine_config()


def fake(*flags: str) -> tuple[LLM, FakeBackend]:
    """Return an engine with blocks of 4 tokens and a context of 64, and its backend, which records the plans."""
    engine = LLMEngine(config("--model", "fake", *flags), build=build, open_text=lambda _: TEXT)
    backend = engine._built.backend
    assert isinstance(backend, FakeBackend)
    return LLM.from_engine(engine), backend


def tiny(folder: Path, *flags: str) -> LLMEngine:
    return LLMEngine(config("--model", str(folder), "--load-format", "dummy", "--skip-tokenizer-init", *flags))


def answer(llm: LLM, *prompts: str, **params: object) -> list[RequestOutput]:
    return llm.generate(list(prompts), SamplingParams(**{"max_tokens": 3} | params), use_tqdm=False)


def run(engine: LLMEngine, prompt: list[int], **params: object) -> RequestOutput:
    engine.add_request("r", prompt, SamplingParams(**{"max_tokens": 2, "temperature": 0, "ignore_eos": True} | params))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs[-1]


# --- scheduling ---


@pytest.mark.setting("--max-num-seqs")
@pytest.mark.parametrize(("flags", "most"), [((), 4), (("--max-num-seqs", "2"), 2)])
def test_max_num_seqs(flags: tuple[str, ...], most: int) -> None:
    llm, backend = fake(*flags)
    answer(llm, "a", "b", "c", "d")
    assert max(plan.num_seqs for plan in backend.plans) == most


@pytest.mark.setting("--max-num-batched-tokens")
@pytest.mark.parametrize(("flags", "most"), [((), 20), (("--max-num-batched-tokens", "8", "--max-num-seqs", "4"), 8)])
def test_max_num_batched_tokens(flags: tuple[str, ...], most: int) -> None:
    llm, backend = fake(*flags)
    answer(llm, "a" * 20)
    assert max(plan.num_tokens for plan in backend.plans) == most


@pytest.mark.setting("--enable-chunked-prefill")
@pytest.mark.parametrize(("flag", "first"), [("--enable-chunked-prefill", 64), ("--no-enable-chunked-prefill", 40)])
def test_a_prompt_is_split_over_steps_or_waits(flag: str, first: int) -> None:
    llm, backend = fake(flag, "--max-num-batched-tokens", "64", "--max-num-seqs", "4")
    answer(llm, "a" * 40, "b" * 40)
    assert backend.plans[0].num_tokens == first


@pytest.mark.setting("--long-prefill-token-threshold")
@pytest.mark.parametrize(("threshold", "first"), [("0", 20), ("5", 5)])
def test_long_prefill_token_threshold(threshold: str, first: int) -> None:
    llm, backend = fake("--long-prefill-token-threshold", threshold)
    answer(llm, "a" * 20)
    assert backend.plans[0].num_tokens == first


@pytest.mark.setting("--async-scheduling")
@pytest.mark.parametrize(("flag", "started"), [("--async-scheduling", 2), ("--no-async-scheduling", 1)])
def test_async_scheduling(flag: str, started: int) -> None:
    llm, backend = fake(flag)
    llm.llm_engine.add_request("r", "abc", SamplingParams(max_tokens=9))
    llm.llm_engine.step()
    assert len(backend.plans) == started


@pytest.mark.setting("--scheduling-policy")
@pytest.mark.parametrize(("policy", "first"), [("fcfs", "a"), ("priority", "k")])
def test_scheduling_policy(policy: str, first: str) -> None:
    llm, _ = fake("--scheduling-policy", policy, "--max-num-seqs", "1")
    engine = llm.llm_engine
    for name, priority in (("a", 2), ("k", 1)):
        engine.add_request(name, name, SamplingParams(max_tokens=2), priority=priority if policy == "priority" else 0)
    finished = []
    while engine.has_unfinished_requests():
        finished += [output.request_id for output in engine.step() if output.finished]
    assert finished[0] == first


@pytest.mark.setting("--seed")
def test_requests_without_a_seed_repeat_with_the_engines() -> None:
    def seeds(seed: str) -> list[int]:
        llm, backend = fake("--seed", seed)
        answer(llm, "a", "b", temperature=1.0)
        return [start.rules.seed for plan in backend.plans for start in plan.starts]

    assert seeds("1") == seeds("1") != seeds("2")
    assert len(set(seeds("1"))) == 2


# --- the KV cache ---


@pytest.mark.setting("--enable-prefix-caching")
@pytest.mark.parametrize(("flag", "cached"), [("--enable-prefix-caching", 16), ("--no-enable-prefix-caching", 0)])
def test_enable_prefix_caching(flag: str, cached: int) -> None:
    llm, _ = fake(flag)
    answer(llm, "a" * 20)
    assert answer(llm, "a" * 20)[0].num_cached_tokens == cached


@pytest.mark.setting("--num-gpu-blocks-override")
def test_num_gpu_blocks_override(folder: Path) -> None:
    engine = tiny(folder, "--num-gpu-blocks-override", "9")
    assert engine.stats.kv_blocks_total == 8
    engine.shutdown()


@pytest.mark.setting("--kv-cache-memory-bytes")
def test_kv_cache_memory_bytes(folder: Path) -> None:
    engine = tiny(folder, "--kv-cache-memory-bytes", "1m", "--dtype", "float32")
    assert engine.stats.kv_blocks_total == 1_000_000 // TINY_BLOCK_BYTES - 1
    engine.shutdown()
    with pytest.raises(ConfigError, match=r"^--kv-cache-memory-bytes: 0 KV blocks .* leave no room for a request"):
        tiny(folder, "--kv-cache-memory-bytes", "1k")


def test_a_machine_without_memory_for_the_kv_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.backends.reference.memory.available_bytes", lambda: 3 << 10)
    with pytest.raises(ConfigError, match=r"only 0 MiB of memory are free.*lower --max-model-len"):
        tiny(folder)


@pytest.mark.setting("--block-size")
@pytest.mark.parametrize(("flags", "cached"), [((), 0), (("--block-size", "16"), 16), (("--block-size", "4"), 20)])
def test_block_size(folder: Path, flags: tuple[str, ...], cached: int) -> None:
    engine = tiny(folder, "--num-gpu-blocks-override", "64", *flags)
    prompt = list(range(3, 24))
    run(engine, prompt)
    assert run(engine, prompt).num_cached_tokens == cached
    engine.shutdown()


# --- the model ---


@pytest.mark.setting("--dtype")
def test_dtype(folder: Path) -> None:
    def logprobs(dtype: str) -> list[float]:
        engine = tiny(folder, "--dtype", dtype, "--num-gpu-blocks-override", "16")
        output = run(engine, [5, 6, 7], max_tokens=1, logprobs=20)
        engine.shutdown()
        assert output.outputs[0].logprobs is not None
        return [best.logprob for _, best in sorted(output.outputs[0].logprobs[0].items())]

    assert logprobs("auto") == logprobs("bfloat16") != logprobs("float32") == logprobs("float")
    assert logprobs("half") == logprobs("float16") != logprobs("float32")
    assert logprobs("bfloat16") != logprobs("float16")


@pytest.mark.setting("--load-format")
def test_load_format(folder: Path) -> None:
    tiny(folder, "--num-gpu-blocks-override", "16").shutdown()
    for name, missing in (("auto", "safetensors"), ("safetensors", "safetensors"), ("pt", "bin"), ("gguf", "gguf")):
        with pytest.raises(ModelError, match=missing):
            tiny(folder, "--load-format", name)
    with pytest.raises(ConfigError, match=r"^--load-format: 'tensorizer' is not supported: .*; use the safetensors"):
        tiny(folder, "--load-format", "tensorizer")


@pytest.mark.setting("--backend")
def test_backend(folder: Path) -> None:
    engine = tiny(folder, "--backend", "reference", "--num-gpu-blocks-override", "16")
    assert engine.info.backend == "reference"
    engine.shutdown()
    for name, words in (("torch_cuda", "torch_cuda: "), ("abacus", "abacus is unknown; use auto or one of ")):
        with pytest.raises(ConfigError, match=f"^--backend: {words}"):
            tiny(folder, "--backend", name)


@pytest.mark.setting("--skip-tokenizer-init")
def test_skip_tokenizer_init(folder: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        LLMEngine(config("--model", str(folder), "--load-format", "dummy"))
    engine = tiny(folder, "--num-gpu-blocks-override", "16")
    output = run(engine, [5, 6, 7])
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 2)
    engine.shutdown()


@pytest.mark.setting("--attention-backend", "--attention-config")
@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ((), False),
        (("--attention-backend", "torch_varlen"), True),
        (("--attention-config", '{"backend": "TORCH_VARLEN"}'), True),
    ],
)
def test_attention_backend(folder: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], asked: bool) -> None:
    from pagoda.backends.torch_cuda.attention_backends import torch_varlen, triton

    created = []
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    monkeypatch.setattr(torch_varlen, "create", lambda needs: created.append(needs) or triton.TritonAttn(needs.device))
    run(tiny(folder, "--backend", "torch_cuda", "--kv-cache-memory-bytes", "1M", *flags), [3, 4, 5])
    assert bool(created) == asked


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--attention-backend FLASH_ATTN", "--attention-backend: reference has one attention kernel; use auto, "),
        ('--attention-config {"backend":"TRITON_ATTN"}', "--attention-config: reference has no TRITON_ATTN; use one"),
        (
            "--attention-backend FLEX_ATTENTION",
            "--attention-backend: 'FLEX_ATTENTION': no backend has this kernel; use one of AUTO, ",
        ),
        ("--attention-backend flash_atn", "--attention-backend: 'flash_atn': unknown; did you mean FLASH_ATTN"),
        (
            '--attention-config {"flash_attn_version":3}',
            "--attention-config: flash_attn_version is not supported; drop it",
        ),
        (
            '--attention-config {"backend":"FLEX_ATTENTION"}',
            "--attention-config: FLEX_ATTENTION: no backend has this kernel; use ",
        ),
        (
            '--attention-backend auto --attention-config {"backend":"AUTO"}',
            "--attention-config: backend is also set by --attention-backend",
        ),
    ],
)
def test_unavailable_attention_backends_are_refused(folder: Path, flags: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        tiny(folder, "--backend", "reference", *flags.split())
    assert str(error.value).startswith(line)


def test_reference_accepts_attention_names_of_a_cpu(folder: Path) -> None:
    assert run(tiny(folder, "--backend", "reference", "--attention-backend", "torch_sdpa"), [3, 4, 5]).finished


DECODES = "-cc.cudagraph_mode=FULL_DECODE_ONLY"


@pytest.mark.setting("--enforce-eager", "--cudagraph-capture-sizes", "--max-cudagraph-capture-size")
@pytest.mark.setting("--compilation-config")
@pytest.mark.variable("PAGODA_TORCH_CUDA_DEVICE")
@pytest.mark.parametrize(
    ("flags", "captured"),
    [
        ([DECODES], 4),
        (["--enforce-eager"], 0),
        ([DECODES, "--cudagraph-capture-sizes", "3", "2"], 2),
        ([DECODES, "--max-cudagraph-capture-size", "2"], 2),
        (["-cc.cudagraph_mode=NONE"], 0),
        ([], 10),  # six of mixed steps
    ],
)
def test_cudagraph_capture_sizes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], captured: int
) -> None:
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    sizes = ["--max-num-seqs", "6", "--num-gpu-blocks-override", "16"]
    engine = tiny(folder, "--backend", "torch_cuda", *sizes, *flags)
    assert engine._built.backend._stream.captures == 2 * captured
    engine.shutdown()


def test_compilation_settings_without_effect_log_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    sizes = ["--max-num-seqs", "6", "--num-gpu-blocks-override", "16", "--cudagraph-capture-sizes", "2", "7", "9"]
    tiny(folder, "--backend", "torch_cuda", "--distributed-executor-backend", "ray", *sizes).shutdown()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "--distributed-executor-backend: ray has no effect with --tensor-parallel-size 1",
        "--cudagraph-capture-sizes: ignoring 7, 9, above --max-num-seqs 6",
    ]


def test_graph_settings_of_other_backends_log_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocks = ["--num-gpu-blocks-override", "16"]
    tiny(folder, "--enforce-eager", "-O.level=3", "--gpu-memory-utilization", "0.5", *blocks).shutdown()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sorted(said) == [
        "--compilation-config: level has no effect: torch.compile is not used",
        "--enforce-eager and --compilation-config: no effect on reference: it captures no CUDA graphs",
        "--gpu-memory-utilization: no effect on reference: on a CPU use --kv-cache-memory-bytes",
    ]


@pytest.mark.setting("--enable-prompt-embeds")
def test_prompt_embeds_need_rows_on_the_device(folder: Path) -> None:
    words = ("--model", str(folder), "--load-format", "dummy", "--max-num-batched-tokens", "64")
    plain, more = (resolve(config(*words, *flags), "llm").limits for flags in ((), ("--enable-prompt-embeds",)))
    assert (plain.media_rows, more.media_rows) == (0, 64 + 2 * more.block_size)


@pytest.mark.setting("--batch-invariant")
@pytest.mark.parametrize(("flags", "invariant"), [((), False), (("--batch-invariant",), True)])
def test_batch_invariant(folder: Path, flags: tuple[str, ...], invariant: bool) -> None:
    backend = tiny(folder, "--backend", "reference", *flags)._built.backend
    assert isinstance(backend, ReferenceBackend)
    assert backend.numerics.batch_invariant is invariant
