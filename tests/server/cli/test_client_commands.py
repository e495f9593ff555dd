"""chat and complete against a running server, and the deprecated server module."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.servers.live_server import LiveServer, live_server

from pagoda.server.cli import api_server, main
from pagoda.server.cli.client.http_client import ApiClient, ApiError


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(api_key=("k",), engine={"served_model_name": ["fake", "second"]}) as server:
        yield server


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")


def typing(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Simulate typed lines on a terminal."""
    left = iter(lines)

    def typed(prompt: str = "") -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)


@pytest.mark.command("chat", "complete")
@pytest.mark.setting("--url", "--quick", "--max-tokens")
@pytest.mark.parametrize(("command", "text"), [("chat", ";<="), ("complete", "bcd")])
def test_quick(server: LiveServer, command: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([command, "--url", f"{server.url}/v1", "--max-tokens", "3", "-q", "a"]) == 0
    assert capsys.readouterr().out == f"{text}\n"
    assert main.main([command, "--url", f"{server.url}/v1", "--max-tokens", "2", "--quick", "a"]) == 0
    assert capsys.readouterr().out == f"{text[:2]}\n"


def test_lines_of_standard_input(
    server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typing(monkeypatch, "a", "", "p")
    assert main.main(["complete", "--url", f"{server.url}/v1", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == "bc\nqr\n"


def test_reasoning_is_printed_but_not_sent_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []

    def stream(client: ApiClient, path: str, body: dict[str, object]) -> Iterator[object]:
        sent.append([each["content"] for each in body["messages"]])  # type: ignore[attr-defined]
        return real_stream(client, path, body)

    real_stream = ApiClient.stream
    monkeypatch.setattr(ApiClient, "stream", stream)
    with live_server("fake:say", engine={"reasoning_parser": "qwen3"}) as thinking:
        typing(monkeypatch, "[[<think>hm</think>ok]]", "b")
        assert main.main(["chat", "--url", f"{thinking.url}/v1", "--model-name", "fake"]) == 0
        assert capsys.readouterr().out == "hm\n\nok\n" * 2
    assert sent[1] == ["[[<think>hm</think>ok]]", "ok", "b"]


@pytest.mark.setting("--system-prompt")
def test_a_conversation_is_sent_back(
    server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []

    def stream(client: ApiClient, path: str, body: dict[str, object]) -> Iterator[object]:
        sent.append([(each["role"], each["content"]) for each in body["messages"]])  # type: ignore[attr-defined]
        return real_stream(client, path, body)

    real_stream = ApiClient.stream
    monkeypatch.setattr(ApiClient, "stream", stream)
    typing(monkeypatch, "a", "b")
    assert main.main(["chat", "--url", f"{server.url}/v1", "--max-tokens", "2", "--system-prompt", "s"]) == 0
    assert capsys.readouterr().out == ";<\n;<\n"
    first = [("system", "s"), ("user", "a")]
    assert sent == [first, [*first, ("assistant", ";<"), ("user", "b")]]


@pytest.mark.setting("--model-name")
@pytest.mark.parametrize("command", ["chat", "complete"])
def test_model_name(server: LiveServer, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [command, "--url", f"{server.url}/v1", "-q", "a", "--max-tokens", "1", "--model-name"]
    assert main.main([*words, "second"]) == 0
    assert main.main([*words, "other"]) == 1
    assert "404" in capsys.readouterr().err


@pytest.mark.setting("--api-key")
@pytest.mark.variable("OPENAI_API_KEY")
@pytest.mark.parametrize("command", ["chat", "complete"])
def test_api_key(
    server: LiveServer, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [command, "--url", f"{server.url}/v1", "-q", "a"]
    assert main.main(words) == 0
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    assert main.main(words) == 1
    assert "401" in capsys.readouterr().err
    assert main.main([*words, "--api-key", "k"]) == 0


def test_the_servers_own_key_is_not_sent(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """PAGODA_API_KEY is for the server on this machine; --url may name any."""
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.setenv("PAGODA_API_KEY", "k")
    assert main.main(["chat", "--url", f"{server.url}/v1", "-q", "a"]) == 1


@pytest.mark.parametrize(
    ("words", "line", "status"),
    [
        (["--url", "http://127.0.0.1:1/v1"], "is the server running?", 1),
        (["--url", "ftp://x"], "--url: ftp://x is not an http URL", 2),
        (["--max-tokens", "0"], "--max-tokens: 0 is not positive", 2),
        (["--max-tokens", "x"], "--max-tokens: 'x'", 2),
    ],
)
@pytest.mark.parametrize("command", ["chat", "complete"])
def test_errors_are_one_line(
    command: str, words: list[str], line: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([command, *words, "-q", "a"]) == status
    text = capsys.readouterr().err
    assert line in text
    assert text.count("\n") == 1


def test_an_error_in_a_stream_is_reported() -> None:
    with live_server("fake:crash") as server, pytest.raises(ApiError, match="the engine has ended"):
        list(ApiClient(f"{server.url}/v1").stream("/completions", {"prompt": "a", "max_tokens": 9}))


@pytest.mark.command("python -m vllm.entrypoints.openai.api_server")
def test_the_deprecated_server_module(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(main, "main", lambda words: calls.append(words) or 7)
    assert api_server.main(["--model", "m", "--port", "1"]) == 7
    assert calls == [["serve", "--model", "m", "--port", "1"]]
    assert capsys.readouterr().err == "python -m pagoda.server.cli.api_server is deprecated; use pagoda serve MODEL\n"
    done = subprocess.run(
        [sys.executable, "-m", "pagoda.server.cli.api_server", "--no-such-flag"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "unknown flag --no-such-flag" in done.stderr


COMMANDS = {
    "new": main.Command("Something new.", "module"),
    "old": main.Command("Something else.", refused="use new"),
    "both": main.Command("More.", commands={"older": main.Command("It.", refused="use new")}),
}


def test_refused_commands_name_an_alternative(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "COMMANDS", COMMANDS)
    for words in (["old"], ["both", "older"]):
        assert main.main(words) == 2
        assert f"pagoda {' '.join(words)}: error: not in this version: use new" in capsys.readouterr().err


def test_help_lists_refused_commands_apart(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "COMMANDS", COMMANDS)
    assert main.main(["--help"]) == 0
    before, _, after = capsys.readouterr().out.partition("not in this version:")
    assert "new" in before
    assert "old" not in before
    assert "old" in after
    assert "both" in after


@pytest.mark.command("bench", "bench sweep")
def test_help_lists_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "--help"]) == 0
    assert {"latency", "serve", "throughput", "startup", "sweep"} <= set(capsys.readouterr().out.split())
    assert main.main(["bench", "sweep", "--help"]) == 0
    assert {"serve", "serve_sla", "startup", "plot", "plot_pareto"} <= set(capsys.readouterr().out.split())
