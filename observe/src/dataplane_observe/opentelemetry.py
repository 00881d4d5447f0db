"""The middleware `opentelemetry`: a span per operation, and links from the span of a claim to those of its puts.

It needs the package ``opentelemetry-api``: ``dataplane-observe[opentelemetry]`` installs it. Where the spans go is up
to the program, which sets up OpenTelemetry's SDK; without it nothing is recorded, and the middleware costs little.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field

from dataplane_core.middleware import EventMiddleware, MiddlewareContext, OperationEvent
from dataplane_core.spec import Claim, SampleList, TagValue

try:
    from opentelemetry import trace
    from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, Tracer
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ImportError(
        "the middleware 'opentelemetry' needs opentelemetry-api: pip install 'dataplane-observe[opentelemetry]'"
    ) from error

#: Begins the names of the tags that carry the context of a put. The rest is the first of its fields, so that puts of
#: several stages to a sample each keep theirs.
_TAG: Final = "~trace."
#: Writes and reads ``traceparent``, as W3C has it.
_CONTEXTS: Final = TraceContextTextMapPropagator()


class OpenTelemetryConfig(BaseModel):
    """The options of `OpenTelemetry`."""

    model_config = ConfigDict(extra="forbid")

    max_links: int = Field(default=128, ge=0)
    """The most puts that the span of a claim links to: those of the first samples."""


class OpenTelemetry(EventMiddleware):
    """Records a span for each operation of a client.

    A span is named ``dataplane.`` and the hook, such as ``dataplane.put_samples``. Its parent is the current span of
    the caller. Attributes: ``dataplane.backend``, ``dataplane.partition``, ``dataplane.task``, ``dataplane.samples``
    and, for puts and gets, ``dataplane.bytes``. An operation that raises has the error as an event, and its status.

    A put of a sampled trace writes its context, as W3C ``traceparent``, into a tag of each of its samples. A claim has
    one span, from its first question to its answer, which links to the spans of the puts that wrote its samples. This
    middleware hides these tags again; clients without it see tags whose names begin with ``~trace.``.

    Args:
        options: As `OpenTelemetryConfig`.

    Examples:
        >>> from dataplane_core import connect
        >>> client = connect({"backend": "noop", "middleware": ["opentelemetry"]})
    """

    Config: ClassVar[type[BaseModel]] = OpenTelemetryConfig
    config: Any  # an OpenTelemetryConfig
    _tracer: Tracer = trace.NoOpTracer()

    def start(self, context: MiddlewareContext) -> None:
        """Takes the program's tracer."""
        super().start(context)
        self._tracer = trace.get_tracer("dataplane_core")

    def around(self, operation: str, request: Any) -> Generator[None, Any, Any]:
        """A span around an operation. That of a claim is made when it is answered: one for all of its questions.
        The tags that carry contexts are left out of replies.
        """
        if operation == "claim":
            reply = yield from super().around(operation, request)
        else:
            kind = SpanKind.PRODUCER if operation == "put_samples" else SpanKind.INTERNAL
            attributes = self._attributes(request)
            with self._tracer.start_as_current_span(f"dataplane.{operation}", kind=kind, attributes=attributes) as span:
                context = span.get_span_context()
                if operation == "put_samples" and context.is_valid and context.trace_flags.sampled:
                    headers: dict[str, str] = {}
                    _CONTEXTS.inject(headers)
                    mark = {_TAG + min(request.columns, default=""): headers["traceparent"]}
                    rows: Iterable[Mapping[str, TagValue]] = request.tags or [{}] * len(request.sample_ids)
                    request.tags = [{**row, **mark} for row in rows]
                reply = (yield from super().around(operation, request)) if span.is_recording() else (yield)
        if isinstance(reply, (Claim, SampleList)):
            return replace(reply, tags=_without_marks(reply.tags))
        return reply

    def note(self, event: OperationEvent, request: Any, outcome: Any) -> None:
        """Says in the span what an operation moved."""
        if event.op == "claim":
            self._end_claim(event, request, outcome)
            return
        span = trace.get_current_span()
        if event.op in ("put_samples", "get_samples"):
            span.set_attribute("dataplane.bytes", event.n_bytes)
        elif event.op == "list_samples":
            span.set_attribute("dataplane.samples", event.n_keys)

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _end_claim(self, event: OperationEvent, request: Any, outcome: Any) -> None:
        links = _links(outcome.tags, self.config.max_links) if isinstance(outcome, Claim) else []
        start = time.time_ns() - int(event.wall_ms * 1e6)
        attributes = {**self._attributes(request), "dataplane.samples": event.n_keys}
        span: Span = self._tracer.start_span(
            "dataplane.claim", kind=SpanKind.CONSUMER, attributes=attributes, links=links, start_time=start
        )
        if isinstance(outcome, BaseException):
            span.record_exception(outcome)
        if event.status != "ok":
            span.set_status(Status(StatusCode.ERROR, event.error))
        span.end()

    def _attributes(self, request: Any) -> dict[str, str | int]:
        attributes: dict[str, str | int] = {"dataplane.backend": self.context.backend}
        for name, given in (("partition", "partition_id"), ("task", "task_name")):
            if hasattr(request, given):
                attributes[f"dataplane.{name}"] = getattr(request, given)
        ids = getattr(request, "sample_ids", None)
        if ids is not None:
            attributes["dataplane.samples"] = len(ids)
        return attributes


def _links(tags: Sequence[Mapping[str, TagValue]], most: int) -> list[Link]:
    """A link to each put that wrote the samples, in the order of the samples."""
    found: dict[TagValue, SpanContext] = {}
    for row in tags:
        for name, value in row.items():
            if name.startswith(_TAG) and value not in found and (context := _context_of(value)) is not None:
                found[value] = context
        if len(found) >= most:
            break
    return [Link(context) for context in list(found.values())[:most]]


def _context_of(value: TagValue) -> SpanContext | None:
    """What a ``traceparent`` says. None if it is none, since anybody may write a tag of this name."""
    context = trace.get_current_span(_CONTEXTS.extract({"traceparent": str(value)})).get_span_context()
    return context if context.is_valid else None


def _without_marks(tags: Sequence[Mapping[str, TagValue]]) -> Sequence[Mapping[str, TagValue]]:
    """The tags without contexts, which would be noise to those who read tags, and change from run to run."""
    if not any(name.startswith(_TAG) for row in tags for name in row):
        return tags
    return [{name: value for name, value in row.items() if not name.startswith(_TAG)} for row in tags]
