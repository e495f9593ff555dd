"""Traces of requests as a collector receives them: spans, attributes, parents, phases."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from support.servers.live_server import live_server
from support.suite.watching import PATIENCE, eventually, logged

from pagoda.common.errors import ConfigError
from pagoda.server.settings.flags import EngineArgs

# --- a receiver of OTLP traces over HTTP (protobuf) and gRPC, which keeps the spans that exporters send ---


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


# --- tests ---


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
BODY = {"prompt": "abcd", "max_tokens": 5, "ignore_eos": True, "temperature": 0.5, "top_p": 0.75}
UNREACHABLE = {"otlp_traces_endpoint": "http://127.0.0.1:9"}
PHASES = ("prepare", "queue", "prefill", "decode")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with http_collector() as collector:
        yield collector


def served_spans(collector: Collector, count: int, *bodies: dict[str, Any], **engine: Any) -> list[Span]:
    """Send the bodies, with HEADERS, to a server that exports, and return `count` spans."""
    headers = engine.pop("headers", HEADERS)
    with live_server(engine={"otlp_traces_endpoint": collector.endpoint} | engine) as server:
        for body in bodies:
            assert server.post("/v1/completions", body, **headers)[0] == 200
        return collector.wait(count)


@pytest.mark.setting("--otlp-traces-endpoint")
def test_a_request_is_a_span_of_the_callers_trace(collector: Collector) -> None:
    begin = time.time()
    (span,) = served_spans(collector, 1, BODY | {"n": 2})
    assert span.name == "llm_request"
    assert (span.trace_id, span.parent_id) == (TRACE, PARENT)
    assert span.kind == 2  # server
    assert not span.failed
    assert begin - 0.1 <= span.begin <= span.end <= time.time() + 0.1
    assert span.resource["service.name"] == "pagoda"
    values = span.attributes
    assert values["gen_ai.request.id"].startswith("cmpl-")
    assert values["gen_ai.response.model"] == "fake"
    assert (values["gen_ai.request.n"], values["gen_ai.usage.num_sequences"]) == (2, 2)
    assert (values["gen_ai.request.temperature"], values["gen_ai.request.top_p"]) == (0.5, 0.75)
    assert values["gen_ai.request.max_tokens"] == 5
    assert (values["gen_ai.usage.prompt_tokens"], values["gen_ai.usage.completion_tokens"]) == (4, 10)
    assert values["gen_ai.response.finish_reasons"] == ["length", "length"]
    latency = {name.removeprefix("gen_ai.latency."): value for name, value in values.items() if ".latency." in name}
    assert latency["e2e"] == pytest.approx(span.end - span.begin, abs=1e-4)
    assert latency["time_in_model_inference"] == pytest.approx(
        latency["time_in_model_prefill"] + latency["time_in_model_decode"], abs=1e-6
    )
    assert 0 <= latency["time_in_queue"] <= latency["time_to_first_token"] <= latency["e2e"]


def test_requests_without_a_header_have_traces_of_their_own(collector: Collector) -> None:
    spans = served_spans(collector, 2, BODY, BODY, headers={})
    assert [span.parent_id for span in spans] == ["", ""]
    assert len({span.trace_id for span in spans}) == 2


@pytest.mark.setting("--collect-detailed-traces")
@pytest.mark.parametrize(
    ("modules", "phases"), [("all", PHASES), ("worker", PHASES[:2]), ("model", PHASES[2:]), ("model,worker", PHASES)]
)
def test_detailed_traces_have_the_phases(collector: Collector, modules: str, phases: tuple[str, ...]) -> None:
    spans = served_spans(collector, len(phases) + 1, BODY, collect_detailed_traces=tuple(modules.split(",")))
    (request,) = (span for span in spans if span.name == "llm_request")
    inside = {span.name.removeprefix("llm_request."): span for span in spans if span is not request}
    assert set(inside) == set(phases)
    assert {span.parent_id for span in inside.values()} == {request.span_id}
    assert {span.trace_id for span in spans} == {TRACE}
    ordered = [inside[name] for name in phases]
    assert all(before.end == pytest.approx(after.begin, abs=1e-4) for before, after in pairwise(ordered))
    assert all(request.begin - 1e-4 <= span.begin <= span.end <= request.end + 1e-4 for span in ordered)


def test_modules_need_an_endpoint_and_are_known() -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        EngineArgs("m", collect_detailed_traces=("all",)).create_engine_config()
    with pytest.raises(ConfigError, match=r"unknown module 'gpu'.*worker"):
        EngineArgs("m", otlp_traces_endpoint="x", collect_detailed_traces=("gpu",)).create_engine_config()


def test_grpc_is_the_default_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with grpc_collector() as collector:
        (span,) = served_spans(collector, 1, BODY)
    assert span.trace_id == TRACE


def test_a_request_that_the_client_leaves_is_an_abort(collector: Collector) -> None:
    with live_server(engine={"otlp_traces_endpoint": collector.endpoint}) as server:
        server.call(_leave_early(server.llm))
        (span,) = collector.wait(1)
    assert span.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert span.attributes["gen_ai.usage.completion_tokens"] >= 1
    assert span.trace_id == TRACE


async def _leave_early(llm: Any) -> None:
    from pagoda.common.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    outputs = llm.generate({"prompt_token_ids": [5, 6]}, params, "r", trace_headers=HEADERS)
    assert await llm.is_tracing_enabled()
    async for _ in outputs:
        break
    await outputs.aclose()


def test_spans_of_a_script_that_does_not_end_its_engine_are_exported() -> None:
    with grpc_collector() as collector:
        done = subprocess.run([sys.executable, "-c", SCRIPT, collector.endpoint], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert [span.name for span in collector.wait(1)] == ["llm_request"]


SCRIPT = """
import sys
from pagoda.common.observe.tracing import RequestTrace, Tracer
from pagoda.server.settings.flags import EngineArgs

config = EngineArgs("m", otlp_traces_endpoint=sys.argv[1]).create_engine_config().observability
times = {name: 1.0 for name in ("arrival_time", "arrival", "queued", "scheduled", "first_token", "last_token")}
request = RequestTrace("r", None, prompt_tokens=1, completion_tokens=1, finish_reasons=("stop",), **times)
Tracer(config, "m").record(request)
"""


def test_a_collector_that_hangs_keeps_no_server_from_ending(caplog: pytest.LogCaptureFixture) -> None:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from pagoda.common.observe.tracing import Tracer

    answered = threading.Event()

    class Hanging(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            answered.wait(2 * PATIENCE)
            return SpanExportResult.FAILURE

        def shutdown(self) -> None:
            answered.wait(2 * PATIENCE)

    config = EngineArgs("m", otlp_traces_endpoint="x").create_engine_config().observability
    ending = threading.Thread(target=Tracer(config, "m", Hanging()).close, args=(0.0,), daemon=True)
    with logged(caplog, "pagoda.common.observe.tracing"):
        ending.start()
        eventually(lambda: not ending.is_alive())
    assert "were not exported" in caplog.text
    answered.set()


def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with (
        pytest.raises(ConfigError, match=r"http/json.*grpc or http/protobuf"),
        live_server(engine=UNREACHABLE),
    ):
        pass


def test_without_opentelemetry_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pagoda.common.observe.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pagoda\[otlp\]"), live_server(engine=UNREACHABLE):
        pass
