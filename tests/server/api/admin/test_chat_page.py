"""The chat page: content, policy, access; and its behaviour in a browser, if one is installed."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest
from support.servers.chromium import Page, chromium
from support.servers.live_server import LiveServer, live_server

from pagoda.server.api.admin.chat_page import PAGE, policy

HTML = PAGE.read_text(encoding="utf-8")

in_browser = pytest.mark.program("chromium", "chromedriver")


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with chromium() as page:
        yield page


def headers_of(server: LiveServer, path: str) -> dict[str, str]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", path)
    response = connection.getresponse()
    response.read()
    connection.close()
    return dict(response.getheaders())


@pytest.mark.setting("--disable-chat-page")
def test_the_page_can_be_disabled() -> None:
    with live_server() as shown, live_server(disable_chat_page=True) as hidden:
        assert shown.get("/") == (200, HTML.encode())
        assert hidden.get("/")[0] == 404
        headers = headers_of(shown, "/")
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert headers["content-security-policy"] == policy(HTML)
    assert headers["x-content-type-options"] == "nosniff"


def test_the_page_links_only_a_reference_that_is_there() -> None:
    with live_server(disable_fastapi_docs=True) as server:
        page = server.get("/")[1].decode()
    assert 'id="docs"' in HTML
    assert 'id="docs"' not in page
    assert len(HTML) - len(page) < 300
    assert policy(page) == policy(HTML)


def test_the_page_needs_no_api_key() -> None:
    with live_server(api_key=("secret",)) as server:
        assert server.get("/")[0] == 200
        assert server.get("/v1/models")[0] == 401
        assert server.post("/v1/chat/completions", {})[0] == 401
        assert server.get("//")[0] == 401
    assert "secret" not in HTML


def test_the_policy_allows_only_the_page() -> None:
    rules = dict(rule.strip().split(" ", 1) for rule in policy(HTML).split(";"))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy(HTML.replace('"use strict"', "alert()")) != policy(HTML)


def test_no_external_resources_and_no_html_injection() -> None:
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|<(link rel=\"style|script src|img|iframe)", HTML)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", HTML)
    assert not re.search(r"\s(style|on[a-z]+)=", HTML), "the policy lets no such attribute run"
    assert re.findall(r"fetch\(([^,]*)", HTML) == ['api("v1/models")', 'api("v1/chat/completions")']


def ask(page: Page, server: LiveServer, text: str) -> None:
    page.open(server.url + "/")
    page.until(lambda: page.run("return document.querySelector('#model').options.length"))
    page.type("#message", text)


@in_browser
def test_an_answer_streams_and_is_timed(browser: Page) -> None:
    with live_server() as server:
        ask(browser, server, "<b>bold</b>\ue007")  # U+E007: the Enter key
        browser.until(lambda: "first token after" in browser.text(".facts"))
        browser.until(lambda: not browser.run("return document.querySelector('#send').hidden"))
        assert browser.text(".user .text") == "<b>bold</b>", "text stays text"
        assert browser.run("return document.querySelectorAll('main b').length") == 0
        assert re.search(r"first token after [\d.]+ s, \d+ tokens(, [\d.]+ tokens/s)?", browser.text(".facts"))
        assert browser.text("select option") == "fake"
        assert browser.text(".assistant .text")
        assert browser.text("h2") == "You|fake"
        assert browser.log() == []


@in_browser
def test_an_empty_conversation_shows_the_model_and_examples(browser: Page) -> None:
    with live_server() as server:
        browser.open(server.url + "/")
        browser.until(lambda: browser.text("#served") == "fake")
        assert browser.text("#start button").count("|") == 2, "three examples"
        assert browser.run("return document.querySelector('#docs').href") == server.url + "/docs"
        browser.click("#start button")
        browser.until(lambda: "first token after" in browser.text(".facts"))
        assert browser.text("#start") == ""
        assert browser.text(".user .text").startswith("Why is the sky blue?")
        browser.click("#new")
        assert browser.text("#served") == "fake"
        browser.click("#start button:last-child")
        assert browser.run("return document.querySelector('#message').value").endswith(": "), "it is to be completed"
        assert browser.text("article") == ""


@in_browser
def test_stop_ends_the_request(browser: Page) -> None:
    with live_server("fake:slow") as server:
        ask(browser, server, "")
        browser.run(
            """const log = document.querySelector("#log");
            const said = () => log.querySelector(".assistant .text")?.textContent;
            const options = { childList: true, subtree: true };
            const stop = () => document.querySelector("#stop").click();
            new MutationObserver(() => said() && stop()).observe(log, options);"""
        )
        browser.type("#message", "on\ue007")
        browser.until(lambda: "ended by you" in browser.text(".facts"))
        browser.until(lambda: server.state.running == 0)
        assert browser.run("return document.querySelector('#stop').hidden")
        assert len(browser.text(".assistant .text")) < 10, "it had room for more"
        success = "vllm:request_success_total"
        assert (
            f'{success}{{engine="0",finished_reason="abort",model_name="fake"}} 1.0'
            in server.get("/metrics")[1].decode()
        )


@in_browser
def test_the_page_prompts_for_a_key(browser: Page) -> None:
    with live_server(api_key=("secret",)) as server:
        browser.open(server.url + "/")
        browser.until(lambda: "API key" in browser.text(".error"))
        assert browser.run("return document.querySelector('#options').open")
        assert browser.run("return document.activeElement.id") == "key"
        browser.type("#key", "secret\ue004")  # U+E004: the Tab key
        browser.until(lambda: browser.text("select option") == "fake")
        browser.type("#message", "a\ue007")
        browser.until(lambda: "first token after" in browser.text(".facts"))
        browser.run("sessionStorage.clear()")


@in_browser
def test_an_error_is_shown_and_the_question_kept(browser: Page) -> None:
    with live_server() as server:
        ask(browser, server, "x" * 100 + "\ue007")  # the fake model's context is 64 tokens
        browser.until(lambda: "context" in browser.text(".error[role=alert]"))
        assert browser.run("return document.querySelector('#message').value") == "x" * 100
        assert browser.text("article") == ""


@in_browser
def test_settings_and_path_prefix_of_requests(browser: Page) -> None:
    with live_server() as server:
        ask(browser, server, "")
        browser.run(
            """history.replaceState(null, "", "/behind");  // as if a proxy had stripped the prefix
            window.requests = [];
            window.fetch = (url, init) => { requests.push([url, init.body]); return Promise.reject(new Error("no")); };
            document.querySelector("#system").value = "Be brief.";
            document.querySelector("#temperature").value = "0.5";
            document.querySelector("#tokens").value = "7";"""
        )
        browser.type("#message", "hello\ue008\ue007\ue000\ue007")  # Shift+Enter, then Enter
        ((url, body),) = browser.until(lambda: browser.run("return requests.map(([u, b]) => [u, JSON.parse(b)])"))
    assert url == "/behind/v1/chat/completions"
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello\n"},
    ]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("fake", 0.5, 7)


@in_browser
def test_thinking_is_folded_and_calls_are_shown(browser: Page) -> None:
    events = [
        {"reasoning": "<i>Hm"},
        {"reasoning": "m.</i>"},
        {"content": "So"},
        {"tool_calls": [{"index": 0, "function": {"name": "look", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x":1}'}}]},
    ]
    with live_server() as server:
        ask(browser, server, "")
        browser.run(
            """const lines = arguments[0].map((delta) => "data: " + JSON.stringify({choices: [{delta}]}) + "\\n\\n");
            window.fetch = () => Promise.resolve(new Response(lines.join("") + "data: [DONE]\\n\\n"));""",
            events,
        )
        browser.type("#message", "think\ue007")
        browser.until(lambda: browser.text(".assistant pre"))
        assert browser.text(".assistant details .text") == "<i>Hmm.</i>"
        assert browser.run("return document.querySelector('.assistant details').open") is False
        assert browser.text(".assistant > .text") == "So"
        assert re.sub(r"\s+", " ", browser.text(".assistant pre")) == 'Tool call: look {"x":1}'


@in_browser
def test_markdown_is_rendered_and_code_is_copied(browser: Page) -> None:
    pieces = ["See **bo", "ld** <script>window.bad = 1</script>\n\n``", "`python\nx = '<b>'\n", "```\n"]
    with live_server() as server:
        ask(browser, server, "")
        browser.log()
        browser.run(
            """const lines = arguments[0].map((content) =>
                "data: " + JSON.stringify({choices: [{delta: {content}}]}) + "\\n\\n");
            window.fetch = () => Promise.resolve(new Response(lines.join("") + "data: [DONE]\\n\\n"));
            navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); };""",
            pieces,
        )
        browser.type("#message", "**mine**\ue007")
        browser.until(lambda: browser.text(".assistant .code pre") == "x = '<b>'")
        assert browser.text(".assistant strong") == "bold"
        assert browser.text(".user .text") == "**mine**", "what was typed is not rendered"
        assert browser.run("return document.querySelectorAll('main script').length + (window.bad || 0)") == 0
        browser.click(".copy")
        browser.until(lambda: browser.text(".copy") == "Copied")
        assert browser.run("return window.copied") == "x = '<b>'"
        assert browser.log() == []
