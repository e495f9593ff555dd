"""TLS: server and client certificates, ciphers, and certificate reload."""

import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.servers.live_server import LiveServer, live_server
from support.suite.watching import eventually, logged

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import ConfigError
from pagoda.server.http import server as tls


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of one.key, one.crt, two.key, two.crt, each self-signed for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("one", "two"):
        words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
        files = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt")]
        subprocess.run([*words, *files], check=True, capture_output=True)
    return folder


def use(certificates: Path, name: str, folder: Path) -> dict[str, str]:
    """Put a certificate where a server looks."""
    for kind in ("key", "crt"):
        shutil.copy(certificates / f"{name}.{kind}", folder / f"now.{kind}")
    return {"ssl_keyfile": str(folder / "now.key"), "ssl_certfile": str(folder / "now.crt")}


def handshake(server: LiveServer, **how: Any) -> tuple[bytes, str]:
    """The server's certificate and the cipher of a new connection, which must then work."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if "maximum" in how:
        context.maximum_version = how["maximum"]
    if "own" in how:
        context.load_cert_chain(f"{how['own']}.crt", f"{how['own']}.key")
    raw = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    with raw, context.wrap_socket(raw) as secure:
        secure.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in secure.recv(1000)
        certificate, cipher = secure.getpeercert(binary_form=True), secure.cipher()
    assert certificate is not None
    assert cipher is not None
    return certificate, cipher[0]


def der(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


@pytest.mark.setting("--ssl-keyfile", "--ssl-certfile")
def test_tls(certificates: Path, tmp_path: Path) -> None:
    with live_server(**use(certificates, "one", tmp_path)) as server:
        assert handshake(server)[0] == der(certificates / "one.crt")


@pytest.mark.setting("--ssl-ca-certs", "--ssl-cert-reqs")
def test_clients_must_show_a_certificate(certificates: Path, tmp_path: Path) -> None:
    files = use(certificates, "one", tmp_path)
    with live_server(**files, ssl_ca_certs=str(certificates / "two.crt"), ssl_cert_reqs=2) as server:
        handshake(server, own=certificates / "two")
        with pytest.raises((OSError, AssertionError)):
            handshake(server)
        with pytest.raises((OSError, AssertionError)):
            handshake(server, own=certificates / "one")


@pytest.mark.setting("--ssl-ciphers")
def test_ciphers(certificates: Path, tmp_path: Path) -> None:
    files = use(certificates, "one", tmp_path)
    for cipher in ("ECDHE-RSA-AES128-GCM-SHA256", "ECDHE-RSA-AES256-GCM-SHA384"):
        with live_server(**files, ssl_ciphers=cipher) as server:
            assert handshake(server, maximum=ssl.TLSVersion.TLSv1_2)[1] == cipher


@pytest.mark.setting("--enable-ssl-refresh")
def test_a_new_certificate_serves_new_connections(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "TLS_POLL_SECONDS", 0.02)
    files = use(certificates, "one", tmp_path)
    one, two = der(certificates / "one.crt"), der(certificates / "two.crt")
    with logged(caplog, "pagoda.server.http.server"), live_server(**files, enable_ssl_refresh=True) as server:
        assert handshake(server)[0] == one
        shutil.copy(certificates / "two.crt", tmp_path / "now.crt")  # its key does not go with it yet
        eventually(lambda: "not valid yet" in caplog.text)
        assert handshake(server)[0] == one
        shutil.copy(certificates / "two.key", tmp_path / "now.key")
        eventually(lambda: handshake(server)[0] == two)


@pytest.mark.setting("--enable-ssl-refresh", "--ssl-ca-certs")
def test_an_authority_that_left_the_file_admits_nobody(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "TLS_POLL_SECONDS", 0.02)
    files, authorities = use(certificates, "one", tmp_path), tmp_path / "authorities"
    shutil.copy(certificates / "one.crt", authorities)
    settings = files | {"ssl_ca_certs": str(authorities)}
    with (
        logged(caplog, "pagoda.server.http.server"),
        live_server(**settings, ssl_cert_reqs=2, enable_ssl_refresh=True) as server,
    ):
        handshake(server, own=certificates / "one")
        shutil.copy(certificates / "two.crt", authorities)
        eventually(lambda: "new connections use them" in caplog.text)
        handshake(server, own=certificates / "two")
        with pytest.raises((OSError, AssertionError)):
            handshake(server, own=certificates / "one")


def test_an_encrypted_key_is_refused_without_asking_for_its_pass_phrase(certificates: Path, tmp_path: Path) -> None:
    files = use(certificates, "one", tmp_path)
    plain, key = str(certificates / "one.key"), files["ssl_keyfile"]
    words = ["openssl", "pkey", "-in", plain, "-aes256", "-passout", "pass:secret", "-out", key]
    subprocess.run(words, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="is encrypted") as error:
        tls.tls_context(ServerConfig(**files))
    assert error.value.setting == "--ssl-keyfile"


def test_authorities_without_a_demand_for_certificates_are_pointed_out(
    certificates: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = use(certificates, "one", tmp_path) | {"ssl_ca_certs": str(certificates / "two.crt")}
    with logged(caplog, "pagoda.server.http.server"):
        tls.Tls(ServerConfig(**settings, ssl_cert_reqs=2))
        assert not caplog.text
        tls.Tls(ServerConfig(**settings))
    assert "clients are not asked for certificates" in caplog.text


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"ssl_certfile": "/no/such"}, "--ssl-certfile"),
        ({"ssl_keyfile": "/no/such"}, "--ssl-keyfile"),
        ({"ssl_ca_certs": "/no/such"}, "--ssl-ca-certs"),
        ({"ssl_ciphers": "ROT13"}, "--ssl-ciphers"),
    ],
)
def test_wrong_tls_settings_name_the_flag(
    certificates: Path, tmp_path: Path, settings: dict[str, Any], flag: str
) -> None:
    with pytest.raises(ConfigError) as error:
        tls.tls_context(ServerConfig(**(use(certificates, "one", tmp_path) | settings)))
    assert error.value.setting == flag


@pytest.mark.parametrize("field", ["enable_ssl_refresh", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"])
def test_tls_settings_need_a_certificate(field: str) -> None:
    value = {"enable_ssl_refresh": True, "ssl_cert_reqs": 2}.get(field, "x")
    with pytest.raises(ConfigError) as error:
        ServerConfig(**{field: value})
    assert error.value.setting == "--" + field.replace("_", "-")


def test_a_demand_for_certificates_needs_authorities(certificates: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--ssl-ca-certs") as error:
        ServerConfig(**use(certificates, "one", tmp_path), ssl_cert_reqs=2)
    assert error.value.setting == "--ssl-cert-reqs"
