"""More than one device: what spreads a model over them, and what this version does not spread says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pagoda.common.config.fields import json_object, option
from pagoda.common.errors import ConfigError

_TENSOR_ONLY: Final = "this version splits a model by --tensor-parallel-size alone; use 1"
_ONE_ENGINE: Final = "one engine drives every copy of --data-parallel-size, on this host's devices; drop it"
_NO_RANKS: Final = "one engine drives every copy of --data-parallel-size; there are no ranks that meet"
_OWN_SHARE: Final = "every rank maps the weights into memory and copies its own share only"
_CP_ONLY: Final = "it matters with contexts split over devices only, which this version does not do"
_EP_ONLY: Final = "it spreads whole experts; here --tensor-parallel-size splits each of them"
_DBO_ONLY: Final = "it matters with --enable-dbo only"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How a model is spread over devices and nodes."""

    distributed_executor_backend: Literal["mp", "ray", "uni", "external_launcher"] | None = option(
        None,
        "How the ranks of torch_cuda are started: mp as processes of this machine, ray as actors of a Ray cluster; "
        "uni: there is one. By default mp. Other backends drive all devices from one process.",
    )
    tensor_parallel_size: int = option(1, "Devices that share each layer.", aliases=("-tp",))
    pipeline_parallel_size: int = option(1, "Devices that share the stack.", aliases=("-pp",), refused=_TENSOR_ONLY)
    decode_context_parallel_size: int = option(1, "Groups per context.", aliases=("-dcp",), refused=_TENSOR_ONLY)
    prefill_context_parallel_size: int = option(1, "Groups per prefill.", aliases=("-pcp",), refused=_TENSOR_ONLY)
    data_parallel_size: int = option(1, "Copies of the model that share the requests.", aliases=("-dp",))
    data_parallel_rank: int | None = option(
        None, "This engine's rank.", aliases=("-dpn",), refused=_ONE_ENGINE, accepts=(0,)
    )
    data_parallel_start_rank: int | None = option(
        None, "First rank on this node.", aliases=("-dpr",), refused=_ONE_ENGINE, accepts=(0,)
    )
    data_parallel_size_local: int | None = option(
        None, "Engines on this node.", aliases=("-dpl",), refused=_ONE_ENGINE, accepts=(1,)
    )
    data_parallel_address: str | None = option(None, "The head node's address.", aliases=("-dpa",), no_effect=_NO_RANKS)
    data_parallel_rpc_port: int | None = option(None, "Port of the ranks.", aliases=("-dpp",), no_effect=_NO_RANKS)
    data_parallel_backend: Literal["mp", "ray"] = option("mp", "Launcher.", aliases=("-dpb",), no_effect=_NO_RANKS)
    data_parallel_hybrid_lb: bool = option(False, "Balance local ranks only.", aliases=("-dph",), refused=_ONE_ENGINE)
    data_parallel_external_lb: bool = option(False, "Balance nothing.", aliases=("-dpe",), refused=_ONE_ENGINE)
    enable_expert_parallel: bool = option(False, "Spread experts.", aliases=("-ep",), no_effect=_EP_ONLY)
    all2all_backend: str | None = option(None, "Exchange of tokens between experts.", no_effect=_EP_ONLY)
    enable_dbo: bool = option(False, "Overlap two micro-batches.", refused="a step is not cut in two here; drop it")
    ubatch_size: int = option(0, "Micro-batches.", no_effect=_DBO_ONLY)
    dbo_decode_token_threshold: int = option(32, "Tokens from which decode splits.", no_effect=_DBO_ONLY)
    dbo_prefill_token_threshold: int = option(512, "Tokens from which prefill splits.", no_effect=_DBO_ONLY)
    disable_nccl_for_dp_synchronization: bool = option(False, "Synchronise ranks on the host.", no_effect=_NO_RANKS)
    enable_eplb: bool = option(False, "Rebalance experts while serving.", no_effect=_EP_ONLY)
    eplb_config: Mapping[str, Any] = option(
        {}, "Settings of the expert balancer as JSON.", parse=json_object, no_effect=_EP_ONLY
    )
    expert_placement_strategy: Literal["linear", "round_robin"] = option(
        "linear", "Which experts go to which rank.", no_effect=_EP_ONLY
    )
    max_parallel_loading_workers: int | None = option(None, "Workers that load at once.", no_effect=_OWN_SHARE)
    ray_workers_use_nsight: bool = option(
        False,
        "Profile Ray workers.",
        no_effect="ranks are not profiled; run nsys around the server, which follows the processes that mp starts",
    )
    disable_custom_all_reduce: bool = option(
        False, "Reduce with NCCL.", no_effect="there is none: NCCL reduces over GPUs, XLA over TPUs"
    )
    worker_cls: str = option(
        "auto",
        "Class of the worker.",
        refused="backends stand in place of workers; name one with --backend",
    )
    worker_extension_cls: str = option(
        "", "Class mixed into the worker.", refused="there is no worker class to extend; use --additional-config"
    )
    master_addr: str = option("127.0.0.1", "Address of host 0, where several hosts meet.")
    master_port: int = option(29501, "Port of host 0, where several hosts meet; the one after it is used too.")
    nnodes: int = option(1, "Hosts that share the model.", aliases=("-n",))
    node_rank: int = option(0, "This host's number; host 0 takes the requests.", aliases=("-r",))
    dcp_kv_cache_interleave_size: int = option(1, "Tokens per turn in context parallelism.", no_effect=_CP_ONLY)
    cp_kv_cache_interleave_size: int = option(1, "Tokens per turn in context parallelism.", no_effect=_CP_ONLY)

    def __post_init__(self) -> None:
        for name, size in (("tensor", self.tensor_parallel_size), ("data", self.data_parallel_size)):
            if size < 1:
                raise ConfigError(f"--{name}-parallel-size", f"{size} is not positive; use 1 or more")
        if self.distributed_executor_backend == "external_launcher":
            raise ConfigError(
                "--distributed-executor-backend",
                "external_launcher is not supported: the engine starts its ranks itself; start one process, with mp",
            )
        if self.data_parallel_size_local not in (None, self.data_parallel_size):
            raise ConfigError("--data-parallel-size-local", f"all {self.data_parallel_size} copies are here; drop it")
        if self.nnodes < 1:
            raise ConfigError("--nnodes", f"{self.nnodes} is not positive; use 1 or more")
        if self.node_rank < 0:
            raise ConfigError("--node-rank", f"{self.node_rank} is negative; use 0 for the host that takes requests")
        if not 0 < self.master_port < 65535:
            raise ConfigError("--master-port", f"{self.master_port} and the next are not both ports; use 1 to 65534")
