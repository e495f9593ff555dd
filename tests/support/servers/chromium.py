"""Headless Chromium, driven over the WebDriver protocol by what the standard library has."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support.suite.watching import eventually

DRIVER = shutil.which("chromedriver")

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for a reference to an element


class Page:
    """One tab."""

    def __init__(self, driver: str, session: str) -> None:
        self._session = f"{driver}/session/{session}"

    def open(self, url: str) -> None:
        self._ask("POST", "url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """The value of a function body."""
        return self._ask("POST", "execute/sync", {"script": script, "args": args})

    def type(self, selector: str, text: str) -> None:
        """Press keys in an element."""
        found = self._ask("POST", "element", {"using": "css selector", "value": selector})[_ELEMENT]
        self._ask("POST", f"element/{found}/value", {"text": text})

    def click(self, selector: str) -> None:
        found = self._ask("POST", "element", {"using": "css selector", "value": selector})[_ELEMENT]
        self._ask("POST", f"element/{found}/click", {})

    def text(self, selector: str) -> str:
        """The text of all such elements."""
        return self.run(
            "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent).join('|')", selector
        )

    def until(self, condition: Callable[[], Any]) -> Any:
        """Return what the condition returns once that is true."""
        try:
            return eventually(condition)
        except AssertionError as error:
            raise AssertionError(self.run("return document.body.innerText")) from error

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("GET", "screenshot")))

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", size)

    def dark(self) -> None:
        self.command("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})

    def command(self, name: str, params: Any) -> Any:
        """One of Chromium's own."""
        return self._ask("POST", "goog/cdp/execute", {"cmd": name, "params": params})

    def log(self) -> list[str]:
        """What the console warns of since the last time: errors, and what the policy refuses."""
        entries = self._ask("POST", "se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def close(self) -> None:
        self._ask("DELETE", "")

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        return _call(method, f"{self._session}/{path}".rstrip("/"), body)


def _call(method: str, url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())["value"]


@contextmanager
def chromium() -> Iterator[Page]:
    """A browser with one tab."""
    assert DRIVER is not None
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        page = None
        try:
            assert process.stdout is not None
            while not (found := re.search(r"on port (\d+)\.$", process.stdout.readline().strip())):
                assert process.poll() is None, "chromedriver did not start"
            driver = f"http://127.0.0.1:{found[1]}"
            options = {
                "goog:chromeOptions": {
                    "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
                },
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            made = _call("POST", f"{driver}/session", {"capabilities": {"alwaysMatch": options}})
            page = Page(driver, made["sessionId"])
            yield page
        finally:
            if page is not None:
                with suppress(OSError):
                    page.close()
            process.kill()
