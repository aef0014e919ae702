"""A collector: receives spans by OTLP over HTTP, as protobuf, on a real socket."""

import asyncio
import gzip
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


@dataclass(frozen=True)
class Seen:
    """A received span. Ids are in hex; `parent` is empty for the first of a trace."""

    name: str
    trace_id: str
    span_id: str
    parent: str
    state: str
    kind: str
    failed: bool
    message: str
    links: Sequence[tuple[str, str]]
    attributes: dict[str, Any]
    resource: dict[str, Any] = field(repr=False)


class Collector:
    """Records what is posted to `/v1/traces`; `url` is its address, `statuses` its first answers instead of 200."""

    def __init__(self, *statuses: int) -> None:
        self.spans: list[Seen] = []
        self.faults: list[str] = []
        self._statuses = list(statuses)

    def __enter__(self) -> "Collector":
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                self.send_response(collector.take(self.path, dict(self.headers), body))
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        """Record the spans of an export; return the status of the answer."""
        named = {name.lower(): value for name, value in headers.items()}
        if path != "/v1/traces" or named["content-type"] != "application/x-protobuf":
            self.faults.append(f"{path} {named}")
            return 404
        if self._statuses:
            return self._statuses.pop(0)
        content = gzip.decompress(body) if named.get("content-encoding") == "gzip" else body
        for group in ExportTraceServiceRequest.FromString(content).resource_spans:
            resource = _values(group.resource.attributes)
            self.spans += [_seen(span, resource) for scope in group.scope_spans for span in scope.spans]
        return 200

    def named(self, name: str) -> list[Seen]:
        """Return the spans of a name received so far, in the order of their export."""
        return [span for span in self.spans if span.name == name]

    async def until(self, **counts: int) -> None:
        """Wait until this many spans of each name were received; `_` in names stands for a space and `__` for ` /`."""
        expected = {name.replace("__", " /").replace("_", " "): count for name, count in counts.items()}
        async with asyncio.timeout(60):
            while any(len(self.named(name)) < count for name, count in expected.items()):
                await asyncio.sleep(0.02)
        assert {name: len(self.named(name)) for name in expected} == expected
        assert self.faults == []


def _seen(span: Span, resource: dict[str, Any]) -> Seen:
    return Seen(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.trace_state,
        Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        span.status.code == Status.STATUS_CODE_ERROR,
        span.status.message,
        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        _values(span.attributes),
        resource,
    )


def _values(attributes: Sequence[KeyValue]) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)
