"""What of the Ray executor needs no Ray; the rest is in test_tensor_parallel, where Ray is installed."""

from __future__ import annotations

import socket
import sys

import pytest

from pagoda.common.config.groups.parallel import ParallelConfig
from pagoda.common.distributed.messages import send_frame
from pagoda.common.errors import ConfigError
from pagoda.server.startup.ranks import _make_executor
from pagoda.server.startup.ray_executor import _authenticated_rank, _visible_index

RAY = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="ray")
SECRET = b"s" * 32


@pytest.mark.setting("--distributed-executor-backend")
def test_missing_ray_is_one_error_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ConfigError, match=r"^--distributed-executor-backend: ray is not installed; pip install 'pagoda"
    ):
        _make_executor(RAY, "torch_cuda", gpus=True)


@pytest.mark.parametrize(("visible", "gpu", "index"), [(None, "3", 3), ("2,3", "3", 1), ("GPU-a,GPU-b", "GPU-a", 0)])
def test_visible_index_of_rays_gpu(visible: str | None, gpu: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _visible_index(gpu) == index


def test_hidden_gpu_of_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="Ray gave rank 0 GPU 5, which CUDA_VISIBLE_DEVICES=0 hides from it; unset"):
        _visible_index("5")


@pytest.mark.parametrize(
    ("said", "rank"), [((3).to_bytes(4, "big") + SECRET, 3), ((3).to_bytes(4, "big") + b"x" * 32, None), (b"", None)]
)
def test_ranks_must_send_the_secret(said: bytes, rank: int | None) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as caller:
        connection, _ = listener.accept()
        send_frame(caller, said)
        with connection:
            assert _authenticated_rank(connection, SECRET) == rank
