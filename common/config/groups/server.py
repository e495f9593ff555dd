"""How the HTTP server listens, whom it lets in and what it says about itself."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pagoda.common.config.fields import json_object, names, option
from pagoda.common.errors import ConfigError

_PREFIX: Final = re.compile(r"(/[\w.~!$&'()*+,;=:@-]+)*/?", re.ASCII)
"""Segments of a URL's path; no empty one in front, which browsers take for a host."""


def json_list(text: str) -> tuple[str, ...]:
    """A JSON array of strings, or one plain string. Raises ValueError on anything else."""
    if not text.lstrip().startswith("["):
        return (text,)
    items = json.loads(text)
    if not all(isinstance(item, str) for item in items):
        raise ValueError(f"{text}: a list of strings is needed")
    return tuple(items)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The flags of `serve` that are not the engine's."""

    host: str | None = option(None, "Address to listen on; default: 127.0.0.1, this machine only. 0.0.0.0: everywhere.")
    port: int = option(8000, "Port to listen on; 0: any free one.")
    uds: str | None = option(None, "Listen on this Unix socket instead of host and port.")
    api_key: tuple[str, ...] = option((), "Keys, one of which a client must present; repeatable.")
    chat_template: str | None = option(
        None, "File of a chat template, the template itself, or chatml_tools; default: the model's."
    )
    trust_request_chat_template: bool = option(False, "Let a request bring its own chat template.")
    response_role: str = option("assistant", "Role of the answers in a chat.")
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = option(
        "info", "How much the HTTP server logs."
    )
    disable_uvicorn_access_log: bool = option(False, "Do not log each HTTP request.")
    disable_access_log_for_endpoints: tuple[str, ...] = option(
        (), "Paths whose requests are not logged, between commas: /health,/metrics.", parse=names
    )
    allow_credentials: bool = option(False, "CORS: allow credentials.")
    allowed_origins: tuple[str, ...] = option(("*",), "CORS: allowed origins, as a JSON list.", parse=json_list)
    allowed_methods: tuple[str, ...] = option(("*",), "CORS: allowed methods, as a JSON list.", parse=json_list)
    allowed_headers: tuple[str, ...] = option(("*",), "CORS: allowed headers, as a JSON list.", parse=json_list)
    root_path: str = option(
        "", "Path prefix of the server behind a proxy, which may strip it or leave it: requests are answered with both."
    )
    ssl_keyfile: str | None = option(None, "Private key for TLS.")
    ssl_certfile: str | None = option(None, "Certificate for TLS.")
    ssl_ca_certs: str | None = option(None, "Authorities that client certificates are checked against.")
    ssl_cert_reqs: int = option(0, "Client certificates: 0 none, 1 optional, 2 required.")
    disable_fastapi_docs: bool = option(False, "Serve no /docs, /redoc and /openapi.json.")
    disable_chat_page: bool = option(False, "Serve no page to chat on at /.")
    disable_frontend_multiprocessing: bool = option(False, "Run the engine in the server's own process.")
    max_log_len: int | None = option(None, "Most characters or token ids of a prompt in the log; default: all.")
    enable_prompt_tokens_details: bool = option(False, "Report cached prompt tokens in `usage`.")
    enable_force_include_usage: bool = option(False, "Report usage at the end of every stream.")
    return_tokens_as_token_ids: bool = option(False, "Write tokens in logprobs as token_id:N.")
    enable_request_id_headers: bool = option(
        False, "Answer with an X-Request-Id header: the request's own, else a new one."
    )
    enable_log_outputs: bool = option(False, "Log each answer too; needs --enable-log-requests.")
    enable_log_deltas: bool = option(True, "With --enable-log-outputs: log each message of a stream too.")
    log_error_stack: bool = option(False, "Show the traceback of an error that ends the command, or fails a request.")
    enable_server_load_tracking: bool = option(False, "Count running requests and answer GET /load.")
    enable_tokenizer_info_endpoint: bool = option(False, "Answer GET /tokenizer_info.")
    chat_template_content_format: Literal["auto", "string", "openai"] = option(
        "auto",
        "Content of messages as the template gets it: text, or a list of parts; auto looks at the template.",
    )
    default_chat_template_kwargs: Mapping[str, Any] = option(
        {}, "JSON: variables of the chat template for requests that do not set them.", parse=json_object
    )
    middleware: tuple[str, ...] = option((), "ASGI middleware by qualified name: a class or an async function.")
    ssl_ciphers: str | None = option(None, "Ciphers of TLS 1.2 and older, as OpenSSL names them; default: OpenSSL's.")
    enable_ssl_refresh: bool = option(False, "Load key and certificate again when their files change.")
    api_server_count: int = option(
        1, "HTTP processes.", aliases=("-asc",), refused="one process serves HTTP; start more servers for more"
    )
    headless: bool = option(False, "An engine without HTTP, for every host but the first: it does what host 0 says.")
    lora_modules: tuple[str, ...] = option(
        (), "LoRA adapters, name=path.", refused="LoRA adapters are not in this version; serve the merged weights"
    )
    enable_auto_tool_choice: bool = option(
        False, "Let the model call tools as it sees fit, where a request allows it; needs --tool-call-parser."
    )
    tool_call_parser: str | None = option(None, "Name of the format in which the model writes tool calls.")
    tool_parser_plugin: str = option("", "File or module with formats of tool calls, as a dictionary TOOL_FORMATS.")
    tool_server: str | None = option(
        None, "Server of built-in tools.", refused="only the client's own tools are called; give them in its requests"
    )
    exclude_tools_when_tool_choice_none: bool = option(False, "Show the template no tools when none may be called.")
    h11_max_incomplete_event_size: int = option(65536, "Most bytes of a request's head: its line and headers together.")
    h11_max_header_count: int = option(256, "Most headers of a request.")
    timeout_headers: float = option(
        10.0, "Seconds from a connection, or a request's first byte, to the end of its head."
    )
    timeout_body: float = option(
        30.0, "Seconds that a request's body may stand still; after them it must also come at 1 KiB/s on average."
    )
    timeout_keep_alive: float = option(5.0, "Seconds that a connection stays open without a request.")
    max_connections: int = option(8192, "Most connections at once; others are answered 503.")
    sse_keep_alive_interval: float = option(
        0.0, "Seconds without a message after which a stream says that it is alive, for proxies; 0: never."
    )
    shutdown_timeout: float = option(0.0, "Seconds that running requests get to finish after SIGTERM; 0: none.")
    keep_alive_on_engine_death: bool = option(False, "Stay up when the engine dies, and answer every request with 503.")
    server_dev_mode: bool = option(False, "Answer /sleep, /pause, /server_info and their like.")
    max_body_bytes: int = option(32 * 2**20, "Largest request body.")
    strict_requests: bool = option(
        False,
        "Answer 400 to a request with a field, hint or tool type that has no effect here, instead of listing it in "
        "the response header x-pagoda-ignored.",
    )
    max_stored_responses: int = option(
        1024, "Responses of /v1/responses kept to be fetched and gone on from, the newest; 0: none."
    )
    max_stored_response_bytes: int = option(64 * 2**20, "Most memory for responses that are kept; 0: none are.")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("--port", f"{self.port} is not a port; use 1 to 65535, or 0 for any free one")
        if self.enable_auto_tool_choice and not self.tool_call_parser:
            raise ConfigError(
                "--enable-auto-tool-choice", "needs to know how the model writes calls; give --tool-call-parser"
            )
        if self.tool_parser_plugin and not self.tool_call_parser:
            raise ConfigError("--tool-parser-plugin", "name the one of its formats to use with --tool-call-parser")
        if any(not key for key in self.api_key):
            raise ConfigError("--api-key", "a key is empty")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            missing = "--ssl-keyfile" if self.ssl_keyfile is None else "--ssl-certfile"
            raise ConfigError(missing, "TLS needs both --ssl-keyfile and --ssl-certfile")
        for name in ("enable_ssl_refresh", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"):
            if getattr(self, name) and self.ssl_certfile is None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(flag, "there is no certificate; give --ssl-keyfile and --ssl-certfile")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError("--ssl-cert-reqs", f"{self.ssl_cert_reqs} is not 0, 1 or 2")
        for flag, seconds in (
            ("--shutdown-timeout", self.shutdown_timeout),
            ("--sse-keep-alive-interval", self.sse_keep_alive_interval),
        ):
            if not 0.0 <= seconds < float("inf"):
                raise ConfigError(flag, f"{seconds} is not a number of seconds")
        for flag, seconds in (
            ("--timeout-headers", self.timeout_headers),
            ("--timeout-body", self.timeout_body),
            ("--timeout-keep-alive", self.timeout_keep_alive),
        ):
            if not 0.0 < seconds < float("inf"):
                raise ConfigError(flag, f"{seconds} is not a number of seconds above 0")
        for flag, most in (
            ("--max-body-bytes", self.max_body_bytes),
            ("--max-connections", self.max_connections),
            ("--h11-max-incomplete-event-size", self.h11_max_incomplete_event_size),
            ("--h11-max-header-count", self.h11_max_header_count),
        ):
            if most < 1:
                raise ConfigError(flag, f"{most} is not positive; use 1 or more")
        for flag, most in (
            ("--max-stored-responses", self.max_stored_responses),
            ("--max-stored-response-bytes", self.max_stored_response_bytes),
        ):
            if most < 0:
                raise ConfigError(flag, f"{most} is negative; use 0 to keep none, or more")
        if self.max_log_len is not None and self.max_log_len < 0:
            raise ConfigError("--max-log-len", f"{self.max_log_len} is negative; use 0 or more, or drop it for all")
        if self.root_path and not _PREFIX.fullmatch(self.root_path):
            raise ConfigError("--root-path", f"{self.root_path} is not a path; write one such as /models/small")

    @property
    def prefix(self) -> str:
        """The path prefix without a slash at its end; empty where there is none."""
        return self.root_path.rstrip("/")

    @property
    def address(self) -> str:
        """Where the server listens when no Unix socket is given."""
        return self.host if self.host is not None else "127.0.0.1"
