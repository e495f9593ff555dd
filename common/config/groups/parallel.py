"""Distributed execution settings: tensor and data parallelism, nodes; other kinds of parallelism are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pagoda.common.config.fields import json_object, need_not_negative, need_positive, option
from pagoda.common.errors import ConfigError

_TENSOR_ONLY: Final = "this version shards a model by --tensor-parallel-size only; use 1"
_ONE_HOST: Final = "one server drives all --data-parallel-size replicas, on this host's devices; drop it"
_NO_DP_RANKS: Final = "one server drives all --data-parallel-size replicas; its engines do not talk to each other"
_NO_LIMIT: Final = "each rank memory-maps the weights and copies only its own shard"
_CP_ONLY: Final = "it applies only to context parallelism, which is not in this version"
_EP_ONLY: Final = "expert parallelism is not in this version; --tensor-parallel-size shards each expert"
_DBO_ONLY: Final = "it applies only with --enable-dbo"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Distributed execution over devices and nodes."""

    distributed_executor_backend: Literal["mp", "ray", "uni"] | None = option(
        None,
        "How torch_cuda starts its tensor-parallel ranks: mp (processes on this machine, the default), ray (actors of"
        " a Ray cluster) or uni (a single rank inside the engine's process). The other backends drive all devices "
        "from one process.",
        refused_values={"external_launcher": "the engine starts its ranks itself; start one process and use mp"},
    )
    tensor_parallel_size: int = option(
        1, "Tensor-parallel size: number of devices each layer is sharded across.", aliases=("-tp",)
    )
    pipeline_parallel_size: int = option(
        1, "Pipeline-parallel size: number of pipeline stages.", aliases=("-pp",), refused=_TENSOR_ONLY
    )
    decode_context_parallel_size: int = option(
        1, "Decode context-parallel size.", aliases=("-dcp",), refused=_TENSOR_ONLY
    )
    prefill_context_parallel_size: int = option(
        1, "Prefill context-parallel size.", aliases=("-pcp",), refused=_TENSOR_ONLY
    )
    data_parallel_size: int = option(
        1,
        "Data-parallel size: number of model replicas that requests are distributed over. LLM and the offline "
        "benchmarks drive one engine, which has several replicas only on jax_tpu in --data-parallel-mode program; "
        "otherwise use serve or AsyncLLM.",
        aliases=("-dp",),
    )
    data_parallel_mode: Literal["auto", "program", "engines"] = option(
        "auto",
        "How replicas run. program: one engine steps all replicas together, in one XLA program over all devices "
        "(jax_tpu only). engines: each replica has an engine process with devices and steps of its own. auto: program"
        " on jax_tpu, engines elsewhere.",
    )
    data_parallel_rank: int | None = option(
        None, "Data-parallel rank of this engine.", aliases=("-dpn",), refused=_ONE_HOST, accepts=(0,)
    )
    data_parallel_start_rank: int | None = option(
        None, "First data-parallel rank on this node.", aliases=("-dpr",), refused=_ONE_HOST, accepts=(0,)
    )
    data_parallel_size_local: int | None = option(
        None, "Number of data-parallel replicas on this node.", aliases=("-dpl",), refused=_ONE_HOST, accepts=(1,)
    )
    data_parallel_address: str | None = option(
        None, "Address of the data-parallel head node.", aliases=("-dpa",), no_effect=_NO_DP_RANKS
    )
    data_parallel_rpc_port: int | None = option(
        None, "Port for data-parallel RPC.", aliases=("-dpp",), no_effect=_NO_DP_RANKS
    )
    data_parallel_backend: Literal["mp", "ray"] = option(
        "mp", "Launcher of data-parallel ranks.", aliases=("-dpb",), no_effect=_NO_DP_RANKS
    )
    data_parallel_hybrid_lb: bool = option(
        False, "Load-balance over the local data-parallel ranks only.", aliases=("-dph",), refused=_ONE_HOST
    )
    data_parallel_external_lb: bool = option(
        False, "Leave load balancing over data-parallel ranks to the caller.", aliases=("-dpe",), refused=_ONE_HOST
    )
    enable_expert_parallel: bool = option(
        False,
        "Use expert parallelism instead of tensor parallelism for MoE layers.",
        aliases=("-ep",),
        no_effect=_EP_ONLY,
    )
    all2all_backend: str | None = option(
        None, "All-to-all backend of expert-parallel communication.", no_effect=_EP_ONLY
    )
    enable_dbo: bool = option(
        False, "Enable dual batch overlap.", refused="dual batch overlap is not in this version; drop it"
    )
    ubatch_size: int = option(0, "Number of microbatches.", no_effect=_DBO_ONLY)
    dbo_decode_token_threshold: int = option(
        32, "Minimum tokens of a decode batch for dual batch overlap.", no_effect=_DBO_ONLY
    )
    dbo_prefill_token_threshold: int = option(
        512, "Minimum tokens of a prefill batch for dual batch overlap.", no_effect=_DBO_ONLY
    )
    disable_nccl_for_dp_synchronization: bool = option(
        False, "Synchronise data-parallel ranks over Gloo instead of NCCL.", no_effect=_NO_DP_RANKS
    )
    enable_eplb: bool = option(False, "Enable expert-parallel load balancing (EPLB).", no_effect=_EP_ONLY)
    eplb_config: Mapping[str, Any] = option(
        {}, "Settings of expert-parallel load balancing as JSON.", parse=json_object, no_effect=_EP_ONLY
    )
    expert_placement_strategy: Literal["linear", "round_robin"] = option(
        "linear", "Placement of experts on expert-parallel ranks.", no_effect=_EP_ONLY
    )
    max_parallel_loading_workers: int | None = option(
        None, "Maximum number of workers that load weights at the same time.", no_effect=_NO_LIMIT
    )
    ray_workers_use_nsight: bool = option(
        False,
        "Profile Ray workers with Nsight Systems.",
        no_effect="Ray actors are not profiled; run nsys around the server, which covers the processes of mp",
    )
    disable_custom_all_reduce: bool = option(
        False,
        "Disable the custom all-reduce kernel and use NCCL.",
        no_effect="there is no custom all-reduce kernel: GPUs use NCCL, TPUs use XLA",
    )
    worker_cls: str = option(
        "auto", "Worker class.", refused="worker classes are not supported; name a device backend with --backend"
    )
    worker_extension_cls: str = option(
        "",
        "Worker extension class.",
        refused="worker extensions are not supported; use --plugins with --additional-config",
    )
    master_addr: str = option("127.0.0.1", "Address of node 0 in a multi-node deployment.")
    master_port: int = option(29501, "Port on node 0 in a multi-node deployment; the next port is used too.")
    nnodes: int = option(1, "Number of nodes (hosts) that one model is sharded over.", aliases=("-n",))
    node_rank: int = option(0, "Rank of this node; node 0 receives the requests.", aliases=("-r",))
    cluster_token_file: str | None = option(
        None,
        "File with a secret that the nodes of a deployment must share; default: the environment variable "
        "PAGODA_CLUSTER_TOKEN. Without a secret, any host that reaches node 0's port can join.",
    )
    dcp_kv_cache_interleave_size: int = option(
        1, "KV cache interleave size of decode context parallelism, in tokens.", no_effect=_CP_ONLY
    )
    cp_kv_cache_interleave_size: int = option(
        1, "KV cache interleave size of context parallelism, in tokens.", no_effect=_CP_ONLY
    )

    def __post_init__(self) -> None:
        need_positive(self, "tensor_parallel_size", "data_parallel_size")
        if self.data_parallel_mode == "engines" and self.data_parallel_size > 1 and self.nnodes > 1:
            raise ConfigError("--data-parallel-mode", "engines run on one host; use program, or drop --nnodes")
        if self.data_parallel_size_local not in (None, self.data_parallel_size):
            raise ConfigError(
                "--data-parallel-size-local", f"all {self.data_parallel_size} replicas run on this node; drop it"
            )
        need_positive(self, "nnodes")
        need_not_negative(self, "node_rank", remedy="use 0 for the node that receives requests")
        if not 0 < self.master_port < 65535:
            raise ConfigError("--master-port", f"{self.master_port} or the following port is invalid; use 1 to 65534")
