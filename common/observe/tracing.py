"""OpenTelemetry traces of requests, exported over OTLP to --otlp-traces-endpoint.

Span names and attributes are vLLM's: one span `llm_request` per request, from its arrival to its last token, a child of
the span in the request's `traceparent` header. --collect-detailed-traces adds child spans for the phases of a request.
Requires the extra `otlp`; imported only with an endpoint.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pagoda.common.config.groups.observability import ObservabilityConfig
from pagoda.common.errors import ConfigError

logger = logging.getLogger(__name__)

REQUEST_SPAN: Final = "llm_request"
PHASES: Final[Mapping[str, tuple[str, ...]]] = {"worker": ("prepare", "queue"), "model": ("prefill", "decode")}
"""Modules of --collect-detailed-traces -> the phases that become spans of their own."""

PROTOCOL_VARIABLE: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
PROTOCOLS: Final = ("grpc", "http/protobuf")

CLOSE_SECONDS: Final = 5.0
"""How long the export of the last spans may take: a collector that hangs does not keep a server from ending."""


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """What a span tells about an ended request. Times are monotonic seconds, 0 for events that did not occur."""

    request_id: str
    parent: Context | None  # The context that `Tracer.parent` returned.
    arrival_time: float  # Unix seconds.
    arrival: float
    queued: float  # The time at which the prompt is tokenised and sent to the engine.
    scheduled: float
    first_token: float
    last_token: float
    prompt_tokens: int
    completion_tokens: int
    finish_reasons: tuple[str, ...]  # One reason per sequence; "error": the engine failed.
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None

    def phases(self) -> dict[str, tuple[float, float]]:
        """Return (begin, end) of the phases that the request went through."""
        times = {
            "prepare": (self.arrival, self.queued),
            "queue": (self.queued, self.scheduled),
            "prefill": (self.scheduled, self.first_token),
            "decode": (self.first_token, self.last_token),
        }
        return {name: (begin, end) for name, (begin, end) in times.items() if begin and end}


class Tracer:
    """Exports spans in a thread of its own. `exporter` replaces the one for the endpoint.

    Raises ConfigError for an unknown OTEL_EXPORTER_OTLP_TRACES_PROTOCOL.
    """

    def __init__(self, config: ObservabilityConfig, model: str, exporter: SpanExporter | None = None) -> None:
        assert config.otlp_traces_endpoint is not None
        has_service_name = "OTEL_SERVICE_NAME" in os.environ
        resource = Resource.create(None if has_service_name else {SERVICE_NAME: "pagoda"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or _exporter(config.otlp_traces_endpoint)))
        self._tracer = self._provider.get_tracer("pagoda")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model
        atexit.register(self.close)  # Scripts need not end their engine.
        self._phases = frozenset(phase for module in config.traced_modules for phase in PHASES[module])

    def parent(self, headers: Mapping[str, str] | None = None) -> Context:
        """Return the context that the headers `traceparent` and `tracestate` name; without headers the current one."""
        return context.get_current() if headers is None else self._propagator.extract(headers)

    @contextmanager
    def within(self, headers: Mapping[str, str]) -> Iterator[None]:
        """Make the context of the headers the current one."""
        token = context.attach(self.parent(headers))
        try:
            yield
        finally:
            context.detach(token)

    def record(self, request: RequestTrace) -> None:
        """Queue the spans of an ended request for export."""
        offset = request.arrival_time - request.arrival  # Difference between Unix and monotonic seconds.
        end = max(request.last_token, request.first_token, request.scheduled, request.queued, request.arrival)
        span = self._tracer.start_span(
            REQUEST_SPAN,
            context=request.parent,
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(request.arrival + offset),
            attributes=self._attributes(request, end),
        )
        if "error" in request.finish_reasons:
            span.set_status(Status(StatusCode.ERROR, "the engine failed"))
        inside = trace.set_span_in_context(span, request.parent)
        for name, (begin, until) in request.phases().items():
            if name in self._phases:
                child = self._tracer.start_span(
                    f"{REQUEST_SPAN}.{name}", context=inside, start_time=_nanoseconds(begin + offset)
                )
                child.end(_nanoseconds(until + offset))
        span.end(_nanoseconds(end + offset))

    def _attributes(self, request: RequestTrace, end: float) -> dict[str, str | int | float | list[str]]:
        scheduled = request.scheduled
        first = request.first_token
        last = request.last_token
        values: dict[str, str | int | float | list[str] | None] = {
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.n": request.n,
            "gen_ai.request.temperature": request.temperature,
            "gen_ai.request.top_p": request.top_p,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.usage.num_sequences": request.n,
            "gen_ai.usage.prompt_tokens": request.prompt_tokens,
            "gen_ai.usage.completion_tokens": request.completion_tokens,
            "gen_ai.response.finish_reasons": list(request.finish_reasons),
            "gen_ai.latency.e2e": end - request.arrival,
            "gen_ai.latency.time_in_queue": scheduled - request.queued if scheduled else None,
            "gen_ai.latency.time_to_first_token": first - request.arrival if first else None,
            "gen_ai.latency.time_in_model_prefill": first - scheduled if first and scheduled else None,
            "gen_ai.latency.time_in_model_decode": last - first if first else None,
            "gen_ai.latency.time_in_model_inference": last - scheduled if first and scheduled else None,
        }
        return {name: value for name, value in values.items() if value is not None}

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Export what is queued, for at most `timeout` seconds, and end the thread. Idempotent."""
        atexit.unregister(self.close)
        ending = threading.Thread(target=self._provider.shutdown, name="pagoda-traces", daemon=True)
        try:
            ending.start()
        except RuntimeError:  # Python 3.12 and later start no thread once a program ends.
            self._provider.shutdown()
            return
        ending.join(timeout)
        if ending.is_alive():
            logger.warning("the last spans were not exported within %g s; they are lost", timeout)


def _exporter(endpoint: str) -> SpanExporter:
    """Return the exporter for the protocol of OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, by default gRPC, as vLLM's."""
    protocol = os.environ.get(PROTOCOL_VARIABLE, PROTOCOLS[0])
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=endpoint)
    raise ConfigError(PROTOCOL_VARIABLE, f"unknown protocol {protocol!r}; use {' or '.join(PROTOCOLS)}")


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
