"""A receiver of OTLP traces over HTTP (protobuf) and gRPC, which keeps the spans that exporters send."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from support.watching import eventually


@dataclass(frozen=True)
class Span:
    """One exported span. Times are Unix seconds."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    begin: float
    end: float
    attributes: dict[str, Any]
    resource: dict[str, Any]
    failed: bool


@dataclass
class Collector:
    """What was received at `endpoint`."""

    endpoint: str = ""
    spans: list[Span] = field(default_factory=list)

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Keep the spans of an export."""
        for group in request.resource_spans:
            resource = _attributes(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [_span(each, resource) for each in scope.spans]

    def wait(self, count: int) -> list[Span]:
        """Return the spans once there are `count`."""
        eventually(lambda: len(self.spans) >= count)
        return list(self.spans)


def _span(span: Any, resource: dict[str, Any]) -> Span:
    return Span(
        name=span.name,
        kind=span.kind,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        begin=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        attributes=_attributes(span.attributes),
        resource=resource,
        failed=span.status.code == 2,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    values = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        values[pair.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return values


@contextmanager
def http_collector() -> Iterator[Collector]:
    """Receive http/protobuf."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    collector.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    """Receive gRPC."""
    collector = Collector()

    class Service(TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
            collector.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    collector.endpoint = f"http://127.0.0.1:{port}"
    try:
        yield collector
    finally:
        server.stop(None)
