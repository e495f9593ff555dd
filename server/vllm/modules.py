"""vLLM's module paths, in one table: `pagoda.v1.engine.async_llm` and the others hold pagoda's own objects.

`pagoda/__init__.py` registers `find`, which answers imports of paths that pagoda has no file for. The package `vllm` of
server.vllm.stand_in registers it for vLLM's own paths. A path or name whose feature does not exist raises
ModuleNotFoundError with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from typing import Any, Final

_CONFIG: Final = "pagoda.common.config"
_PARAMS: Final = "pagoda.common.sampling_params"
_FLAGS: Final = "pagoda.server.settings.flags"
_HELPERS: Final = "pagoda.server.vllm.script_helpers"
_REQUESTS: Final = "pagoda.server.vllm.request_types"
_PROCESSORS: Final = "pagoda.server.vllm.logits_processors"
_PARSERS: Final = "pagoda.server.vllm.parser_interface"
_TOKENIZER: Final = "pagoda.server.vllm.tokenizer_view"
_TENSORS: Final = "pagoda.server.api.pooling.encoding"

VLLM_VERSION: Final = "0.32.0"
"""The version of vLLM whose interface this is: what programs that compare `vllm.__version__` are told."""

_KEYS: Final = (
    *("AttentionConfig", "CompilationConfig", "ECTransferConfig", "KVEventsConfig", "KVTransferConfig"),
    *("PoolerConfig", "ProfilerConfig", "SpeculativeConfig", "StructuredOutputsConfig", "WeightTransferConfig"),
)
"""Configuration objects of vLLM that are settings with keys here."""

HOMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("RepetitionDetectionParams", "RequestOutputKind", "SamplingParams", "SamplingType"), _PARAMS),
    "StructuredOutputsParams": _PARAMS,
    **dict.fromkeys(("Logprob", "LogprobsOnePosition", "PromptLogprobs", "SampleLogprobs"), "pagoda.server.outputs"),
    **dict.fromkeys(("Counter", "Gauge", "Histogram", "Metric", "Vector"), "pagoda.server.vllm.metrics_reader"),
    **dict.fromkeys(
        ("AdapterLogitsProcessor", "BatchUpdate", "MoveDirectionality", "RequestLogitsProcessor"), _PROCESSORS
    ),
    "process_dict_updates": _PROCESSORS,
    "BeamSearchOutput": "pagoda.server.processing.beams",
    "BeamSearchSequence": "pagoda.server.processing.beams",
    "BeamSearchParams": "pagoda.common.beam_search",
    "PoolingParams": "pagoda.common.pooling_params",
    "ModelRegistry": "pagoda.common.models.registry",
    **dict.fromkeys(
        ("EmbedsPrompt", "ExplicitEncoderDecoderPrompt", "LoRARequest", "TextPrompt", "TokensPrompt"), _REQUESTS
    ),
    "PromptType": "pagoda.server.processing.inputs",
    **dict.fromkeys(
        (
            *("ClassificationOutput", "ClassificationRequestOutput", "CompletionOutput", "EmbeddingOutput"),
            *("EmbeddingRequestOutput", "PoolingOutput", "PoolingRequestOutput", "RequestOutput", "ScoringOutput"),
            "ScoringRequestOutput",
        ),
        "pagoda.server.outputs",
    ),
    **dict.fromkeys(
        (
            *("BaseThinkingReasoningParser", "ChatCompletionNamedFunction", "ChatCompletionNamedToolChoiceParam"),
            *("ChatCompletionToolsParam", "DeepSeekR1ReasoningParser", "DeltaFunctionCall", "DeltaMessage"),
            *("DeltaToolCall", "ExtractedToolCallInformation", "FunctionCall", "FunctionDefinition"),
            *("ReasoningParser", "ReasoningParserManager", "ToolParser", "ToolParserManager", "consume_space"),
            *("extract_intermediate_diff", "find_common_prefix", "find_common_suffix", "is_complete_json"),
            *("make_tool_call_id", "partial_json_loads"),
        ),
        _PARSERS,
    ),
    **dict.fromkeys(("LoRAResolver", "LoRAResolverRegistry"), _REQUESTS),
    "ResponsesRequest": "pagoda.server.api.openai.responses.request",
    "resolve_chat_template": _TOKENIZER,
    "LLM": "pagoda.server.llm",
    "LLMEngine": "pagoda.server.llm_engine",
    "AsyncLLM": "pagoda.server.async_llm",
    **dict.fromkeys(
        (
            *("EMBED_DTYPES", "ENDIANNESS", "EmbedDType", "Endianness", "EncodingFormat", "MetadataItem"),
            *("binary2tensor", "decode_pooling_output", "tensor2base64", "tensor2binary"),
        ),
        _TENSORS,
    ),
    "AsyncEngineArgs": _FLAGS,
    "EngineArgs": _FLAGS,
    "CacheConfig": f"{_CONFIG}.groups.cache",
    "ModelConfig": f"{_CONFIG}.groups.model",
    "LoadConfig": f"{_CONFIG}.groups.model",
    "LoRAConfig": f"{_CONFIG}.groups.model",
    "MultiModalConfig": f"{_CONFIG}.groups.model",
    "ObservabilityConfig": f"{_CONFIG}.groups.observability",
    "ParallelConfig": f"{_CONFIG}.groups.parallel",
    "SchedulerConfig": f"{_CONFIG}.groups.scheduler",
    **dict.fromkeys(
        (
            *("UsageContext", "cleanup_dist_env_and_memory", "current_platform", "get_ip", "get_open_port"),
            *("init_logger", "random_uuid", "CUDAGraphMode", "CompilationMode", "CountUp", "get_tokenizer"),
            *("print_embeddings", "ChatCompletionMessageParam"),
        ),
        _HELPERS,
    ),
}
"""Public name -> the module that defines it."""

RENAMED: Final[Mapping[str, tuple[str, str]]] = {
    "AsyncLLMEngine": ("pagoda.server.async_llm", "AsyncLLM"),
    "FlexibleArgumentParser": (_FLAGS, "ScriptParser"),
    "VllmConfig": (f"{_CONFIG}.engine", "EngineConfig"),
    **dict.fromkeys(_KEYS, (_HELPERS, "ConfigKeys")),
    "AnyTokenizer": (_TOKENIZER, "HfTokenizer"),
    "TokenizerLike": (_TOKENIZER, "HfTokenizer"),
    "LogitsProcessor": (_PROCESSORS, "BatchLogitsProcessor"),
    "ChatCompletionRequest": (_PARSERS, "ParserRequest"),
    "Tool": (_PARSERS, "ChatCompletionToolsParam"),
    "ToolCall": (_PARSERS, "PluginToolCall"),
    "resolve_hf_chat_template": (_TOKENIZER, "resolve_chat_template"),
    "__getattr__": (_HELPERS, "variable"),
    "load_chat_template": ("pagoda.common.text.chat_template", "read_chat_template"),
    "__version__": ("pagoda", "__version__"),
}
"""vLLM's name -> where pagoda's is, and what it is called."""

_LOGPROBS: Final = "Logprob LogprobsOnePosition PromptLogprobs SampleLogprobs"
_OUTPUTS: Final = " ".join(
    name for name, home in HOMES.items() if home == "pagoda.server.outputs" and name not in _LOGPROBS.split()
)
_CONFIGS: Final = " ".join(
    (*(name for name, home in HOMES.items() if home.startswith(_CONFIG)), *_KEYS, "CUDAGraphMode", "CompilationMode")
)
_LOGITS: Final = "AdapterLogitsProcessor BatchUpdate LogitsProcessor MoveDirectionality RequestLogitsProcessor"
_CHAT_REQUESTS: Final = (
    "ChatCompletionNamedFunction ChatCompletionNamedToolChoiceParam ChatCompletionRequest ChatCompletionToolsParam"
)
_PARSED: Final = (
    "DeltaFunctionCall DeltaMessage DeltaToolCall ExtractedToolCallInformation FunctionCall FunctionDefinition ToolCall"
)
_TOOL_PARSERS: Final = "ToolParser ToolParserManager"
_REASONING_PARSERS: Final = "ReasoningParser ReasoningParserManager"
_PARSER_HELPERS: Final = (
    "consume_space extract_intermediate_diff find_common_prefix find_common_suffix is_complete_json partial_json_loads"
)
_INPUTS: Final = "EmbedsPrompt ExplicitEncoderDecoderPrompt PromptType TextPrompt TokensPrompt"

MODULES: Final[Mapping[str, str]] = {
    "beam_search": "BeamSearchOutput BeamSearchParams BeamSearchSequence",
    "config": f"{_CONFIGS} VllmConfig",
    "config.compilation": "CUDAGraphMode CompilationConfig CompilationMode",
    "config.vllm": "VllmConfig",
    "distributed": "cleanup_dist_env_and_memory",
    "distributed.parallel_state": "cleanup_dist_env_and_memory",
    "engine.arg_utils": "AsyncEngineArgs EngineArgs",
    "engine.async_llm_engine": "AsyncLLMEngine",
    "engine.llm_engine": "LLMEngine",
    "entrypoints.chat_utils": (
        "ChatCompletionMessageParam load_chat_template make_tool_call_id resolve_hf_chat_template"
    ),
    "entrypoints.generate.base.protocol": _PARSED,
    "entrypoints.llm": "LLM",
    "entrypoints.openai.chat_completion.protocol": _CHAT_REQUESTS,
    "entrypoints.openai.engine.protocol": _PARSED,
    "entrypoints.openai.protocol": f"{_CHAT_REQUESTS} {_PARSED} ResponsesRequest",
    "entrypoints.openai.responses.protocol": "ResponsesRequest",
    "entrypoints.openai.tool_parsers": _TOOL_PARSERS,
    "entrypoints.openai.tool_parsers.abstract_tool_parser": f"Tool {_TOOL_PARSERS}",
    "entrypoints.openai.tool_parsers.utils": _PARSER_HELPERS,
    "envs": "__getattr__",
    "inputs": _INPUTS,
    "inputs.data": _INPUTS,
    "inputs.llm": _INPUTS,
    "logger": "init_logger",
    "logprobs": _LOGPROBS,
    "lora.request": "LoRARequest",
    "lora.resolver": "LoRAResolver LoRAResolverRegistry",
    "model_executor.models": "ModelRegistry",
    "model_executor.models.registry": "ModelRegistry",
    "outputs": _OUTPUTS,
    "platforms": "current_platform",
    "pooling_params": "PoolingParams",
    "reasoning": _REASONING_PARSERS,
    "reasoning.abs_reasoning_parsers": _REASONING_PARSERS,
    "reasoning.basic_parsers": "BaseThinkingReasoningParser",
    "reasoning.deepseek_r1_reasoning_parser": "DeepSeekR1ReasoningParser",
    "renderers.hf": "resolve_chat_template",
    "sampling_params": (
        "BeamSearchParams RepetitionDetectionParams RequestOutputKind SamplingParams SamplingType "
        "StructuredOutputsParams"
    ),
    "tokenizers": "TokenizerLike get_tokenizer",
    "tool_parsers": _TOOL_PARSERS,
    "tool_parsers.abstract_tool_parser": f"Tool {_TOOL_PARSERS}",
    "tool_parsers.utils": f"Tool {_PARSER_HELPERS}",
    "transformers_utils.tokenizer": "AnyTokenizer get_tokenizer",
    "usage.usage_lib": "UsageContext",
    "utils": "CountUp:Counter FlexibleArgumentParser cleanup_dist_env_and_memory get_ip get_open_port random_uuid",
    "utils.argparse_utils": "FlexibleArgumentParser",
    "utils.counter": "CountUp:Counter",
    "utils.network_utils": "get_ip get_open_port",
    "utils.print_utils": "print_embeddings",
    "utils.serial_utils": (
        "EMBED_DTYPES ENDIANNESS EmbedDType Endianness EncodingFormat MetadataItem binary2tensor decode_pooling_output "
        "tensor2base64 tensor2binary"
    ),
    "v1.engine.async_llm": "AsyncLLM",
    "v1.engine.llm_engine": "LLMEngine",
    "v1.metrics.reader": "Counter Gauge Histogram Metric Vector",
    "v1.sample.logits_processor": _LOGITS,
    "v1.sample.logits_processor.builtin": "process_dict_updates",
    "v1.sample.logits_processor.interface": "BatchUpdate LogitsProcessor MoveDirectionality",
    "version": "__version__",
}
"""vLLM's module below `vllm` -> the names in it; `own:name` where another module has another object of that name."""

PROGRAMS: Final[Mapping[str, str]] = {
    "entrypoints.cli.main": "pagoda.server.cli.main",
    "entrypoints.openai.api_server": "pagoda.server.cli.api_server",
}
"""vLLM's module that can be run by `python -m` -> the module with its `main`."""

_INTERNAL: Final = "it is a part of vLLM's inside, which pagoda has otherwise"
_WEIGHTS: Final = "weights cannot be replaced from another process; use sleep(level=2) and wake_up() after new files"
_RENDERING: Final = "prompts are rendered by LLM.preprocess_chat and get_tokenizer().apply_chat_template()"
_SERVER: Final = "the server is the command `pagoda serve`; requests without HTTP go to AsyncLLM"
MISSING: Final[Mapping[str, str]] = {
    "assets": "models that take images, audio or video are not served yet",
    "multimodal": "models that take images, audio or video are not served yet",
    "distributed.kv_transfer": "KV transfer between engines is not implemented",
    "distributed.kv_events": "KV events are not implemented",
    "attention": _INTERNAL,
    "model_executor.layers": _INTERNAL,
    "model_executor.model_loader": "weights are saved per device by `pagoda convert`, and loaded by the engine alone",
    "benchmarks.datasets": "benchmarks are commands here: `pagoda bench`",
    "compilation": _INTERNAL,
    "distributed.device_communicators": _WEIGHTS,
    "distributed.ec_transfer": "KV transfer between engines is not implemented",
    "distributed.utils": _WEIGHTS,
    "distributed.weight_transfer": _WEIGHTS,
    "entrypoints.chat_utils.apply_hf_chat_template": _RENDERING,
    "entrypoints.chat_utils.parse_chat_messages": _RENDERING,
    "entrypoints.chat_utils.resolve_chat_template_content_format": _RENDERING,
    "entrypoints.cli.serve": _SERVER,
    "entrypoints.openai.api_server.build_app": _SERVER,
    "entrypoints.openai.api_server.init_app_state": _SERVER,
    "forward_context": _INTERNAL,
    "lora.lora_model": _INTERNAL,
    "lora.models": _INTERNAL,
    "lora.peft_helper": _INTERNAL,
    "lora.utils": _INTERNAL,
    "lora.worker_manager": _INTERNAL,
    "model_executor.models.interfaces": _INTERNAL,
    "model_executor.parameter": _INTERNAL,
    "plugins.io_processors": "IO processor plugins are not in this version",
    "pooling_params.LateChunkingParams": (
        "late chunking is not implemented; pool with the task token_embed and average the rows of each chunk"
    ),
    "pooling_params.LateInteractionParams": "documents are not stored for later queries",
    "profiler": "profiles are taken by start_profile() and stop_profile(), with profiler_config",
    "renderers.base": _RENDERING,
    "renderers.params": _RENDERING,
    "renderers.registry": _RENDERING,
    "sampling_params.GuidedDecodingParams": "vLLM 0.12 removed it; use StructuredOutputsParams",
    "transformers_utils.config": _INTERNAL,
    "transformers_utils.processor": "models that take images, audio or video are not served yet",
    "triton_utils": _INTERNAL,
    "v1.attention": _INTERNAL,
    "v1.core": _INTERNAL,
    "v1.executor": _INTERNAL,
    "v1.kv_offload": _INTERNAL,
    "v1.metrics.loggers": "custom loggers are not supported; read get_metrics() or /metrics",
    "v1.metrics.ray_wrappers": "custom loggers are not supported; read get_metrics() or /metrics",
    "v1.outputs": _INTERNAL,
    "v1.request": _INTERNAL,
    "v1.spec_decode": _INTERNAL,
    "v1.worker": _INTERNAL,
}
"""vLLM's module or name in a module, with all below it -> why pagoda has none."""

_OWN: Final = {"as_vllm": "install main"}
"""Modules of pagoda's own that have no file at the top."""

_STAND_IN: Final = "vllm"


class _ModuleOfNames(InspectLoader):
    """Modules whose source is the import of their names.

    Every module below `vllm` is a package: for `from vllm.x import name` Python then asks `find` for `vllm.x.name`,
    whose error has the reason why there is none.
    """

    def is_package(self, fullname: str) -> bool:
        package, _, name = fullname.partition(".")
        if package == _STAND_IN:
            return not name.endswith(".__main__")
        return any(other.startswith(f"{name}.") for other in (*MODULES, *PROGRAMS, *MISSING))

    def get_source(self, fullname: str) -> str:
        """Return the source of a module that `find` knows."""
        package, _, name = fullname.partition(".")
        program = PROGRAMS.get(name.removesuffix(".__main__")) or (_STAND_IN_FOLDER if name in _OWN else None)
        if program is not None:
            return (
                f"from {program} import {_OWN.get(name, 'main').replace(' ', ', ')}\n"
                "if __name__ == '__main__':\n    raise SystemExit(main())\n"
            )
        words = MODULES.get(name, "").split()
        lines = [_import(word, package) for word in words]
        if "__getattr__" not in words:
            lines.append(f"from {__name__} import missing_attribute as _missing")
            lines.append("def __getattr__(name):\n    raise _missing(__name__, name)")
        return "\n".join(lines) + "\n"


_STAND_IN_FOLDER: Final = "pagoda.server.vllm.stand_in"
_LOADER: Final = _ModuleOfNames()


def missing_attribute(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module of vLLM has and pagoda's does not, with the reason if it is known."""
    path = f"{module}.{name}".partition(".")[2]
    why = f": {MISSING[path]}" if path in MISSING else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{why}", name=name)


def _import(word: str, package: str) -> str:
    name, _, alias = word.partition(":")
    if alias:
        return f"from {HOMES[name]} import {name} as {alias}"
    if name == "__version__" and package == _STAND_IN:
        return f"from {__name__} import VLLM_VERSION as __version__"
    if name in RENAMED:
        module, target = RENAMED[name]
        return f"from {module} import {target} as {name}"
    return f"from {HOMES[name]} import {name} as {name}"


def public_object(name: str) -> Any:
    """Import and return what a public name stands for."""
    module, target = RENAMED.get(name) or (HOMES[name], name)
    return getattr(import_module(module), target)


def find(fullname: str) -> ModuleSpec | None:
    """Return how to import a path of vLLM, below `pagoda` or `vllm`; None for others below `pagoda`.

    Raises ModuleNotFoundError with the reason for a path whose feature is missing, and for all others below `vllm`. The
    error's `name` is not set: Python would drop the reason in `from module import name`.
    """
    package, _, name = fullname.partition(".")
    below = f"{name}."
    if (
        name in MODULES
        or name.removesuffix(".__main__") in PROGRAMS
        or (package != _STAND_IN and name in _OWN)
        or any(other.startswith(below) for other in (*MODULES, *PROGRAMS))
    ):
        return ModuleSpec(fullname, _LOADER, is_package=_LOADER.is_package(fullname))
    for missing, why in MISSING.items():
        if f"{name}.".startswith(f"{missing}."):
            raise ModuleNotFoundError(f"there is no {fullname}: {why}")
    if any(other.startswith(below) for other in MISSING):
        return ModuleSpec(fullname, _LOADER, is_package=True)
    if package == _STAND_IN:
        raise ModuleNotFoundError(f"there is no {fullname}: pagoda, which stands in for vLLM, has no counterpart of it")
    return None
