"""Settings of the HTTP server: address, access, TLS, limits and responses."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pagoda.common.config.fields import (
    check_port,
    comma_separated,
    flag_of,
    json_object,
    need_not_negative,
    need_positive,
    option,
)
from pagoda.common.errors import ConfigError

MAX_API_SERVERS: Final = 64
"""Maximum number of API server processes."""

_PREFIX: Final = re.compile(r"(/[\w.~!$&'()*+,;=:@-]+)*/?", re.ASCII)
"""URL path; a leading empty segment is excluded, because browsers read `//x` as a host."""


def json_list(text: str) -> tuple[str, ...]:
    """Parse a JSON array of strings, or return a plain string as the only item. Raise ValueError otherwise."""
    if not text.lstrip().startswith("["):
        return (text,)
    items = json.loads(text)
    if not all(isinstance(item, str) for item in items):
        raise ValueError(f"{text}: must be a list of strings")
    return tuple(items)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server of `serve`."""

    host: str | None = option(
        None, "Address to listen on; default: 127.0.0.1 (this machine only). Use 0.0.0.0 for all interfaces."
    )
    port: int = option(8000, "Port to listen on; 0: any free port.")
    uds: str | None = option(None, "Unix domain socket to listen on, instead of host and port; its mode is 0600.")
    api_key: tuple[str, ...] = option(
        (),
        "API keys; if set, requests must send one of them (Authorization: Bearer KEY, X-API-Key or api-key). "
        "Repeatable.",
    )
    chat_template: str | None = option(
        None,
        "Chat template: a file, the template's text, or chatml_tools, a built-in template that shows tools; default: "
        "the model's.",
    )
    trust_request_chat_template: bool = option(False, "Allow requests to set chat_template; only for trusted clients.")
    response_role: str = option("assistant", "Role of the messages in chat responses.")
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = option(
        "info", "Log level of the HTTP server."
    )
    disable_uvicorn_access_log: bool = option(False, "Disable the access log.")
    disable_access_log_for_endpoints: tuple[str, ...] = option(
        (), "Comma-separated paths to leave out of the access log: /health,/metrics.", parse=comma_separated
    )
    allow_credentials: bool = option(False, "CORS: allow credentials.")
    allowed_origins: tuple[str, ...] = option(("*",), "CORS: allowed origins, as a JSON list.", parse=json_list)
    allowed_methods: tuple[str, ...] = option(("*",), "CORS: allowed methods, as a JSON list.", parse=json_list)
    allowed_headers: tuple[str, ...] = option(("*",), "CORS: allowed headers, as a JSON list.", parse=json_list)
    root_path: str = option(
        "", "Path prefix under which a reverse proxy exposes the server; routes are served with and without it."
    )
    ssl_keyfile: str | None = option(None, "TLS private key file.")
    ssl_certfile: str | None = option(None, "TLS certificate file.")
    ssl_ca_certs: str | None = option(
        None,
        "File of CA certificates. It verifies client certificates (see --ssl-cert-reqs) and completes the server's "
        "own certificate chain.",
    )
    ssl_cert_reqs: int = option(0, "Client certificates: 0 none, 1 optional, 2 required.")
    disable_fastapi_docs: bool = option(False, "Disable /docs, /redoc and /openapi.json.")
    disable_chat_page: bool = option(False, "Disable the chat page at /.")
    disable_frontend_multiprocessing: bool = option(
        False, "Run the engine in the API server's process instead of a separate one."
    )
    max_log_len: int | None = option(
        None, "Maximum number of prompt characters or token ids in a log line; default: unlimited."
    )
    enable_prompt_tokens_details: bool = option(False, "Include prompt_tokens_details (cached tokens) in usage.")
    enable_force_include_usage: bool = option(False, "Include usage in every streamed response.")
    return_tokens_as_token_ids: bool = option(False, 'Represent tokens in logprobs as "token_id:N".')
    enable_request_id_headers: bool = option(
        False, "Add an X-Request-Id header to responses: the request's, or a generated one."
    )
    enable_log_outputs: bool = option(False, "Log model outputs; needs --enable-log-requests.")
    enable_log_deltas: bool = option(True, "Log each streamed delta; applies with --enable-log-outputs.")
    log_error_stack: bool = option(False, "Log the traceback of errors that end the command or fail a request.")
    enable_server_load_tracking: bool = option(
        False, "Count the requests in progress for GET /load.", no_effect="GET /load always has the count"
    )
    enable_tokenizer_info_endpoint: bool = option(False, "Serve GET /tokenizer_info.")
    chat_template_content_format: Literal["auto", "string", "openai"] = option(
        "auto",
        "Format of message content passed to the chat template: string, or openai (a list of parts); auto: detected "
        "from the template.",
    )
    default_chat_template_kwargs: Mapping[str, Any] = option(
        {},
        "Default chat template variables as JSON; chat_template_kwargs of a request override them.",
        parse=json_object,
    )
    middleware: tuple[str, ...] = option(
        (), "ASGI middleware to add, by qualified name: a class or an async function. Repeatable."
    )
    ssl_ciphers: str | None = option(
        None, "Cipher list for TLS 1.2 and older, in OpenSSL's format; default: OpenSSL's."
    )
    enable_ssl_refresh: bool = option(False, "Reload the TLS key and certificate when their files change.")
    api_server_count: int = option(
        1,
        "Number of API server processes. They share one engine; each accepts connections of its own, tokenises their "
        "prompts and sends their responses.",
        aliases=("-asc",),
    )
    headless: bool = option(
        False,
        "Run without an HTTP server, as node 1 or higher of a multi-node deployment; the node executes the steps of "
        "node 0.",
    )
    lora_modules: tuple[str, ...] = option(
        (),
        'LoRA adapters to serve, as name=path or JSON: {"name": "a", "path": "/a", "base_model_name": "m"}.',
    )
    enable_auto_tool_choice: bool = option(
        False,
        "Accept tool_choice auto, so that the model decides when to call tools, with the format that "
        "--tool-call-parser names. A format found from the chat template accepts it without this flag.",
    )
    tool_call_parser: str | None = option(
        None,
        "Tool call parser: the format of the model's tool calls. auto, the default: found from the chat template. "
        "none: calls stay in the text.",
    )
    tool_parser_plugin: str = option("", "File or module that defines tool call parsers in a dictionary TOOL_FORMATS.")
    tool_server: str | None = option(
        None,
        "Comma-separated servers of the Model Context Protocol whose tools Responses may call (tools of type mcp): "
        "host:port, a URL, or LABEL=URL. Requests may name no other server.",
    )
    tool_server_timeout: float = option(
        60.0, "Seconds within which a tool server lists its tools, or answers a call. See --tool-server."
    )
    max_tool_rounds: int = option(
        16, "Maximum number of times that a response calls tools of --tool-server and continues with their results."
    )
    max_tool_result_bytes: int = option(
        1 << 20, "Maximum size of an answer of a tool server, in bytes. See --tool-server."
    )
    exclude_tools_when_tool_choice_none: bool = option(
        False, "Leave tool definitions out of the prompt when tool_choice is none."
    )
    h11_max_incomplete_event_size: int = option(65536, "Maximum size of a request's head (line and headers), in bytes.")
    h11_max_header_count: int = option(256, "Maximum number of headers of a request.")
    timeout_headers: float = option(
        10.0,
        "Seconds within which the request line and headers must arrive, counted from the opening of the connection or"
        " the first byte of the request.",
    )
    timeout_body: float = option(
        30.0,
        "Maximum number of seconds without data while a request body arrives. A body that takes longer than this in "
        "all must arrive at 1 KiB/s or more on average.",
    )
    timeout_keep_alive: float = option(5.0, "Seconds after which an idle keep-alive connection is closed.")
    max_connections: int = option(
        8192,
        "Maximum number of open connections per API server process. Beyond it, a new connection closes the one that "
        "has been idle longest; if none is idle, it gets HTTP 503.",
    )
    sse_keep_alive_interval: float = option(
        0.0,
        "Seconds without output after which a stream sends a keep-alive comment, so that proxies do not time out; 0: "
        "never.",
    )
    request_timeout: float = option(
        0.0,
        "Maximum number of seconds from the acceptance of a request to its last token. The request is then aborted "
        "with HTTP 504, or with an error event in a stream. 0: unlimited.",
    )
    shutdown_timeout: float = option(
        0.0,
        "Seconds that requests in progress may take to finish after SIGTERM. Those that do not finish get an error, "
        "and the exit status is then 1.",
    )
    drain_on_maintenance: bool = option(
        True,
        "On a Cloud TPU host: shut down as after SIGTERM when Google Cloud announces maintenance or preempts the host.",
    )
    keep_alive_on_engine_death: bool = option(
        False,
        "Keep the server running after the engine dies. Requests then get HTTP 500, /health HTTP 503 with the cause.",
    )
    server_dev_mode: bool = option(
        False, "Serve development endpoints such as /sleep, /pause and /server_info; not for production."
    )
    max_body_bytes: int = option(32 * 2**20, "Maximum size of a request body, in bytes.")
    strict_requests: bool = option(
        False,
        "Reject requests with fields, hints or tools that have no effect (HTTP 400). Otherwise the response header "
        "x-pagoda-ignored lists them.",
    )
    max_stop_strings: int = option(16, "Maximum number of stop strings of a request.")
    max_stored_responses: int = option(
        1024,
        "Maximum number of responses of /v1/responses that are stored, for retrieval and previous_response_id; the "
        "oldest are dropped first. 0: none.",
    )
    max_stored_response_bytes: int = option(
        64 * 2**20, "Maximum memory for stored responses, in bytes; 0: none are stored."
    )
    files_dir: str | None = option(
        None,
        "Directory for the files of /v1/files and the state of /v1/batches; default: a temporary directory, which is "
        "removed when the server stops.",
    )
    max_stored_files: int = option(1000, "Maximum number of files of /v1/files, outputs of batches included; 0: none.")
    max_stored_file_bytes: int = option(4 * 2**30, "Maximum size of all files of /v1/files together, in bytes.")

    def __post_init__(self) -> None:
        check_port(self.port)
        if self.enable_auto_tool_choice and self.tool_call_parser == "none":
            raise ConfigError("--enable-auto-tool-choice", "needs a --tool-call-parser; drop it, or none")
        if self.tool_parser_plugin and self.tool_call_parser in (None, "auto", "none"):
            raise ConfigError("--tool-parser-plugin", "needs --tool-call-parser; name one of the plugin's formats")
        if any(not key for key in self.api_key):
            raise ConfigError("--api-key", "keys must not be empty")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            missing = "--ssl-keyfile" if self.ssl_keyfile is None else "--ssl-certfile"
            raise ConfigError(missing, "TLS needs both --ssl-keyfile and --ssl-certfile")
        for name in ("enable_ssl_refresh", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"):
            if getattr(self, name) and self.ssl_certfile is None:
                raise ConfigError(flag_of(name), "needs TLS; give --ssl-keyfile and --ssl-certfile")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError("--ssl-cert-reqs", f"{self.ssl_cert_reqs} is not 0, 1 or 2")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError("--ssl-cert-reqs", "no client's certificate would be valid; give --ssl-ca-certs, too")
        for flag, seconds in (
            ("--shutdown-timeout", self.shutdown_timeout),
            ("--request-timeout", self.request_timeout),
            ("--sse-keep-alive-interval", self.sse_keep_alive_interval),
        ):
            if not 0.0 <= seconds < float("inf"):
                raise ConfigError(flag, f"{seconds} is not a number of seconds")
        for flag, seconds in (
            ("--timeout-headers", self.timeout_headers),
            ("--timeout-body", self.timeout_body),
            ("--timeout-keep-alive", self.timeout_keep_alive),
            ("--tool-server-timeout", self.tool_server_timeout),
        ):
            if not 0.0 < seconds < float("inf"):
                raise ConfigError(flag, f"{seconds} is not a number of seconds above 0")
        need_positive(
            self,
            *("max_body_bytes", "max_connections", "max_stop_strings", "max_tool_rounds", "max_tool_result_bytes"),
            *("h11_max_incomplete_event_size", "h11_max_header_count", "api_server_count"),
        )
        self._check_processes()
        stores = ("max_stored_responses", "max_stored_response_bytes", "max_stored_files", "max_stored_file_bytes")
        need_not_negative(self, *stores, remedy="use 0 to store none")
        need_not_negative(self, "max_log_len", remedy="use 0 or more, or drop it for unlimited")
        if self.root_path and not _PREFIX.fullmatch(self.root_path):
            raise ConfigError("--root-path", f"{self.root_path} is not a URL path; use one such as /models/small")

    def _check_processes(self) -> None:
        """Raise ConfigError for settings that need a single API server process."""
        flag = "--api-server-count"
        if self.api_server_count == 1:
            return
        if self.api_server_count > MAX_API_SERVERS:
            raise ConfigError(flag, f"{self.api_server_count} is more than {MAX_API_SERVERS}; use fewer processes")
        if self.headless:
            raise ConfigError(flag, "with --headless there is no API server; drop one of them")
        if self.disable_frontend_multiprocessing:
            raise ConfigError(
                flag, "several API server processes need an engine process; drop --disable-frontend-multiprocessing"
            )
        if self.server_dev_mode:
            raise ConfigError(flag, "development routes change the state of one process only; use 1 with them")

    @property
    def prefix(self) -> str:
        """The path prefix without a trailing slash; empty if unset."""
        return self.root_path.rstrip("/")

    @property
    def address(self) -> str:
        """The address to listen on without --uds."""
        return self.host if self.host is not None else "127.0.0.1"
