"""The middleware `opentelemetry`: a span per operation, and links from the span of a claim to those of its puts.

It needs the package ``opentelemetry-api``, which ``dataplane-core[opentelemetry]`` installs. Where the spans go is up
to the program, which sets up OpenTelemetry's SDK; without it nothing is recorded, and the middleware costs little.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field

from dataplane_core.codec import row_nbytes
from dataplane_core.errors import ClaimTimeoutError
from dataplane_core.middleware.base import MiddlewareContext, OperationMiddleware
from dataplane_core.middleware.events import WaitingClaims, got_nothing
from dataplane_core.spec import Claim, SampleList, TagValue, WireBatch, hookimpl

try:
    from opentelemetry import trace
    from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags, Tracer
except ImportError as error:
    raise ImportError(
        "the middleware 'opentelemetry' needs opentelemetry-api: pip install 'dataplane-core[opentelemetry]'"
    ) from error

#: Begins the names of the tags that carry the context of a put. The rest is the first of its fields, so that puts of
#: several stages to a sample each keep theirs.
_TAG: Final = "~trace."


class OpenTelemetryConfig(BaseModel):
    """The options of `OpenTelemetry`."""

    model_config = ConfigDict(extra="forbid")

    max_links: int = Field(default=128, ge=0)
    """The most puts that the span of a claim links to: those of the first samples."""


class OpenTelemetry(OperationMiddleware):
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

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._tracer: Tracer = trace.NoOpTracer()
        self._backend = ""
        self._waiting = WaitingClaims()

    def start(self, context: MiddlewareContext) -> None:
        """Takes the program's tracer."""
        self._backend = context.backend
        self._tracer = trace.get_tracer("dataplane_core")

    def around(self, operation: str, request: Any) -> Generator[None, Any, Any]:
        """A span."""
        with self._begin(operation, request) as span:
            reply = yield
            if span.is_recording():
                if isinstance(reply, WireBatch):
                    span.set_attribute("dataplane.bytes", sum(row_nbytes(reply.columns, len(request.sample_ids))))
                elif isinstance(reply, SampleList):
                    span.set_attribute("dataplane.samples", len(reply.sample_ids))
            return reply

    @hookimpl(wrapper=True)
    def put_samples(self, request: Any) -> Generator[None, Any, Any]:
        """A span, whose context the samples carry."""
        with self._begin("put_samples", request, kind=SpanKind.PRODUCER) as span:
            context = span.get_span_context()
            if span.is_recording():
                span.set_attribute("dataplane.bytes", sum(row_nbytes(request.columns, len(request.sample_ids))))
            if context.is_valid and context.trace_flags.sampled:
                mark = {_TAG + min(request.columns, default=""): _traceparent(context)}
                rows: Iterable[Mapping[str, TagValue]] = request.tags or [{}] * len(request.sample_ids)
                request.tags = [{**row, **mark} for row in rows]
            return (yield)

    @hookimpl(wrapper=True)
    def claim(self, request: Any) -> Generator[None, Claim, Claim]:
        """One span for all questions of a claim that waits."""
        began = self._waiting.began(request)
        claim: Claim | None = None
        error: BaseException | None = None
        try:
            claim = yield
            if got_nothing(request, claim):
                error = ClaimTimeoutError("it waited in vain")
        except BaseException as raised:
            error = raised
            raise
        finally:
            if not self._waiting.goes_on(request, began, claim):
                self._end_claim(request, began, claim, error)
        return replace(claim, tags=_without_marks(claim.tags))

    @hookimpl(wrapper=True)
    def list_samples(self, request: Any) -> Generator[None, SampleList, SampleList]:
        """A span. The tags that carry contexts are left out."""
        listed: SampleList = yield from self.around("list_samples", request)
        return replace(listed, tags=_without_marks(listed.tags))

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _begin(self, op: str, request: Any, **options: Any) -> Any:
        """A context manager for the span of an operation."""
        return self._tracer.start_as_current_span(f"dataplane.{op}", attributes=self._attributes(request), **options)

    def _end_claim(self, request: Any, began: float, claim: Claim | None, error: BaseException | None) -> None:
        span: Span = self._tracer.start_span(
            "dataplane.claim",
            kind=SpanKind.CONSUMER,
            attributes=self._attributes(request),
            links=[] if claim is None else _links(claim.tags, self.config.max_links),
            start_time=time.time_ns() - int((time.perf_counter() - began) * 1e9),
        )
        span.set_attribute("dataplane.samples", 0 if claim is None else len(claim.sample_ids))
        if error is not None:
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        span.end()

    def _attributes(self, request: Any) -> dict[str, str | int]:
        attributes: dict[str, str | int] = {"dataplane.backend": self._backend}
        for name, given in (("partition", "partition_id"), ("task", "task_name")):
            if hasattr(request, given):
                attributes[f"dataplane.{name}"] = getattr(request, given)
        ids = getattr(request, "sample_ids", None)
        if ids is not None:
            attributes["dataplane.samples"] = len(ids)
        return attributes


def _traceparent(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


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
    try:
        _, trace_id, span_id, flags = str(value).split("-")
        return SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)))
    except ValueError:
        return None


def _without_marks(tags: Sequence[Mapping[str, TagValue]]) -> Sequence[Mapping[str, TagValue]]:
    """The tags without contexts, which would be noise to those who read tags, and change from run to run."""
    if not any(name.startswith(_TAG) for row in tags for name in row):
        return tags
    return [{name: value for name, value in row.items() if not name.startswith(_TAG)} for row in tags]
