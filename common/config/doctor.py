"""What `doctor` looks at."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.common.config.option import option
from pagoda.common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """The server that this machine is checked for."""

    model: str | None = option(None, "Check that this model can be served: a folder, a .gguf file or a hub id.")
    backend: str = option("auto", "Device backend: reference, torch_cuda, jax_tpu; auto picks by platform.")
    tensor_parallel_size: int = option(1, "Devices that the server would share the model between.", aliases=("-tp",))
    data_parallel_size: int = option(1, "Copies of the model that the server would hold.", aliases=("-dp",))
    host: str | None = option(None, "Address that the server would listen on; default: 127.0.0.1.")
    port: int = option(8000, "Port that the server would listen on; 0: any free one.")
    download_dir: str | None = option(None, "Where hub downloads are kept; default: the hub's own cache.")
    rpc_base_path: str | None = option(
        None, "Folder in which the engine's sockets are made; default: the system's folder for temporary files."
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("--port", f"{self.port} is not a port; use 1 to 65535, or 0 for any free one")
