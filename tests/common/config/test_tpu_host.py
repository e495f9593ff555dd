"""TPU chips on the PCI bus, slices of several hosts, maintenance events."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pagoda.common.config import tpu_host
from pagoda.common.config.defaults import Platform, detect
from pagoda.common.config.tpu_host import (
    TpuKind,
    check_alone,
    check_chips,
    chips_env,
    metadata,
    num_devices,
    slice_host,
    tpu_chips,
    watch_maintenance,
)
from pagoda.common.errors import ConfigError

NETWORK, DISK = ("0x1ae0", "0x0042", "0x020000"), ("0x1ae0", "0x001f", "0x010802")
"""What every instance of Google Cloud has: its vendor is Google, too."""


def bus(folder: Path, *devices: tuple[str, str, str]) -> Path:
    """Return a PCI bus with these vendors, devices and classes."""
    for number, values in enumerate(devices):
        own = folder / f"0000:00:{number:02x}.0"
        own.mkdir(parents=True)
        for name, value in zip(("vendor", "device", "class"), values):
            (own / name).write_text(value + "\n")
    return folder


def chip(device: str) -> tuple[str, str, str]:
    return "0x1ae0", device, "0x120000"


def test_chips_are_found_by_vendor_and_class(tmp_path: Path) -> None:
    nvidia = ("0x10de", "0x2330", "0x030200")
    assert tpu_chips(bus(tmp_path / "gpu", NETWORK, DISK, nvidia)) == [], "a GPU in a VFIO group is no TPU"
    both = bus(tmp_path / "v7x", NETWORK, chip("0x0076"), chip("0x0076"), nvidia)
    assert [each.name for each in tpu_chips(both)] == ["V7X", "V7X"]
    assert detect("tpu", pci=both) == Platform("tpu", 96 << 30, "V7X"), "the network device comes first"
    assert detect("tpu", pci=bus(tmp_path / "v6e", NETWORK, chip("0x006f"))) == Platform("tpu", 32 << 30, "V6E")
    assert tpu_chips(tmp_path / "none") == []


@pytest.mark.parametrize(("device", "name"), [("0x005e", "v4"), ("0x0027", "v3"), ("0x00aa", "of pci id 0x00aa")])
def test_other_chips_are_refused_in_a_line(device: str, name: str, tmp_path: Path) -> None:
    chips = tpu_chips(bus(tmp_path, NETWORK, chip(device)))
    with pytest.raises(
        ConfigError, match=f"--backend: this host's TPU {name} is not supported; use v5p, v5e, v6e, v7x"
    ):
        check_chips(chips)
    assert detect("tpu", pci=tmp_path).device_name == ""
    check_chips(tpu_chips(bus(tmp_path / "more", chip("0x0062"))))


def test_a_chip_of_v7x_is_two_devices(tmp_path: Path) -> None:
    four = tpu_chips(bus(tmp_path / "a", *[chip("0x0076")] * 4))
    assert num_devices(four, {}) == 8
    assert num_devices(four, {"TPU_VISIBLE_CHIPS": "0,1"}) == 4
    assert num_devices(tpu_chips(bus(tmp_path / "b", *[chip("0x006f")] * 4)), {"TPU_VISIBLE_DEVICES": "3"}) == 1
    assert num_devices([], {}) == 0


@contextmanager
def metadata_server(values: dict[str, list[str]]) -> Iterator[dict[str, str]]:
    """Serve the values of each path in turn, the last one for ever. Yield the environment that names the server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            left = values.get(self.path.removeprefix("/computeMetadata/v1/instance/"))
            known = left is not None and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if known else 404)
            self.end_headers()
            if left and known:
                self.wfile.write((left.pop(0) if len(left) > 1 else left[0]).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"}
    finally:
        server.shutdown()
        server.server_close()


def test_one_host_of_a_slice_is_told_before_it_waits(tmp_path: Path) -> None:
    chips = tpu_chips(bus(tmp_path, *[chip("0x006f")] * 4))
    of_gke = {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "2"}
    with pytest.raises(ConfigError, match=r"--nnodes: this host is worker 2 of the 4 of a TPU slice") as error:
        check_alone(chips, of_gke)
    assert "start serve with --nnodes 4" in str(error.value)
    assert "TPU_CHIPS_PER_PROCESS_BOUNDS=2,2,1 TPU_VISIBLE_CHIPS=0,1,2,3" in str(error.value)
    assert "\n" not in str(error.value)
    check_alone(chips, of_gke | {"TPU_PROCESS_BOUNDS": "1,1,1"})
    check_alone(chips, {"TPU_WORKER_HOSTNAMES": "localhost"})
    attributes = {
        "attributes/worker-network-endpoints": ["x:y:10.0.0.2,x:y:10.0.0.3"],
        "attributes/agent-worker-number": ["1"],
    }
    with metadata_server(attributes) as environ:
        assert slice_host(environ) == tpu_host.SliceHost(2, "1")
        with pytest.raises(ConfigError, match="worker 1 of the 2"):
            check_alone(chips, environ)
        assert metadata("nothing", environ) is None
    check_alone(chips, environ)


@pytest.mark.parametrize("path", ["maintenance-event", "preempted"])
def test_maintenance_and_preemption_are_reported_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"maintenance-event": ["NONE"], "preempted": ["FALSE"]}
    values[path] = [values[path][0]] * 3 + ["TERMINATE_ON_HOST_MAINTENANCE"]
    events: list[str] = []
    with metadata_server(values) as environ:
        monkeypatch.setenv("GCE_METADATA_HOST", environ["GCE_METADATA_HOST"])
        watch_maintenance(events.append, poll_seconds=0.01)
    assert events == [f"{path} TERMINATE_ON_HOST_MAINTENANCE"]
    watch_maintenance(events.append)
    assert len(events) == 1, "without a metadata server there are none"


def test_engines_of_one_host_have_chips_and_ports_of_their_own() -> None:
    four = [TpuKind("V6E")] * 4
    assert chips_env(four, 1, 2, {}) == {
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,2,1",
        "TPU_VISIBLE_CHIPS": "2,3",
        "TPU_PROCESS_ADDRESSES": "localhost:8477",
        "TPU_PROCESS_PORT": "8477",
        "CLOUD_TPU_TASK_ID": "0",
    }
    assert chips_env(four, 0, 1, {"TPU_VISIBLE_CHIPS": "3,1"})["TPU_VISIBLE_CHIPS"] == "3"
    assert chips_env([TpuKind("V7X", devices=2)] * 2, 1, 2, {})["TPU_VISIBLE_CHIPS"] == "1"


@pytest.mark.parametrize(
    ("process", "devices", "chip_devices", "error"),
    [
        (2, 2, 1, "replica 2 needs chips 4 to 5 and 4 are visible"),
        (0, 3, 1, "an engine cannot use 3 chips"),
        (0, 1, 2, "a chip of this TPU is 2 devices"),
    ],
)
def test_chips_that_engines_cannot_divide(process: int, devices: int, chip_devices: int, error: str) -> None:
    with pytest.raises(ConfigError, match=f"--data-parallel-size: {error}"):
        chips_env([TpuKind("any", devices=chip_devices)] * 4, process, devices, {})
