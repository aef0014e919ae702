"""The spans of one process, exported by OTLP. This module is imported only if HALFNOTE_OTLP_ENDPOINT is set.

A trace is sampled once, when it enters: by the caller's sampled flag, else at random. The SDK makes spans only for
sampled traces, so other requests cost nothing more. The SDK queues spans, and its own thread sends them. A slow or
absent collector loses spans, because the queue is bounded; it never delays a request.
"""

import asyncio
import os
import random
import threading
from collections.abc import Awaitable, Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from importlib.metadata import version
from typing import Any, TypeVar
from uuid import UUID

import requests
from msgspec.structs import replace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Span, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace import set_span_in_context as in_context
from opentelemetry.trace.span import TraceState

from app.delivery import Delivered, Delivery, Failed, Outcome
from app.observability.trace_context import is_sampled

# Seconds that the last export gets when the process ends.
CLOSE_WITHIN_S = 1.0
TRACES_PATH = "/v1/traces"
# These variables name a plugin that makes the exporter's session. The plugin then decides about proxies.
OWN_SESSION = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
)

Found = TypeVar("Found")
Flush = Callable[[Any, Sequence[Any]], Awaitable[Sequence[Found]]]


class PassedState(TraceState):
    """A `tracestate` as it came. OpenTelemetry's own refuses keys that begin with a digit, and then has no member."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self._members = dict(member.split("=", 1) for member in text.split(","))

    def __contains__(self, key: object) -> bool:
        return key in self._members

    def __getitem__(self, key: str) -> str:
        return self._members[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def keys(self) -> KeysView[str]:
        return self._members.keys()

    def values(self) -> ValuesView[str]:
        return self._members.values()

    def items(self) -> ItemsView[str, str]:
        return self._members.items()

    def to_header(self) -> str:
        """Return the text, unchanged."""
        return self._text


class Traced:
    """An open span. `context` is the trace context of its children, see app.observability.trace_context."""

    __slots__ = ("context", "span")

    def __init__(self, span: Span) -> None:
        self.span, self.context = span, _text(span.get_span_context())

    def end(self, attributes: Mapping[str, Any] | None = None, error: str | None = None) -> None:
        """End the span with these attributes. `error` marks it as failed and says why."""
        if attributes:
            self.span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if error is not None:
            self.span.set_status(Status(StatusCode.ERROR, error))
        self.span.end()


class TracedRequest(Traced):
    """The span of a request; `open_requests` holds it until the answer."""

    __slots__ = ("_open",)

    def __init__(self, span: Span, open_requests: "dict[str, TracedRequest]") -> None:
        super().__init__(span)
        self._open = open_requests
        open_requests[self.context] = self

    def answered(self, status: int | None, route: str) -> None:
        """End the span with the answer's status. None: there is no answer, because the client disconnected."""
        self._open.pop(self.context, None)
        error = f"answered {status}" if status is not None and status >= 500 else None
        gone = "the client disconnected" if status is None else None
        self.end({"http.response.status_code": status, "http.route": route}, error or gone)


class Tracing:
    """Makes the spans of one process. `ratio`: the share of requests without a context of their own that is traced."""

    def __init__(self, endpoint: str, ratio: float) -> None:
        self._ratio = ratio
        self._exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + TRACES_PATH, session=_session())
        named = Resource.create({"service.name": "halfnote", "service.version": version("halfnote-server")})
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override our values.
        resource = named.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("halfnote", version("halfnote-server"))
        # Requests in progress, by context. Flushes and endpoints find their spans here.
        self._requests: dict[str, TracedRequest] = {}

    async def close(self) -> None:
        """Send queued spans for at most CLOSE_WITHIN_S; a collector that hangs does not delay the end."""
        closing = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_WITHIN_S)
        if closing.is_alive():
            # This ends the exporter's pauses between attempts.
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def request(self, method: str, path: str, context: str | None) -> TracedRequest | None:
        """Begin the span of a request. Return None if the trace is not sampled."""
        if not is_sampled(context) if context is not None else random.random() >= self._ratio:  # noqa: S311
            return None
        attributes = {"http.request.method": method, "url.path": path}
        return TracedRequest(self._span(f"{method} {path}", SpanKind.SERVER, context, attributes), self._requests)

    def about(self, context: str | None, transaction_id: UUID, producer_group: str) -> None:
        """Name the transaction in the span of the request with this context, if the trace is sampled."""
        traced = self._requests.get(context) if context is not None else None
        if traced is not None:
            said = {"transaction_id": str(transaction_id), "producer_group": producer_group}
            traced.span.set_attributes(_prefixed(said))

    def link_half(self, context: str | None, half: str | None) -> None:
        """Link the span of an End with this context to the trace of its half, unless both are in one trace.

        `half` is the context that is stored with the half.
        """
        traced = self._requests.get(context) if context is not None else None
        if traced is not None and half is not None and _trace_id(half) != _trace_id(traced.context):
            traced.span.add_link(_remote(half))

    def trace_flushes(self, lane: str, flush: "Flush[Found]") -> "Flush[Found]":
        """Return a lane's flush that records a span if a request of its batch is sampled.

        A batch belongs to no single trace, so its span begins a new one. The span and those of the batch's requests
        link to each other.
        """

        async def with_span(connection: Any, requests: Sequence[Any]) -> Sequence[Found]:
            contexts = [one.traceparent for one in requests if is_sampled(one.traceparent)]
            if not contexts:
                return await flush(connection, requests)
            traced = self._flush(lane, len(requests), contexts)
            try:
                outcomes = await flush(connection, requests)
            except BaseException as error:
                traced.end({"error.type": type(error).__name__}, type(error).__name__)
                raise
            traced.end()
            return outcomes

        return with_span

    def check(self, context: str | None, attributes: Mapping[str, Any]) -> Traced | None:
        """Begin the span of a check: of all its attempts over the group's URLs."""
        if not is_sampled(context):
            return None
        return Traced(self._span("check", SpanKind.CLIENT, context, _prefixed(attributes)))

    def attempts(self, deliveries: Sequence[Delivery]) -> "Attempts":
        """Begin the spans of messages that are sent in one call, each in its own trace."""
        return Attempts(self._attempt(delivery) for delivery in deliveries)

    def _attempt(self, delivery: Delivery) -> tuple[Delivery, Traced | None]:
        if not is_sampled(delivery.trace):
            return delivery, None
        attributes = {
            "messaging.operation.type": "send",
            "messaging.destination.name": delivery.topic,
            "messaging.message.id": delivery.message_id,
            "halfnote.transaction_id": str(delivery.transaction_id),
            "halfnote.subscription": delivery.subscription,
            "halfnote.offset": delivery.offset,
            "halfnote.attempt": delivery.attempt,
            **({"halfnote.replay": delivery.replay} if delivery.replay is not None else {}),
        }
        traced = Traced(self._span(f"deliver {delivery.topic}", SpanKind.PRODUCER, delivery.trace, attributes))
        return replace(delivery, trace=traced.context), traced

    def _flush(self, lane: str, requests: int, contexts: Sequence[str]) -> Traced:
        links = [Link(_remote(context)) for context in contexts]
        attributes = {"halfnote.lane": lane, "halfnote.requests": requests}
        traced = Traced(self._span(f"flush {lane}", SpanKind.INTERNAL, None, attributes, links))
        here = traced.span.get_span_context()
        for context in contexts:
            if (request := self._requests.get(context)) is not None:
                request.span.add_link(here)
        return traced

    def _span(
        self, name: str, kind: SpanKind, parent: str | None, attributes: Mapping[str, Any], links: Sequence[Link] = ()
    ) -> Span:
        # Without a parent, an empty context: the current context is not the parent.
        over = in_context(NonRecordingSpan(_remote(parent)), Context()) if parent is not None else Context()
        span = self._tracer.start_span(name, over, kind, dict(attributes), links)
        assert isinstance(span, Span)
        return span


class Attempts:
    """The messages of one call and their spans; `deliveries` carry the spans' contexts."""

    def __init__(self, begun: Iterable[tuple[Delivery, Traced | None]]) -> None:
        both = list(begun)
        self.deliveries = [delivery for delivery, _ in both]
        self._spans = [traced for _, traced in both]

    def end(self, outcomes: Sequence[Outcome] | None) -> None:
        """End the spans with the messages' outcomes. None: the call was cut short."""
        for index, traced in enumerate(self._spans):
            if traced is None:
                continue
            if outcomes is None:
                traced.end({"halfnote.outcome": "cut short"}, "cut short")
                continue
            outcome = outcomes[index]
            failed = None if isinstance(outcome, Delivered) else outcome.error
            kind = "unreachable" if isinstance(outcome, Failed) and outcome.unreachable else type(outcome).__name__
            traced.end({"halfnote.outcome": kind.lower(), "http.response.status_code": outcome.status}, failed)


def _prefixed(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"halfnote.{name}": value for name, value in attributes.items()}


def _trace_id(context: str) -> str:
    return context[3:35]


def _remote(context: str) -> SpanContext:
    parent, _, state = context.partition(" ")
    return SpanContext(
        int(parent[3:35], 16),
        int(parent[36:52], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(parent[53:55], 16)),
        trace_state=PassedState(state) if state else None,
    )


def _text(context: SpanContext) -> str:
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    return f"{parent} {context.trace_state.to_header()}" if context.trace_state else parent


def _session() -> requests.Session | None:
    """Return a session that ignores HTTP_PROXY and .netrc; None if a plugin makes the session."""
    if any(os.environ.get(name) for name in OWN_SESSION):
        return None
    session = requests.Session()
    session.trust_env = False
    return session
