"""doctor and collect-env: the findings of each check, and masking of secrets."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagoda.common.config.commands import DoctorConfig
from pagoda.common.config.tpu_host import TpuKind
from pagoda.common.errors import ConfigError
from pagoda.common.observe.redact import Redactor
from pagoda.server.cli import main
from pagoda.server.cli.diagnosis import doctor, machine
from pagoda.server.cli.diagnosis.doctor import Check, Finding


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def findings_of(check: Check, **config: Any) -> list[Finding]:
    return list(check(DoctorConfig(**config)))


def one(check: Check, **config: Any) -> Finding:
    (finding,) = findings_of(check, **config)
    return finding


def run_doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main.main(["doctor", *words])
    return status, capsys.readouterr().out


@pytest.mark.command("doctor")
def test_a_working_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run_doctor(capsys, "--port", "0", "--backend", "reference")
    assert status == 0, text
    lines = text.splitlines()
    assert {line.split()[0] for line in lines[:-1]} <= {"ok", "warn"}
    for subject in ("python", "packages", "backend", "processor", "memory", "downloads", "sockets", "port", "hub"):
        assert any(line[6:].startswith(subject) for line in lines), subject


@pytest.mark.setting("--port", "--host")
def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, text = run_doctor(capsys, "--port", str(taken.getsockname()[1]))
    assert status == 1
    assert "fail  port" in text
    assert "choose another --port" in text
    assert "1 errors" in text.splitlines()[-1]
    assert one(doctor.port, host="host.invalid", port=0).level == "fail"
    with pytest.raises(ConfigError, match="--port"):
        DoctorConfig(port=70000)


def test_an_unsupported_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one(doctor.python_version).level == "ok"
    monkeypatch.setattr("platform.python_version", lambda: "3.9.1")
    assert one(doctor.python_version).level == "fail"


def test_missing_and_old_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["numpy>=2.0,<3", "msgspec>=0.20", "pyzmq>=27", 'torch>=2.11; extra == "cpu"', 'ray>=2; extra == "ray"']
    monkeypatch.setattr(machine, "project", lambda: (">=3.11", wanted))
    versions = {"numpy": "1.9", "msgspec": "0.22", "torch": "2.0"}
    monkeypatch.setattr(machine, "version", versions.get)
    monkeypatch.setattr(doctor, "choose_backend", lambda name: "reference")
    assert findings_of(doctor.packages) == [
        Finding("warn", "packages", "numpy 1.9 is not a tested version; pip install 'numpy<3,>=2.0'"),
        Finding("fail", "packages", "pyzmq is not installed; pip install 'pyzmq>=27'"),
        Finding("warn", "packages", "torch 2.0 is not a tested version; pip install 'torch>=2.11'"),
        Finding("ok", "packages", "1 within the tested ranges"),
    ]


def test_the_libtpu_version_required_by_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "project", lambda: (">=3.11", ["numpy>=2", 'jax[tpu]>=0.10.2; extra == "tpu"']))
    named = ['libtpu==0.0.42.*; extra == "tpu"', 'nvidia-nccl-cu12>=2; extra == "cuda"', "scipy>=9"]
    monkeypatch.setattr(machine, "requires", {"jax": named, "numpy": ["never>=1"]}.get)
    monkeypatch.setattr(doctor, "choose_backend", lambda name: "jax_tpu")
    versions = {"numpy": "2.1", "jax": "0.10.2", "libtpu": "0.0.52", "scipy": "1"}
    monkeypatch.setattr(machine, "version", lambda name: versions.get(name))
    assert findings_of(doctor.packages) == [
        Finding("warn", "packages", "libtpu 0.0.52 is not a tested version; pip install 'libtpu==0.0.42.*'"),
        Finding("ok", "packages", "2 within the tested ranges"),
    ]
    versions["libtpu"] = "0.0.42.1"
    assert findings_of(doctor.packages) == [Finding("ok", "packages", "3 within the tested ranges")]


def test_requirements_are_those_of_pyproject() -> None:
    python, requirements = machine.project()
    assert python.startswith((">=3.11", "<3.14"))
    assert any(each.startswith("msgspec") for each in requirements)
    assert any("torch" in each and "extra" in each and "cpu" in each for each in requirements)


@pytest.mark.setting("--backend")
def test_an_unavailable_backend() -> None:
    findings = findings_of(doctor.backends, backend="torch_cuda")
    assert findings[0].level == "fail"
    assert findings[0].text.startswith("--backend: torch_cuda: no NVIDIA GPU found")
    assert {each.level for each in findings[1:]} <= {"ok", "warn"}
    assert any(each == Finding("ok", "backend", "reference, on CPU") for each in findings_of(doctor.backends))


def test_without_a_tpu_jax_tpu_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    finding = findings_of(doctor.backends, backend="jax_tpu")[0]
    assert finding == Finding("warn", "backend", "jax_tpu, on this machine's CPU, which is for tests: there is no TPU")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    finding = findings_of(doctor.backends, backend="jax_tpu")[0]
    assert finding == Finding("fail", "backend", "jax_tpu: JAX_PLATFORMS names a TPU, there is none")
    monkeypatch.setenv("JAX_PLATFORMS", "proxy")
    finding = findings_of(doctor.backends, backend="jax_tpu")[0]
    assert finding.level == "fail"
    assert finding.text.startswith("--backend: JAX_PLATFORMS is 'proxy'; jax_tpu runs on tpu and cpu")


@pytest.mark.parametrize(
    ("files", "smi", "level", "text"),
    [
        ([], ([], "nvidia-smi is not installed"), "ok", "none"),
        (["nvidia0"], (["H200, 143771 MiB, 570"], ""), "ok", "H200"),
        (["nvidia0"], ([], "nvidia-smi: version mismatch"), "warn", "install the matching driver"),
        ([], ([], "nvidia-smi: no devices"), "warn", "docker run --gpus all"),
    ],
)
def test_gpus(
    files: list[str], smi: tuple[list[str], str], level: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def device_files(*patterns: str) -> list[Path]:
        return [Path("/dev") / name for name in files] if "nvidiactl" in patterns else []

    monkeypatch.setattr(machine, "device_files", device_files)
    monkeypatch.setattr(machine, "gpus", lambda: smi)
    gpu = findings_of(doctor.devices)[0]
    assert (gpu.subject, gpu.level) == ("gpu", level)
    assert text in gpu.text


def test_a_tpu_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chip = tmp_path / "accel0"
    chip.touch()
    monkeypatch.setattr(machine, "device_files", lambda *patterns: [chip] if "accel[0-9]*" in patterns else [])
    assert findings_of(doctor.devices)[-1] == Finding("ok", "tpu", "none"), "another accelerator"
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    monkeypatch.setattr(doctor, "tpu_chips", lambda: [TpuKind("V7X", devices=2)] * 4)
    assert findings_of(doctor.devices)[-1] == Finding("ok", "tpu", "4 chips v7x, 8 devices")
    monkeypatch.setattr("os.access", lambda *_: False)
    assert findings_of(doctor.devices)[-1].level == "warn"


def test_tpus_that_cannot_be_used_alone_or_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    for kind, text in ((TpuKind("V6E"), "of the 2 of a TPU slice"), (TpuKind("V4", supported=False), "TPU v4 is not")):
        monkeypatch.setattr(doctor, "tpu_chips", lambda kind=kind: [kind])
        assert [each.level for each in findings_of(doctor.devices) if text in each.text] == ["warn"]


@pytest.mark.setting("--tensor-parallel-size", "--data-parallel-size")
@pytest.mark.parametrize(
    ("backend", "wanted", "findings"),
    [
        ("b", 1, []),
        ("reference", 2, [("fail", "--tensor-parallel-size: reference runs a model on one device; use 1, or --ba")]),
        ("jax_tpu", 2, [("ok", "2 of 2 devices")]),
        ("jax_tpu", 4, [("warn", "4 devices are requested, 2 are present")]),
    ],
)
def test_a_model_on_several_chips(
    backend: str, wanted: int, findings: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "choose_backend", lambda name: name)
    monkeypatch.setattr(doctor, "tpu_chips", lambda: [TpuKind("V6E")] * 2)
    shown = findings_of(doctor.parallelism, backend=backend, tensor_parallel_size=wanted)
    assert len(shown) == len(findings)
    assert all(each.level == level and text in each.text for each, (level, text) in zip(shown, findings))
    if backend == "jax_tpu":
        (each,) = findings_of(doctor.parallelism, backend=backend, data_parallel_size=2, tensor_parallel_size=wanted)
        assert f"{2 * wanted} devices" in each.text


@pytest.mark.setting("--backend", "--tensor-parallel-size")
def test_gpus_are_checked_through_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "choose_backend", lambda name: name)
    monkeypatch.setenv("PAGODA_TORCH_CUDA_DEVICE", "cpu")
    assert Finding("ok", "backend", "torch_cuda, on CPU tensors") in findings_of(doctor.backends, backend="torch_cuda")
    both = {"backend": "torch_cuda", "tensor_parallel_size": 2}
    assert one(doctor.parallelism, **both) == Finding("ok", "spread", "2 ranks have a device each")
    apart = {"backend": "torch_cuda", "data_parallel_size": 3}
    assert one(doctor.parallelism, **apart) == Finding("ok", "spread", "3 replicas have an engine each")
    monkeypatch.delenv("PAGODA_TORCH_CUDA_DEVICE")
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    few = one(doctor.parallelism, **apart)
    assert (few.level, "replica 2 needs GPUs 2 to 2 and 2 are visible" in few.text) == ("fail", True)
    shown = [*findings_of(doctor.backends, backend="torch_cuda"), one(doctor.parallelism, **both)]
    assert [each.subject for each in shown if each.level == "fail"] == ["backend", "spread"]
    assert all("is built without CUDA; pip" in each.text for each in shown if each.level == "fail")


@pytest.mark.parametrize(
    ("check", "patches", "level", "text"),
    [
        (doctor.processor, {"has_bfloat16": lambda: False}, "ok", "no bfloat16"),
        (doctor.processor, {"cores": lambda: 64, "cpu_quota": lambda: 4.0}, "warn", "set OMP_NUM_THREADS=4"),
        (doctor.memory, {"memory": lambda: (2**34, 2**33)}, "ok", "8.0 GiB of 16.0 GiB free"),
        (doctor.memory, {"memory": lambda: (2**34, 2**29)}, "warn", "--kv-cache-memory-bytes"),
        (doctor.limits, {"limit": lambda name: 256}, "warn", "ulimit -n 65536"),
        (doctor.limits, {"limit": lambda name: None}, "ok", "no limit"),
        (doctor.folders, {"free_bytes": lambda folder: 2**25}, "warn", "free some space"),
    ],
)
def test_scarce_resources(
    check: Check, patches: dict[str, Callable[..., Any]], level: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in patches.items():
        monkeypatch.setattr(machine, name, value)
    findings = findings_of(check)
    assert any(each.level == level and text in each.text for each in findings), findings


@pytest.mark.setting("--download-dir", "--rpc-base-path")
def test_unwritable_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"download_dir": str(tmp_path / "new" / "cache"), "rpc_base_path": str(tmp_path)}
    levels = {each.subject: each.level for each in findings_of(doctor.folders, **here)}
    assert levels["sockets"] == "ok"
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr("os.access", lambda *_: False)
    texts = {each.subject: each.text for each in findings_of(doctor.folders, **here) if each.level == "fail"}
    assert (
        texts["downloads"] == f"{here['download_dir']} is not writable; choose another with --download-dir or HF_HOME"
    )
    assert "--rpc-base-path" in texts["sockets"]


@pytest.mark.variable("HF_HUB_OFFLINE")
def test_an_unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "HF_HUB_OFFLINE is set" in one(doctor.hub).text
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    finding = one(doctor.hub)
    assert finding.level == "warn"
    assert "not reachable" in finding.text


def test_variables_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V1", "1")
    assert Finding(
        "warn", "environment", "VLLM_USE_V1 has no effect: there is one engine, which follows V1"
    ) in findings_of(doctor.environment)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    assert findings_of(doctor.environment)[-1].level == "fail"


CONFIG = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 32},
    **{"intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32"},
}


@pytest.mark.setting("--model")
def test_a_model_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert one(doctor.model, model=str(tmp_path)).text.endswith("bfloat16, up to 128 tokens")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["NoSuchForCausalLM"]}))
    finding = one(doctor.model, model=str(tmp_path))
    assert finding.level == "fail"
    assert "NoSuchForCausalLM" in finding.text
    assert "not on this machine" in one(doctor.model, model="org/never-downloaded").text
    assert findings_of(doctor.model) == []
    for missing in ("/nope", "./nope", "nope.gguf", "a/b/c"):
        finding = one(doctor.model, model=missing)
        assert finding.level == "fail", missing
        assert f"{missing}: no such file or folder" in finding.text


def test_facts_of_this_machine() -> None:
    total, free = machine.memory()
    assert 0 < free <= total
    assert machine.cores() >= 1
    assert machine.processor()
    assert machine.existing(Path("/no/such/folder")) == Path("/")


@pytest.mark.command("collect-env")
def test_secrets_are_masked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {
        "PAGODA_API_KEY": "planted-ax",
        "HF_TOKEN": "planted-bx",
        "OPENAI_API_KEY": "planted-cx",
        "S3_SECRET_ACCESS_KEY": "planted-dx",
        "AWS_SESSION_TOKEN": "planted-ex",
        "HTTPS_PROXY": "http://planted-fx:planted-gx@proxy:3128",
        "HF_ENDPOINT": "https://mirror/x?token=planted-hx",
        "VLLM_SECRET_SAUCE": "planted-ix",
        "PAGODA_MODEL": "/home/planted-jx/models/x",
        "HF_HOME": "/data/planted-kx/hub",
        "HOME": "/data/planted-kx",
        "VLLM_USAGE_SOURCE": "hf_plantedlxplantedlx",
        "PAGODA_CHAT_TEMPLATE": "signed with planted-cx",
        "USER": "planted-mx",
        "VLLM_HOST_IP": "planted-mx.example.org",
    }
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    assert main.main(["collect-env"]) == 0
    text = capsys.readouterr().out
    assert "planted" not in text
    for part in (
        "HTTPS_PROXY",
        "***@proxy:3128",
        "~/hub",
        "/home/***/models/x",
        "VLLM_SECRET_SAUCE",
        "https://mirror/x?***",
    ):
        assert part in text, part
    assert "AWS_SESSION_TOKEN" not in text
    for section in ("pagoda", "system", "devices", "packages", "environment", "limits", "backends"):
        assert f"[{section}]" in text
    assert "reference" in text
    assert "numpy" in text


def test_other_values_are_not_masked() -> None:
    hide = Redactor({"HOME": "/", "USER": "root", "SOME_KEY": "on"})
    for text in ("on the root of https://x.org/a", "/rootless/x", "torch 2.13.0+cpu", "max_num_tokens=5"):
        assert hide(text) == text
