"""Variables of vLLM and its surroundings that mean nothing here or cannot be had, each with its reason."""

from __future__ import annotations

from typing import Final

from pagoda.common.config.env_var import OFF, EnvVar

_NOTHING_TO_BUILD: Final = "pagoda is plain Python; nothing is compiled when it is installed"
_NOTHING_SENT: Final = "no usage data is ever collected or sent"
_ONE_NODE: Final = "this version runs on one node, and its processes talk over Unix sockets"
_NO_RANKS: Final = "one process drives all devices of a host, by XLA; there are no ranks and no NCCL"
_ONE_KERNEL: Final = "--attention-backend alone names the attention kernel"
_NO_GPU: Final = "no backend of this version runs on a GPU"
_NO_RAY: Final = "there are no Ray workers"
_NO_OPENVINO: Final = "there is no OpenVINO backend; the CPU backend is called reference"
_TEXT_ONLY: Final = "prompts are text or token ids; no media are fetched"
_NO_KV_SCALES: Final = "there is no float8 KV cache to scale"
_NO_TENSORIZER: Final = "tensorizer checkpoints are not read; use safetensors"
_ONE_ENGINE: Final = "one engine drives every copy of the model; use --data-parallel-size"


def _unused(name: str, help: str, why: str, *, shared: bool = False) -> EnvVar:
    return EnvVar(name, help, status="no effect", why=why, shared=shared)


def _refused(name: str, help: str, why: str, accepts: tuple[str, ...] = OFF) -> EnvVar:
    return EnvVar(name, help, status="refused", why=why, accepts=accepts)


_BUILD: Final = (
    _unused("VLLM_TARGET_DEVICE", "Device to build for.", f"{_NOTHING_TO_BUILD}; --backend names the device"),
    _unused("MAX_JOBS", "Compile jobs at once.", _NOTHING_TO_BUILD, shared=True),
    _unused("NVCC_THREADS", "Threads of nvcc.", _NOTHING_TO_BUILD, shared=True),
    _unused("VLLM_USE_PRECOMPILED", "Install prebuilt binaries.", _NOTHING_TO_BUILD),
    _unused("VLLM_TEST_USE_PRECOMPILED_NIGHTLY_WHEEL", "Install the nightly binaries.", _NOTHING_TO_BUILD),
    _unused("CMAKE_BUILD_TYPE", "Kind of build.", _NOTHING_TO_BUILD, shared=True),
    _unused("VERBOSE", "A noisier installation.", _NOTHING_TO_BUILD, shared=True),
    _unused("CUDA_HOME", "Folder of the CUDA toolkit.", _NOTHING_TO_BUILD, shared=True),
)
_PATHS: Final = (
    _unused("VLLM_CONFIG_ROOT", "Folder of configuration files.", "no file is looked for; name one with --config"),
    _unused("VLLM_CACHE_ROOT", "Folder of caches.", "only downloads are kept; --download-dir or HF_HOME says where"),
    _unused("VLLM_ASSETS_CACHE", "Folder of downloaded assets.", "no assets are downloaded"),
    _unused("VLLM_TORCH_PROFILER_DIR", "Folder of profiles.", "there is no built-in profiler; use py-spy"),
)
_DISTRIBUTED: Final = (
    _unused("VLLM_HOST_IP", "This node's internal address.", f"{_ONE_NODE}; --host is the server's address"),
    _unused("VLLM_PORT", "Port of internal traffic.", f"{_ONE_NODE}; --port is the server's port"),
    _unused("VLLM_RINGBUFFER_WARNING_INTERVAL", "How often a full ring buffer is told.", "there is no ring buffer"),
    _unused("VLLM_NCCL_SO_PATH", "Library of NCCL.", _NO_RANKS),
    _unused(
        "LD_LIBRARY_PATH",
        "Where libraries are.",
        "the system's loader reads it, pagoda does not",
        shared=True,
    ),
    _unused("LOCAL_RANK", "Rank of a process on its node.", _NO_RANKS, shared=True),
    _unused("CUDA_VISIBLE_DEVICES", "GPUs that a process may use.", _NO_GPU, shared=True),
    _unused("VLLM_PP_LAYER_PARTITION", "Layers of each pipeline stage.", "this version has no pipeline stages"),
    _unused("VLLM_SKIP_P2P_CHECK", "Trust that GPUs reach each other.", _NO_RANKS),
    _unused("VLLM_CUDART_SO_PATH", "Library of the CUDA runtime.", _NO_GPU),
    _refused("VLLM_DP_RANK", "Data-parallel rank of this process.", _ONE_ENGINE, ("", "0")),
    _refused("VLLM_DP_SIZE", "Data-parallel ranks.", _ONE_ENGINE, ("", "1")),
    _unused("VLLM_DP_MASTER_IP", "Address of the first data-parallel rank.", _NO_RANKS),
    _unused("VLLM_DP_MASTER_PORT", "Port of the first data-parallel rank.", _NO_RANKS),
    _unused("VLLM_USE_RAY_SPMD_WORKER", "Run Ray workers in lockstep.", _NO_RAY),
    _unused("VLLM_USE_RAY_COMPILED_DAG", "Use Ray's compiled graph.", _NO_RAY),
    _unused("VLLM_USE_RAY_COMPILED_DAG_NCCL_CHANNEL", "NCCL in Ray's compiled graph.", _NO_RAY),
    _unused("VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM", "Overlap in Ray's compiled graph.", _NO_RAY),
    _unused("VLLM_RAY_PER_WORKER_GPUS", "GPUs of each Ray worker.", _NO_RAY),
    _unused("VLLM_RAY_BUNDLE_INDICES", "Ray bundle of each worker.", _NO_RAY),
    _unused("VLLM_RAY_DP_PACK_STRATEGY", "How Ray places data-parallel ranks.", _NO_RAY),
)
_MODEL: Final = (
    _refused(
        "VLLM_USE_MODELSCOPE",
        "Fetch models from ModelScope.",
        "models come from the Hugging Face hub; download the model yourself and give its folder",
    ),
    _unused("S3_ACCESS_KEY_ID", "Key of an S3 store.", _NO_TENSORIZER, shared=True),
    _unused("S3_SECRET_ACCESS_KEY", "Secret of an S3 store.", _NO_TENSORIZER, shared=True),
    _unused("S3_ENDPOINT_URL", "Address of an S3 store.", _NO_TENSORIZER, shared=True),
    _unused("VLLM_CI_USE_S3", "Fetch the models of tests from S3.", "the tests make their models themselves"),
    _unused("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "Change adapters while serving.", "adapters are not in this version"),
)
_USAGE: Final = (
    _unused("VLLM_USAGE_STATS_SERVER", "Where usage data goes.", _NOTHING_SENT),
    _unused("VLLM_NO_USAGE_STATS", "Send no usage data.", _NOTHING_SENT),
    _unused("VLLM_DO_NOT_TRACK", "Send no usage data.", _NOTHING_SENT),
    _unused("VLLM_USAGE_SOURCE", "Who uses it.", _NOTHING_SENT),
)
_LOGS: Final = (
    _unused("VLLM_TRACE_FUNCTION", "Log every function call.", "run python -m trace, or py-spy, for that"),
    _unused(
        "VLLM_NO_DEPRECATION_WARNING",
        "Do not speak of deprecated flags.",
        "each deprecated flag is named once, at start; use the flag that its line names",
    ),
)
_KERNELS: Final = (
    _unused("VLLM_USE_TRITON_FLASH_ATTN", "Attention in Triton.", _ONE_KERNEL),
    _unused("VLLM_FLASH_ATTN_VERSION", "Version of flash attention.", _ONE_KERNEL),
    _unused("VLLM_FLASHINFER_FORCE_TENSOR_CORES", "Tensor cores in FlashInfer.", _ONE_KERNEL),
    _unused("VLLM_MLA_DISABLE", "No latent attention.", "no model served here has latent attention"),
    _unused("VLLM_USE_FLASHINFER_SAMPLER", "Sample with FlashInfer.", "sampling has one definition on every backend"),
    _unused("VLLM_TEST_DYNAMO_FULLGRAPH_CAPTURE", "Whole graphs in Dynamo.", "nothing is compiled by Dynamo"),
    _unused("VLLM_FUSED_MOE_CHUNK_SIZE", "Tokens per pass of fused experts.", "experts take a whole step at once"),
    _unused("VLLM_ENABLE_MOE_ALIGN_BLOCK_SIZE_TRITON", "Sort tokens by expert in Triton.", _NO_GPU),
    _unused("VLLM_TEST_FORCE_FP8_MARLIN", "FP8 with Marlin.", "no Marlin kernels are used"),
    _unused("VLLM_MARLIN_USE_ATOMIC_ADD", "Atomic sums in Marlin.", "no Marlin kernels are used"),
    _unused("VLLM_USE_TRITON_AWQ", "AWQ in Triton.", "AWQ checkpoints are not read; serve a GGUF file of the model"),
    _unused("VLLM_DISABLED_KERNELS", "Kernels to leave out.", "there is one kernel for each job"),
    _unused("VLLM_ROCM_FP8_PADDING", "Padded FP8 weights on ROCm.", "there is no ROCm backend"),
    _unused("Q_SCALE_CONSTANT", "Divisor for scales of queries.", _NO_KV_SCALES),
    _unused("K_SCALE_CONSTANT", "Divisor for scales of keys.", _NO_KV_SCALES),
    _unused("V_SCALE_CONSTANT", "Divisor for scales of values.", _NO_KV_SCALES),
)
_PLATFORMS: Final = (
    _unused("VLLM_CPU_MOE_PREPACK", "Pack the experts' weights.", "the CPU backend always packs what it gains from"),
    _unused("VLLM_OPENVINO_DEVICE", "OpenVINO's device.", _NO_OPENVINO),
    _unused("VLLM_OPENVINO_KVCACHE_SPACE", "GiB of OpenVINO's KV cache.", _NO_OPENVINO),
    _unused("VLLM_OPENVINO_CPU_KV_CACHE_PRECISION", "Numbers of OpenVINO's KV cache.", _NO_OPENVINO),
    _unused("VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS", "Compressed weights in OpenVINO.", _NO_OPENVINO),
    _unused("VLLM_USE_HPU_CONTIGUOUS_CACHE_FETCH", "Read Gaudi's cache in one piece.", "there is no Gaudi backend"),
    _unused("VLLM_TPU_DISABLE_TOPK_TOPP_OPTIMIZATION", "Plain top-k and top-p on TPUs.", "they are exact in any case"),
)
_ENGINE: Final = (
    _unused("VLLM_USE_V1", "Choose the V1 engine.", "there is one engine, and it works like V1"),
    _unused(
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "Run the engine of LLM in a process of its own.",
        "LLM runs its engine in the caller's process, serve in a process of its own; "
        "--disable-frontend-multiprocessing changes the latter",
    ),
    _unused("VLLM_WORKER_MULTIPROC_METHOD", "How workers start.", "the engine is a new process, never a fork"),
    _unused("VLLM_LOGITS_PROCESSOR_THREADS", "Threads of logits processors.", "they run within the step"),
    _unused("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", "Requests per task of output.", "a step's outputs are handled in one go"),
    _unused("VLLM_V0_USE_OUTLINES_CACHE", "Keep outlines' cache on disk.", "outlines is not used"),
)
_MEDIA: Final = (
    _unused("VLLM_IMAGE_FETCH_TIMEOUT", "Seconds that fetching an image may take.", _TEXT_ONLY),
    _unused("VLLM_VIDEO_FETCH_TIMEOUT", "Seconds that fetching a video may take.", _TEXT_ONLY),
    _unused("VLLM_AUDIO_FETCH_TIMEOUT", "Seconds that fetching a sound may take.", _TEXT_ONLY),
    _unused("VLLM_MM_INPUT_CACHE_GIB", "GiB of processed media kept.", _TEXT_ONLY),
)
_OWN: Final = (
    _unused("PAGODA_TEST_MODEL", "Checkpoint for the project's tests.", "only those tests read it", shared=True),
)

UNUSED: Final = (
    *(*_BUILD, *_PATHS, *_DISTRIBUTED, *_MODEL, *_USAGE, *_LOGS),
    *(*_KERNELS, *_PLATFORMS, *_ENGINE, *_MEDIA, *_OWN),
)
