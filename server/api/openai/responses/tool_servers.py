"""Servers of the Model Context Protocol whose tools a response calls: the allow-list of --tool-server, and sessions.

A session belongs to one response. What a server sends is untrusted: its size and the time that it takes are bounded,
redirects are not followed, and its text reaches the model as the result of a call only.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import ConfigError, RequestError
from pagoda.server.api.openai.responses.tools import ListedTool, McpTool

T = TypeVar("T")

logger = logging.getLogger(__name__)

FLAG: Final = "--tool-server"
MAX_SERVERS: Final = 16
"""Maximum number of servers of one request."""

MAX_TOOLS: Final = 128
"""Maximum number of tools that a server may list."""

CLOSE_SECONDS: Final = 2.0
"""Time for a server to be told that a session has ended."""

_LABELLED: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}=")


class ToolServerError(Exception):
    """A server that cannot be reached, or that answers late, too much, or an error."""


# The allow-list.


@dataclass(frozen=True, slots=True)
class ToolServer:
    """A server that requests may use."""

    label: str  # The server_label of requests that give no server_url; empty: requests give the URL.
    url: str

    @property
    def origin(self) -> tuple[str, str, int]:
        return origin_of(self.url)


def origin_of(url: str) -> tuple[str, str, int]:
    """Return scheme, host and port of a URL. Raise ValueError for one that is not http or https."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError("not an http or https URL without credentials")
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


@cache
def allowed_servers(setting: str | None) -> tuple[ToolServer, ...]:
    """Return the servers of --tool-server. Raise ConfigError."""
    servers = []
    for entry in filter(None, map(str.strip, (setting or "").split(","))):
        label = entry.partition("=")[0] if _LABELLED.match(entry) else ""
        address = entry.removeprefix(f"{label}=") if label else entry
        if address == "demo":
            raise ConfigError(FLAG, "demo: there are no built-in tools; name a server of the Model Context Protocol")
        url = address if "://" in address else f"http://{address}/mcp"
        try:
            origin_of(url)
        except ValueError as error:
            raise ConfigError(FLAG, f"{entry}: {error}; give host:port, a URL, or LABEL=URL") from None
        servers.append(ToolServer(label, url))
    if servers and find_spec("mcp") is None:
        raise ConfigError(FLAG, "needs the official client library: pip install 'pagoda[mcp]'")
    return tuple(servers)


def prepare(setting: str | None) -> None:
    """Check --tool-server and import the client library, which takes seconds, before the first request needs it.

    Raise ConfigError.
    """
    if allowed_servers(setting):
        importlib.import_module("mcp.client.client")


def resolve_url(servers: Sequence[ToolServer], tool: McpTool, path: str) -> str:
    """Return the URL of the server that a tool of a request names. Raise RequestError unless it is allowed."""
    if tool.server_url is None:
        url = next((server.url for server in servers if server.label == tool.server_label), None)
        if url is None:
            labels = ", ".join(server.label for server in servers if server.label) or "none has a label"
            raise RequestError(
                f"{path}.server_label",
                f"{path}.server_label: {FLAG} has no server {tool.server_label[:64]!r} ({labels}); give server_url",
            )
        return url
    try:
        origin = origin_of(tool.server_url)
    except ValueError as error:
        raise RequestError(f"{path}.server_url", f"{path}.server_url: {error}") from None
    if origin not in {server.origin for server in servers}:
        raise RequestError(
            f"{path}.server_url", f"{path}.server_url: {origin[1]}:{origin[2]} is not among the servers of {FLAG}"
        )
    return tool.server_url


# Sessions.


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call returned."""

    output: str | None  # None: the call failed.
    error: str | None = None


class ToolSession:
    """A session with one server. Its client runs in a task of its own, since it must end in the task that began it."""

    def __init__(self, label: str, url: str, headers: Mapping[str, str], config: ServerConfig) -> None:
        self._label = label
        self._url = url
        self._headers = headers
        self._seconds = config.tool_server_timeout
        self._limit = config.max_tool_result_bytes
        self._task: asyncio.Task[None] | None = None
        self._requests: asyncio.Queue[tuple[Callable[[Any], Awaitable[Any]], asyncio.Future[Any]] | None]
        self._too_large: asyncio.Event

    async def tools(self) -> list[ListedTool]:
        """Return the server's tools. Raise ToolServerError."""

        async def listed(client: Any) -> list[ListedTool]:
            tools: list[ListedTool] = []
            cursor = None
            while True:
                page = await client.list_tools(cursor=cursor)
                tools += [_listed(tool) for tool in page.tools]
                if len(tools) > MAX_TOOLS:
                    raise ToolServerError(f"it lists more than {MAX_TOOLS} tools")
                cursor = page.next_cursor
                if cursor is None:
                    return tools

        return await self._ask(listed)

    async def call(self, name: str, arguments: str) -> ToolResult:
        """Call a tool with a JSON object. Every failure is a result: the model sees it."""
        try:
            values = json.loads(arguments or "{}")
            if not isinstance(values, dict):
                raise ToolServerError("the arguments are not a JSON object")
            result = await self._ask(lambda client: client.call_tool(name, values))
        except (ValueError, RecursionError) as error:
            return ToolResult(None, f"the arguments are not valid JSON: {error}")
        except ToolServerError as error:
            return ToolResult(None, str(error))
        text = _text_of(result)
        return ToolResult(None, text or "the tool failed") if result.is_error else ToolResult(text)

    async def close(self) -> None:
        """End the session. Does not raise."""
        task = self._task
        if task is None:
            return
        self._requests.put_nowait(None)
        try:
            await asyncio.wait({task}, timeout=CLOSE_SECONDS)
        finally:
            await self._kill()

    async def _ask(self, request: Callable[[Any], Awaitable[T]]) -> T:
        """Return what `request` returns of the client. Raise ToolServerError, which ends the session."""
        if self._task is None:
            self._requests = asyncio.Queue()
            self._too_large = asyncio.Event()
            self._task = asyncio.create_task(self._run(), name=f"tool server {self._label}")
        reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((request, reply))
        too_large = asyncio.ensure_future(self._too_large.wait())
        waited: set[asyncio.Future[Any]] = {reply, self._task, too_large}
        try:
            await asyncio.wait(waited, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._too_large.is_set():
                raise self._error(f"its answer is larger than {self._limit} bytes (--max-tool-result-bytes)")
            if reply.done():
                return reply.result()
            if self._task.done():
                raise self._error(_cause(self._task.exception()))
            raise self._error(f"no answer within {self._seconds:g} s (--tool-server-timeout)")
        except ToolServerError:
            await self._kill()
            raise
        except asyncio.CancelledError:
            raise
        except Exception as error:  # The library and the server have errors of many kinds.
            raise self._error(_cause(error)) from None
        finally:
            too_large.cancel()
            reply.cancel()

    def _error(self, reason: str) -> ToolServerError:
        return ToolServerError(f"tool server {self._label!r}: {reason}")

    async def _kill(self) -> None:
        task = self._task
        self._task = None
        if task is not None:
            task.cancel()
            task.add_done_callback(_take_exception)
            await asyncio.wait({task}, timeout=CLOSE_SECONDS)

    async def _run(self) -> None:
        """Serve requests over one connection until None arrives."""
        mcp_client = importlib.import_module("mcp.client.client")
        transport = importlib.import_module("mcp.client.streamable_http")
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(_http_client(self._headers, self._limit, self._too_large.set))
            streams = transport.streamable_http_client(self._url, http_client=http)
            client = await stack.enter_async_context(mcp_client.Client(streams, cache=None))
            while (item := await self._requests.get()) is not None:
                request, reply = item
                try:
                    result = await request(client)
                except Exception as error:
                    if not reply.done():
                        reply.set_exception(error)
                else:
                    if not reply.done():
                        reply.set_result(result)


def _take_exception(task: asyncio.Task[None]) -> None:
    """Read the exception of a session that was ended, so that asyncio does not log it as never retrieved."""
    if not task.cancelled():
        task.exception()


def _listed(tool: Any) -> ListedTool:
    read_only = tool.annotations is not None and bool(tool.annotations.read_only_hint)
    return ListedTool(tool.name, tool.description, tool.input_schema, read_only)


def _text_of(result: Any) -> str:
    """Return the texts of a result; what is no text is named."""
    texts = [block.text if block.type == "text" else f"[{block.type} content is not shown]" for block in result.content]
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


def _cause(error: BaseException | None) -> str:
    """Return the first error of a group of errors as text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{str(error)[:300] or type(error).__name__}" if error is not None else "the session has ended"


@asynccontextmanager
async def _http_client(headers: Mapping[str, str], limit: int, on_excess: Callable[[], None]) -> AsyncGenerator[Any]:
    """A context with an HTTP client whose responses have at most `limit` bytes; `on_excess` is called for a larger one.

    Responses are not compressed, so that no small one becomes large.
    """
    httpx = importlib.import_module("httpx2")
    inner = httpx.AsyncHTTPTransport()

    class Bounded(httpx.AsyncByteStream):  # type: ignore[misc, name-defined]
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for chunk in self._stream:
                size += len(chunk)
                if size > limit:
                    on_excess()
                    raise httpx.ReadError("the response is too large")
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    class Transport(httpx.AsyncBaseTransport):  # type: ignore[misc, name-defined]
        async def handle_async_request(self, request: Any) -> Any:
            response = await inner.handle_async_request(request)
            if response.headers.get("content-encoding", "identity") != "identity":
                await response.aclose()
                raise httpx.ReadError("the response is compressed, which was not asked for")
            response.stream = Bounded(response.stream)
            return response

        async def aclose(self) -> None:
            await inner.aclose()

    async with httpx.AsyncClient(
        transport=Transport(),
        headers={**headers, "accept-encoding": "identity"},
        follow_redirects=False,
        timeout=httpx.Timeout(None),  # Calls are bounded as a whole.
    ) as client:
        yield client


class ToolSessions:
    """The sessions of one response, by label."""

    def __init__(self) -> None:
        self._sessions: dict[str, ToolSession] = {}
        self.listings: list[tuple[str, list[dict[str, Any]]]] = []  # Label and the tools that it offers, in order.

    async def open(self, config: ServerConfig, tools: Sequence[Any]) -> None:
        """Ask the servers of a request for their tools. Raise RequestError or ToolServerError; then close it."""
        servers = allowed_servers(config.tool_server)
        mcp_tools = [(f"tools[{index}]", tool) for index, tool in enumerate(tools) if isinstance(tool, McpTool)]
        if len(mcp_tools) > MAX_SERVERS:
            raise RequestError("tools", f"tools has {len(mcp_tools)} servers; at most {MAX_SERVERS} are allowed")
        for path, tool in mcp_tools:
            tool.check(path)
            if tool.server_label in self._sessions:
                raise RequestError(
                    f"{path}.server_label", f"{path}.server_label: {tool.server_label!r} is used twice; use another"
                )
            url = resolve_url(servers, tool, path)
            self._sessions[tool.server_label] = ToolSession(tool.server_label, url, tool.http_headers(path), config)
        listed = await asyncio.gather(*(session.tools() for session in self._sessions.values()), return_exceptions=True)
        for (path, tool), result in zip(mcp_tools, listed, strict=True):
            if isinstance(result, BaseException):
                raise result
            self.listings.append((tool.server_label, tool.take_listing(result, path)))

    async def call(self, label: str, name: str, arguments: str) -> ToolResult:
        """Call a tool of a server. Every failure is a result."""
        session = self._sessions.get(label)
        if session is None:
            return ToolResult(None, f"the request has no tool server {label[:64]!r}")
        return await session.call(name, arguments)

    async def close(self) -> None:
        """End all sessions. Does not raise."""
        sessions = list(self._sessions.values())
        self._sessions.clear()
        await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)
