"""vLLM's offline examples: the calls that they make, with `pagoda` in place of `vllm`, on random weights or SmolLM2.

WORKING has one function for each example that runs, by the example's path; REFUSED the others, with the call that is
refused and the message, for features that do not exist yet.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.checkpoints import tiny_folder
from support.checkpoints.adapters import llama_modules, write_adapter
from support.checkpoints.drafter_folders import DRAFTERS
from support.checkpoints.twin_model import write_twin
from support.suite.slow_matrix import some

from pagoda import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    EngineArgs,
    LLMEngine,
    LoRARequest,
    PoolingParams,
    SamplingParams,
    TokensPrompt,
)
from pagoda.config import CompilationConfig, KVEventsConfig, KVTransferConfig, PoolerConfig, ProfilerConfig
from pagoda.inputs import TextPrompt
from pagoda.sampling_params import BeamSearchParams, RequestOutputKind, StructuredOutputsParams
from pagoda.utils.argparse_utils import FlexibleArgumentParser
from pagoda.utils.print_utils import print_embeddings
from pagoda.v1.engine.async_llm import AsyncLLM
from pagoda.v1.metrics.reader import Counter, Gauge, Histogram, Vector
from pagoda.v1.sample.logits_processor import AdapterLogitsProcessor, LogitsProcessor
from pagoda.v1.sample.logits_processor.builtin import process_dict_updates

pytestmark = pytest.mark.model

PROMPTS = ["Hello, my name is", "The president of the United States is", "The capital of France is", "The future of AI"]
CHAT = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write an essay about the importance of higher education."},
]
SHORT = {"max_tokens": 8}
QUICK: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}


class World:
    """What examples need: a model, and engines that several of them share."""

    def __init__(self, model: str, gguf: str, folder: Path) -> None:
        """`gguf`: the file of the real model; `model`: a folder with its tokenizer and few random weights."""
        self.model, self.gguf, self.folder = model, gguf, folder
        self._shared: dict[str, LLM] = {}

    @property
    def llm(self) -> LLM:
        """The engine of the examples that need nothing but a model."""
        return self.start("plain", model=self.model)

    @property
    def embedder(self) -> LLM:
        return self.start("embed", model=self.model, runner="pooling", enforce_eager=True)

    @property
    def classifier(self) -> LLM:
        """A random classifier of two labels."""
        config = {"architectures": ["LlamaForSequenceClassification"], "vocab_size": 49152, "num_labels": 2}
        (self.folder / "config.json").write_text(json.dumps(tiny_folder.CONFIG | config))
        args = {"model": self.folder, "tokenizer": self.model, "load_format": "dummy", "runner": "pooling"}
        return self.start("classify", **args)

    def start(self, name: str, **args: Any) -> LLM:
        """Start an engine, or return that of another example."""
        if name not in self._shared:
            quick = {} if args.get("runner") == "pooling" else QUICK
            self._shared[name] = LLM(**{**quick, **args})
        return self._shared[name]

    def close(self) -> None:
        for llm in self._shared.values():
            llm.shutdown()


def texts(outputs: Any) -> list[str]:
    found = [output.outputs[0].text for output in outputs]
    assert all(output.finished for output in outputs)
    return found


def parsed(world: World, *flags: str) -> Any:
    parser = FlexibleArgumentParser(description="an example")
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model=world.model)
    return parser.parse_args([*flags, "--max-model-len", "512", "--kv-cache-memory-bytes", str(32 << 20)])


WORKING: dict[str, Callable[[World], None]] = {}


def example(path: str) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    def add(run: Callable[[World], None]) -> Callable[[World], None]:
        WORKING[path] = run
        return run

    return add


@example("basic/offline_inference/basic.py")
def basic(world: World) -> None:
    outputs = world.llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    assert [output.prompt for output in outputs] == PROMPTS
    assert all(texts(outputs))


@example("basic/offline_inference/generate.py")
def generate(world: World) -> None:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model=world.model)
    sampling = parser.add_argument_group("Sampling parameters")
    sampling.add_argument("--max-tokens", type=int)
    sampling.add_argument("--temperature", type=float)
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--top-k", type=int)
    args = vars(parser.parse_args(["--max-tokens", "5", "--max-model-len", "512"]))
    given = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    for name, value in given.items():
        if value is not None:
            setattr(params, name, value)
    outputs = llm.generate(PROMPTS[:2], params)
    llm.shutdown()
    assert all(0 < len(output.outputs[0].token_ids) <= 5 for output in outputs)


@example("basic/offline_inference/chat.py")
def chat(world: World) -> None:
    params = world.llm.get_default_sampling_params()
    params.max_tokens = 8
    assert len(texts(world.llm.chat(CHAT, params, use_tqdm=False))) == 1
    assert len(texts(world.llm.chat([CHAT] * 3, params, use_tqdm=True))) == 3
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    (output,) = world.llm.chat([CHAT], params, use_tqdm=False, chat_template=template)
    assert output.prompt.startswith("You are a helpful assistant Hello")


@example("basic/offline_inference/embed.py")
def embed(world: World) -> None:
    outputs = world.embedder.embed(PROMPTS)
    for output in outputs:
        print_embeddings(output.outputs.embedding)
    assert len({len(output.outputs.embedding) for output in outputs}) == 1


@example("basic/offline_inference/classify.py")
def classify(world: World) -> None:
    for output in world.classifier.classify(PROMPTS):
        assert sum(output.outputs.probs) == pytest.approx(1.0, abs=1e-2)


@example("basic/offline_inference/score.py")
def score(world: World) -> None:
    outputs = world.embedder.score("What is the capital of France?", ["Brazil's is Brasilia.", "France's is Paris."])
    assert all(-1.01 <= output.outputs.score <= 1.01 for output in outputs)


@example("basic/offline_inference/reward.py")
def reward(world: World) -> None:
    for output in world.classifier.reward(PROMPTS):
        assert output.outputs.data.ndim >= 1


@example("basic/offline_inference/manual_prompt_rendering.py (llm.preprocess_chat)")
def manual_rendering(world: World) -> None:
    (prompt,) = world.llm.preprocess_chat(CHAT)
    assert prompt["prompt_token_ids"]
    texts(world.llm.generate(prompt, SamplingParams(**SHORT)))


@example("offline_inference/batch_llm_inference.py (a batch of token prompts)")
def token_prompts(world: World) -> None:
    tokenizer = world.llm.get_tokenizer()
    prompts = [TokensPrompt(prompt_token_ids=tokenizer.encode(each)) for each in PROMPTS]
    texts(world.llm.generate(prompts, SamplingParams(**SHORT)))


@example("offline_inference/chat_with_tools.py")
def chat_with_tools(world: World) -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": "get_current_weather",
                "description": "Get the current weather in a given location",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            },
        }
    ]
    messages = [{"role": "user", "content": "What is the weather in Dallas?"}]
    template = (
        "{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}"
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    )
    (output,) = world.llm.chat(messages, sampling_params=SamplingParams(**SHORT), tools=tools, chat_template=template)
    messages += [
        {"role": "assistant", "content": output.outputs[0].text.strip()},
        {"role": "tool", "content": "It is 85 degrees.", "tool_call_id": "123456789"},
    ]
    texts(world.llm.chat(messages, SamplingParams(**SHORT), tools=tools, chat_template=template))


@example("offline_inference/simple_profiling.py (with the profiler switched off)")
def beams(world: World) -> None:
    outputs = world.llm.beam_search([{"prompt": PROMPTS[0]}], BeamSearchParams(beam_width=2, max_tokens=4))
    assert len(outputs[0].sequences) == 2


@example("features/structured_outputs/structured_outputs_offline.py")
def structured_outputs(world: World) -> None:
    def run(prompt: str, **constraint: Any) -> str:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint), max_tokens=40)
        return texts(world.llm.generate(prompt, sampling_params=params))[0]

    assert run("Classify this sentiment: it is wonderful!", choice=["Positive", "Negative"]) in ("Positive", "Negative")
    assert "@" in run("An email address:", regex=r"[a-z]{1,6}@[a-z]{1,6}\.com\n")
    schema = {
        "type": "object",
        "properties": {"brand": {"type": "string", "maxLength": 6}, "kind": {"enum": ["sedan", "SUV"]}},
        "required": ["brand", "kind"],
    }
    assert json.loads(run("Generate a JSON with the brand and kind of a car:", json=schema))["kind"] in ("sedan", "SUV")
    grammar = 'root ::= "SELECT " column " from " table\ncolumn ::= "col_1" | "col_2"\ntable ::= "table_1" | "table_2"'
    assert run("Generate an SQL query:", grammar=grammar).startswith("SELECT col_")


@example("features/automatic_prefix_caching/automatic_prefix_caching_offline.py")
def automatic_prefix_caching(world: World) -> None:
    llm = world.start("prefix", model=world.model, enable_prefix_caching=True)
    table = "| 1 | John Doe | 29 | Engineer | USA |\n" * 20
    for name in ("John Doe", "Zack Blue"):
        outputs = llm.generate(f"{table}What is the age of {name}? It is ", SamplingParams(temperature=0, max_tokens=4))
    assert outputs[0].num_cached_tokens > 100


@example("features/automatic_prefix_caching/prefix_caching_offline.py")
def prefix_caching(world: World) -> None:
    prefix = "You are an expert school principal, skilled in managing staff. " * 8
    params = SamplingParams(temperature=0.0, max_tokens=4)
    plain = texts(world.llm.generate([prefix + each for each in PROMPTS], params))
    llm = world.start("prefix", model=world.model, enable_prefix_caching=True)
    llm.generate(prefix + PROMPTS[0], params)
    assert texts(llm.generate([prefix + each for each in PROMPTS], params)) == plain


@example("features/batch_invariance/reproducibility_offline.py")
def reproducibility(world: World) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=6, seed=1)
    first, second = (texts(world.llm.generate(PROMPTS, params)) for _ in range(2))
    assert first == second


@example("features/context_extension/context_extension_offline.py")
def context_extension(world: World) -> None:
    overrides = {
        "rope_parameters": {
            "rope_theta": 100000,
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 2048,
        },
        "max_model_len": 4096,
    }
    llm = LLM(model=world.model, hf_overrides=overrides, kv_cache_memory_bytes=128 << 20)
    assert llm.llm_engine.model_config.max_model_len == 4096
    texts(llm.chat(CHAT, SamplingParams(temperature=0.8, top_p=0.95, **SHORT), use_tqdm=False))
    llm.shutdown()


@example("features/data_parallel/data_parallel_offline.py (one rank)")
def data_parallel(world: World) -> None:
    llm = LLM(model=world.model, tensor_parallel_size=1, enforce_eager=True, trust_remote_code=True, **QUICK)
    texts(llm.generate(PROMPTS, [SamplingParams(max_tokens=count) for count in (2, 3, 4, 5)]))
    llm.shutdown()


class OnlyTarget(LogitsProcessor):
    """One token only, for requests with extra_args["target_token"]."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        target = params.extra_args and params.extra_args.get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token {target} is not int")

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self.req_info: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(
            self.req_info,
            batch_update,
            lambda params, _, __: params.extra_args and params.extra_args.get("target_token"),
        )

    def apply(self, logits: Any) -> Any:
        import torch

        if not self.req_info:
            return logits
        columns = torch.tensor(list(self.req_info.values()), dtype=torch.long, device=logits.device)
        rows = torch.tensor(list(self.req_info.keys()), dtype=torch.long, device=logits.device)
        kept = logits[rows, columns].clone()
        logits[rows] = float("-inf")
        logits[rows, columns] = kept
        return logits


class OneRequest:
    def __init__(self, target: int) -> None:
        self.target = target

    def __call__(self, output_ids: list[int], logits: Any) -> Any:
        kept = logits[self.target].item()
        logits[:] = float("-inf")
        logits[self.target] = kept
        return logits


class Wrapped(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> OneRequest | None:
        target = params.extra_args and params.extra_args.get("target_token")
        return None if target is None else OneRequest(target)


class WrappedOnCpu(Wrapped):
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self.is_cpu = device.type == "cpu"

    def new_req_logits_processor(self, params: SamplingParams) -> OneRequest | None:
        return super().new_req_logits_processor(params) if self.is_cpu else None


class TopNSigma(OnlyTarget):
    """Keeps logits within so many standard deviations of the best."""

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(
            self.req_info, batch_update, lambda params, _, __: (params.extra_args or {}).get("top_n_sigma")
        )

    def apply(self, logits: Any) -> Any:
        for row, sigmas in self.req_info.items():
            threshold = logits[row].max() - sigmas * logits[row].std()
            logits[row][logits[row] < threshold] = float("-inf")
        return logits


def with_targets(world: World, processor: Any) -> None:
    llm = LLM(model=world.model, logits_processors=[processor], **QUICK)
    params = [SamplingParams(temperature=0.0, extra_args=extra) for extra in ({"target_token": 128}, None) * 2]
    outputs = llm.generate(PROMPTS, params)
    llm.shutdown()
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids == [128] * 16
    assert outputs[1].outputs[0].token_ids != [128] * 16


@example("features/logits_processor/custom.py")
def custom_processor(world: World) -> None:
    with_targets(world, OnlyTarget)


@example("features/logits_processor/custom_req.py")
def custom_request_processor(world: World) -> None:
    with_targets(world, Wrapped)


@example("features/logits_processor/custom_req_init.py")
def custom_request_processor_with_init(world: World) -> None:
    with_targets(world, WrappedOnCpu)


@example("offline_inference/logits_processor/logits_processor_fqn.py")
def processor_by_name(world: World) -> None:
    with_targets(world, f"{__name__}:OnlyTarget")


@example("features/logits_processor/top_n_sigma.py")
def top_n_sigma(world: World) -> None:
    llm = LLM(model=world.model, logits_processors=[TopNSigma], **QUICK)
    extras = ({"top_n_sigma": 2.0}, None, {"top_n_sigma": 1.0}, None)
    outputs = llm.generate(PROMPTS, [SamplingParams(temperature=0.8, max_tokens=6, extra_args=each) for each in extras])
    llm.shutdown()
    assert all(texts(outputs))


@example("features/reset_kv/reset_kv_offline.py")
def reset_kv(world: World) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parsed(world)))
    long = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=8)
    prompts = [("A robot may not injure a human being " * 8, long)] * 2
    prompts.append(("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95, max_tokens=8)))
    finished, step = [], 0
    while prompts or engine.has_unfinished_requests():
        if prompts:
            engine.add_request(str(step), *prompts.pop(0))
        if step == 5:
            assert engine.reset_prefix_cache(reset_running_requests=True)
        finished += [output for output in engine.step() if output.finished]
        step += 1
    engine.shutdown()
    assert len(finished) == 3


@example("deployment/llm_engine_example.py")
def llm_engine(world: World) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parsed(world)))
    engine.add_request("0", "A robot may not", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1))
    engine.add_request("1", "To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2))
    engine.add_request("2", "What is?", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1))
    finished = []
    while engine.has_unfinished_requests():
        finished += [output.request_id for output in engine.step() if output.finished]
    engine.shutdown()
    assert sorted(finished) == ["0", "1", "2"]


def with_async_engine(world: World, use: Callable[[AsyncLLM], Any], **args: Any) -> None:
    async def run() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=world.model, enforce_eager=True, **QUICK, **args))
        try:
            await use(engine)
        finally:
            engine.shutdown()

    asyncio.run(run())


@example("deployment/async_llm_streaming.py")
def async_streaming(world: World) -> None:
    async def stream(engine: AsyncLLM) -> None:
        params = SamplingParams(
            max_tokens=10, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA
        )
        for number, prompt in enumerate(PROMPTS[:3]):
            pieces = []
            async for output in engine.generate(request_id=f"s-{number}", prompt=prompt, sampling_params=params):
                pieces += [completion.text for completion in output.outputs]
                if output.finished:
                    break
            assert len(pieces) > 2

    with_async_engine(world, stream)


@example("features/pause_resume/data_parallel_pause_resume.py (mode wait, one rank)")
def pause_resume(world: World) -> None:
    async def pause(engine: AsyncLLM) -> None:
        async def one() -> Any:
            params = SamplingParams(max_tokens=12, ignore_eos=True)
            async for output in engine.generate(PROMPTS[0], params, "r"):
                last = output
            return last

        await engine.pause_generation(mode="wait")
        assert await engine.is_paused()
        running = asyncio.create_task(one())
        for _ in range(100):  # it would be with the engine after a few
            await asyncio.sleep(0)
        assert (running.done(), engine.num_unfinished) == (False, 0)
        await engine.resume_generation()
        assert len((await running).outputs[0].token_ids) == 12
        await engine.wait_for_requests_to_drain()

    with_async_engine(world, pause)


@example("features/pause_resume/pause_resume_offline.py")
def pause_keep(world: World) -> None:
    async def pause(engine: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        tokens: list[int] = []
        async for output in engine.generate(PROMPTS[0], params, "r"):
            if not tokens:
                await engine.pause_generation(mode="keep")
                await engine.resume_generation()
            tokens += output.outputs[0].token_ids
        assert len(tokens) == 12

    with_async_engine(world, pause)


@example("offline_inference/async_engine.py (AsyncLLMEngine)")
def async_engine(world: World) -> None:
    assert AsyncLLMEngine is AsyncLLM

    async def ask(engine: AsyncLLM) -> None:
        tokenizer = await engine.get_tokenizer()
        prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        outputs = [each async for each in engine.generate(prompt, SamplingParams(**SHORT), "x")]
        assert outputs[-1].finished
        assert await engine.get_supported_tasks() == ("generate",)
        assert not await engine.is_tracing_enabled()

    with_async_engine(world, ask)


@example("features/profiling/simple_profiling_offline.py")
def profiled(world: World) -> None:
    with TemporaryDirectory() as folder:
        config = ProfilerConfig(profiler="torch", torch_profiler_dir=folder)
        llm = LLM(model=world.model, tensor_parallel_size=1, profiler_config=config)
        llm.start_profile()
        texts(llm.generate(PROMPTS, SamplingParams(**SHORT)))
        llm.stop_profile()
        llm.shutdown()
        assert [path.name.endswith(".pt.trace.json.gz") for path in Path(folder).iterdir()] == [True]


@example("features/profiling/run_one_batch_offline.py (--profile none)")
def run_one_batch(world: World) -> None:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model=world.model)
    group = parser.add_argument_group("Batch parameters")
    group.add_argument("--batch-size", type=int, default=1)
    group.add_argument("--prompt-size", type=int, default=128)
    args = vars(parser.parse_args(["--batch-size", "2", "--max-model-len", "256"]))
    size, length = args.pop("batch_size"), args.pop("prompt_size")
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    params.max_tokens, params.min_tokens, params.ignore_eos = 4, 4, True
    outputs = llm.generate([("Hello, my name is" * 10)[:length]] * size, params)
    llm.shutdown()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 4]


@example("features/prompt_embed/prompt_embed_offline.py")
def prompt_embeds(world: World) -> None:
    import torch

    llm = LLM(model=world.model, enable_prompt_embeds=True, **QUICK)
    width = llm.llm_engine.model_config.get_hidden_size()
    outputs = llm.generate([{"prompt_embeds": torch.randn(5, width)}, {"prompt_embeds": torch.randn(3, width)}])
    llm.shutdown()
    assert len(outputs) == 2


@example("observability/metrics/metrics_offline.py")
def metrics(world: World) -> None:
    llm = LLM(model=world.model, disable_log_stats=False, **QUICK)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    kinds = set()
    totals = {}
    for metric in llm.get_metrics():
        kinds.add(type(metric))
        if isinstance(metric, Counter | Gauge):
            totals[metric.name] = metric.value
        elif isinstance(metric, Histogram):
            assert metric.buckets["+Inf"] == metric.count
    llm.shutdown()
    assert {Counter, Gauge, Histogram} <= kinds
    assert totals["vllm:generation_tokens"] == sum(len(output.outputs[0].token_ids) for output in outputs)


@example("offline_inference/llm_enqueue.py (enqueue and wait_for_completion)")
def enqueue(world: World) -> None:
    ids = world.llm.enqueue(PROMPTS, SamplingParams(**SHORT))
    ids += world.llm.enqueue_chat(CHAT, SamplingParams(**SHORT))
    assert [output.request_id for output in world.llm.wait_for_completion()] == ids
    assert world.llm.wait_for_completion() == []


@example("rl/apply_model (LLM.apply_model and collective_rpc)")
def apply_model(world: World) -> None:
    assert world.llm.apply_model(lambda model: type(model).__name__) == ["Decoder"]
    assert world.llm.collective_rpc(lambda worker, a, b=0: a + b, args=(1,), kwargs={"b": 2}) == [3]
    assert world.llm.collective_rpc("check_health") == [None]


@example("offline_inference/gguf_inference.py")
def gguf(world: World) -> None:
    llm = LLM(model=world.gguf, **QUICK)
    tokenizer = llm.get_tokenizer()
    prompts = tokenizer.apply_chat_template([[each] for each in CHAT[1:2]], tokenize=False, add_generation_prompt=True)
    texts(llm.generate(prompts, SamplingParams(temperature=0, **SHORT)))
    llm.shutdown()


@example("pooling/embed/embed_matryoshka_fy_offline.py")
def matryoshka(world: World) -> None:
    llm = LLM(model=world.model, runner="pooling", hf_overrides={"is_matryoshka": True})
    (output,) = llm.embed(["Follow the white rabbit."], pooling_params=PoolingParams(dimensions=8))
    llm.shutdown()
    assert len(output.outputs.embedding) == 8


@example("pooling/token_embed/multi_vector_retrieval_offline.py")
def token_embed(world: World) -> None:
    import torch

    (output,) = world.embedder.encode(PROMPTS[:1], pooling_task="token_embed")
    assert isinstance(output.outputs.data, torch.Tensor)
    assert output.outputs.data.ndim == 2


@example("pooling/embed/embedding_requests (PoolerConfig, truncate_prompt_tokens)")
def pooler_config(world: World) -> None:
    llm = LLM(model=world.model, runner="pooling", pooler_config=PoolerConfig(pooling_type="MEAN"))
    (output,) = llm.embed("One two three four five six", truncate_prompt_tokens=4)
    llm.shutdown()
    assert len(output.prompt_token_ids) == 4


@example("offline_inference/torchrun_example.py (one process)")
def torchrun(world: World) -> None:
    llm = LLM(model=world.model, tensor_parallel_size=1, pipeline_parallel_size=1, seed=1, **QUICK)
    assert llm.llm_engine.vllm_config.parallel_config.world_size == 1
    texts(llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95, **SHORT)))
    llm.shutdown()


@example("features/compile (CompilationConfig, compilation_config=3)")
def compilation(world: World) -> None:
    llm = LLM(model=world.model, compilation_config=3, **QUICK)
    texts(llm.generate([TextPrompt(prompt=PROMPTS[0])], SamplingParams(**SHORT)))
    llm.shutdown()
    config = CompilationConfig(mode=3, cudagraph_capture_sizes=[1, 2])
    assert EngineArgs(world.model, compilation_config=config).create_engine_config().compilation.capture_sizes == (1, 2)


@example("offline_inference/hf_overrides (a callable)")
def overrides_by_callable(world: World) -> None:
    def change(config: Any) -> Any:
        config.update({"rope_theta": 50000.0})
        config.max_position_embeddings = 512
        return config

    llm = LLM(model=world.model, hf_overrides=change, kv_cache_memory_bytes=64 << 20)
    assert llm.llm_engine.model_config.max_model_len == 512
    assert llm.llm_engine.model_config.hf_config.max_position_embeddings == 512
    llm.shutdown()


@example("features/lora/multilora_offline.py")
@example("features/lora/lora_with_quantization_offline.py")
def adapters_on_quantised_weights(world: World) -> None:
    modules = llama_modules(576, 1536, 9, 3, 30)
    paths = [write_adapter(world.folder / f"lora{seed}", modules, seed=seed, scale=0.1) for seed in (1, 2)]
    engine = LLMEngine.from_engine_args(EngineArgs(world.gguf, enable_lora=True, max_loras=1, max_cpu_loras=2, **QUICK))
    requests = [None, *(LoRARequest(path.name, index, str(path)) for index, path in enumerate(paths, 1))]
    for index, lora in enumerate([*requests, *requests]):
        engine.add_request(str(index), PROMPTS[0], SamplingParams(temperature=0, **SHORT), lora_request=lora)
    answers: dict[str, str] = {}
    while engine.has_unfinished_requests():
        answers |= {output.request_id: output.outputs[0].text for output in engine.step() if output.finished}
    engine.shutdown()
    assert len({answers[str(index)] for index in range(3)}) == 3
    assert [answers[str(index)] for index in range(3)] == [answers[str(index)] for index in range(3, 6)]


def speculative(world: World, drafter: str, **settings: Any) -> tuple[LLM, list[Any]]:
    """An engine with random weights whose drafts are a drafter's, and its prompts by token ids."""
    target = tiny_folder.write_model(world.folder / "target", num_hidden_layers=3)
    folder = DRAFTERS[drafter](world.folder / drafter)
    llm = LLM(
        model=str(target),
        tensor_parallel_size=1,
        max_model_len=64,
        speculative_config={"model": str(folder), **settings},
        disable_log_stats=False,
        kv_cache_memory_bytes=1 << 24,
    )
    tokenizer = llm.get_tokenizer()
    return llm, [TokensPrompt(prompt_token_ids=tokenizer.encode(prompt)[:20]) for prompt in PROMPTS]


def counted(llm: LLM, drafts: int) -> None:
    """The metrics that examples of speculative decoding print."""
    numbers = {metric.name: metric for metric in llm.get_metrics()}
    drafted, accepted = (
        numbers[f"vllm:spec_decode_{name}"] for name in ("num_draft_tokens", "num_accepted_tokens_per_pos")
    )
    assert isinstance(drafted, Counter)
    assert drafted.value > 0
    assert isinstance(accepted, Vector)
    assert len(accepted.values) == drafts


@example("features/speculative_decoding/spec_decode_offline.py (ngram)")
def prompt_lookup(world: World) -> None:
    lookup = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    llm = LLM(model=world.model, speculative_config=lookup, disable_log_stats=False, **QUICK)
    prompts = [TokensPrompt(prompt_token_ids=llm.get_tokenizer().encode("one two three " * 8))]
    texts(llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24)))
    counted(llm, 2)
    llm.shutdown()


@example("features/speculative_decoding/spec_decode_offline.py (draft_model)")
def draft_model(world: World) -> None:
    llm, prompts = speculative(
        world, "draft_model", method="draft_model", num_speculative_tokens=2, enforce_eager=False, max_model_len=64
    )
    texts(llm.generate(prompts, sampling_params=SamplingParams(temperature=0, max_tokens=24)))
    counted(llm, 2)
    llm.shutdown()


@example("features/speculative_decoding/spec_decode_offline.py (eagle)")
@example("offline_inference/eagle.py")
def eagle(world: World) -> None:
    for method in ("eagle", "eagle3"):
        llm, prompts = speculative(world, method, method=method, num_speculative_tokens=3)
        texts(llm.generate(prompts, sampling_params=SamplingParams(temperature=0, max_tokens=24)))
        counted(llm, 3)
        llm.shutdown()


@example("features/speculative_decoding/mlpspeculator_offline.py")
def accelerator(world: World) -> None:
    llm, prompts = speculative(world, "mlp_speculator")
    texts(llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24)))
    counted(llm, 3)
    llm.shutdown()


@example("offline_inference/dynamic_spec_decode.py")
def drafts_by_batch_size(world: World) -> None:
    llm, prompts = speculative(
        world, "draft_model", method="draft_model", num_speculative_tokens=2, disable_by_batch_size=3
    )
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    texts(llm.generate(prompts, params))
    numbers = {metric.name: metric for metric in llm.get_metrics()}
    assert numbers["vllm:spec_decode_num_drafts"].value == 0, "four sequences run"
    texts(llm.generate(prompts[:1], params))
    counted(llm, 2)
    llm.shutdown()


LORA = LoRARequest("sql-lora", 1, "/tmp/adapter")
REFUSED: dict[str, tuple[Callable[[World], Any], str]] = {
    "features/speculative_decoding/extract_hidden_states_offline.py": (
        lambda w: EngineArgs(w.model, speculative_config={"method": "extract_hidden_states"}).create_engine_config(),
        "hidden states are not exported",
    ),
    "alora/alora_offline_example.py": (lambda w: w.llm.llm_engine.add_lora(LORA), "enable-lora"),
    **dict.fromkeys(
        (
            *("disaggregated/disaggregated_prefill.py", "disaggregated/example_connector/prefill_example.py"),
            *("disaggregated/example_connector/decode_example.py", "disaggregated/lmcache/cpu_offload_lmcache.py"),
            "disaggregated/kv_load_failure_recovery_offline/prefill_example.py",
            "disaggregated/flexkv_connector/prefix_caching_flexkv.py",
        ),
        (
            lambda w: EngineArgs(w.model, kv_transfer_config=KVTransferConfig(kv_connector="X", kv_role="kv_both")),
            "kv-transfer-config",
        ),
    ),
    "features/kv_events/kv_events_subscriber.py": (
        lambda w: EngineArgs(w.model, kv_events_config=KVEventsConfig(enable_kv_cache_events=True)),
        "kv-events-config",
    ),
    **dict.fromkeys(
        (
            *("offline_inference/vision_language.py", "offline_inference/vision_language_multi_image.py"),
            *("offline_inference/audio_language.py", "offline_inference/encoder_decoder_multimodal.py"),
            *("offline_inference/qwen2_5_omni/only_thinker.py", "offline_inference/prithvi_geospatial_mae.py"),
        ),
        (lambda w: import_module("pagoda.assets.image"), "images, audio or video"),
    ),
    "offline_inference/mistral-small.py": (
        lambda w: w.llm.generate({"prompt": "<image>", "multi_modal_data": {"image": object()}}),
        "multi_modal_data",
    ),
    "features/sharded_state/save_sharded_state_offline.py": (
        lambda w: import_module("pagoda.model_executor.model_loader"),
        "pagoda convert",
    ),
    "offline_inference/cuda_graph_sleep_mode.py (on a CPU)": (
        lambda w: LLM(w.model, enable_sleep_mode=True, backend="reference"),
        "enable-sleep-mode",
    ),
    "features/routed_experts/routed_experts_offline.py": (
        lambda w: LLM(w.model, enable_return_routed_experts=True),
        "enable_return_routed_experts",
    ),
    **dict.fromkeys(
        ("rl/rlhf.py", "rl/rlhf_colocate.py", "rl/rlhf_online_quant.py"),
        (
            lambda w: EngineArgs(w.model, worker_extension_cls="rlhf_utils.WorkerExtension"),
            "worker-extension-cls",
        ),
    ),
    "rl/weight_transfer": (lambda w: w.llm.init_weight_transfer_engine({}), "weights cannot be replaced"),
}


@pytest.fixture(scope="module")
def world(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("examples")
    made = World(str(write_twin(folder / "twin", model_file)), str(model_file), folder)
    yield made
    made.close()


ALIKE = (
    "deployment/async_llm_streaming.py",
    "offline_inference/async_engine.py (AsyncLLMEngine)",
    "features/logits_processor/custom_req_init.py",
    "offline_inference/logits_processor/logits_processor_fqn.py",
)
"""Examples that start engines of their own for calls that other examples make, too."""


@pytest.mark.parametrize("path", some(list(WORKING), [path for path in WORKING if path not in ALIKE]))
def test_an_example_works(path: str, world: World) -> None:
    WORKING[path](world)


@pytest.mark.parametrize("path", REFUSED)
def test_an_example_is_refused_by_name(path: str, world: World) -> None:
    call, reason = REFUSED[path]
    with pytest.raises((ValueError, ImportError, AttributeError), match=reason):
        call(world)


def test_at_least_thirty_work() -> None:
    assert len(WORKING) >= 30
    assert not WORKING.keys() & REFUSED.keys()
