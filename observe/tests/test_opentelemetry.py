"""The middleware `opentelemetry`: spans of operations, and the links from claims to puts."""

import asyncio
import threading

import pytest
import torch
from one_store import joined
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from dataplane_core import connect, connect_async
from dataplane_core.errors import ClaimTimeoutError, MissingDataError
from dataplane_core.spec import ListRequest
from dataplane_testkit import backend_of

EXPORTER = InMemorySpanExporter()


@pytest.fixture(scope="module", autouse=True)
def provider():
    """OpenTelemetry takes one provider per process."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(EXPORTER))
    trace.set_tracer_provider(provider)


@pytest.fixture(autouse=True)
def _without_spans_of_others():
    EXPORTER.clear()


@pytest.fixture
def client():
    with connect({"backend": "noop", "middleware": ["opentelemetry"]}) as client:
        client.register_partition("p", ["x", "y"], None, ["t"])
        yield client


def spans(name):
    return [span for span in EXPORTER.get_finished_spans() if span.name == f"dataplane.{name}"]


def linked(span):
    return [link.context.span_id for link in span.links]


def test_an_operation_is_a_span_of_the_callers_trace_with_its_error(client):
    with trace.get_tracer("trainer").start_as_current_span("step") as step:
        client.put_samples(["a", "b"], "p", {"x": torch.zeros(2, 4)})
        client.get_samples(["a"], "p", ["x"])
    (put,), (get,) = spans("put_samples"), spans("get_samples")
    assert put.kind is SpanKind.PRODUCER
    assert put.parent.span_id == get.parent.span_id == step.get_span_context().span_id
    common = {"dataplane.backend": "noop", "dataplane.partition": "p"}
    assert dict(put.attributes) == {**common, "dataplane.samples": 2, "dataplane.bytes": 32}
    assert dict(get.attributes) == {**common, "dataplane.samples": 1, "dataplane.bytes": 16}
    with pytest.raises(MissingDataError):
        client.get_samples(["absent"], "p", ["x"])
    failed = spans("get_samples")[1]
    assert failed.status.status_code is StatusCode.ERROR
    assert "MissingDataError" in failed.events[0].attributes["exception.type"]


def test_the_span_of_a_claim_links_to_those_of_its_puts(client):
    client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)}, tags=[{"n": 1}, {"n": 2}])
    client.put_samples(["a", "b"], "p", {"y": torch.zeros(2)})
    client.put_samples(["c"], "p", {"x": torch.zeros(1), "y": torch.zeros(1)})
    client.put_samples(["d"], "p", {"x": torch.zeros(1), "y": torch.zeros(1)})
    meta = client.claim_meta("p", "t", ["x", "y"], 3)
    (claim,) = spans("claim")
    first, second, third, _ = (span.context.span_id for span in spans("put_samples"))
    assert linked(claim) == [first, second, third]
    assert claim.kind is SpanKind.CONSUMER
    assert (claim.attributes["dataplane.task"], claim.attributes["dataplane.samples"]) == ("t", 3)
    assert meta.tags == [{"n": 1}, {"n": 2}, {}]
    assert client.list_samples("p").tags == [{"n": 1}, {"n": 2}, {}, {}]


def test_the_number_of_links_is_bounded():
    with connect({"backend": "noop", "middleware": [{"opentelemetry": {"max_links": 2}}]}) as client:
        client.register_partition("p", ["x"], None, ["t"])
        for name in "abc":
            client.put_samples([name], "p", {"x": torch.zeros(1)})
        client.claim_meta("p", "t", ["x"], 3)
    assert linked(spans("claim")[0]) == [span.context.span_id for span in spans("put_samples")[:2]]


def test_a_claim_that_waits_has_one_span_from_its_first_question(client):
    claimed = []
    waiting = threading.Thread(target=lambda: claimed.append(client.claim_meta("p", "t", ["x"], 2, timeout_s=60.0)))
    waiting.start()
    client.put_samples(["a"], "p", {"x": torch.zeros(1)})
    client.put_samples(["b"], "p", {"x": torch.zeros(1)})
    waiting.join()
    (claim,) = spans("claim")
    assert linked(claim) == [span.context.span_id for span in spans("put_samples")]
    with pytest.raises(ClaimTimeoutError):
        client.claim_meta("p", "t", ["x"], 2, timeout_s=0.05)
    assert [span.attributes["dataplane.samples"] for span in spans("claim")] == [2, 0]
    (middleware,) = client.middleware
    assert not middleware.context.waiting


def test_the_event_loop_client_keeps_the_trace():
    async def run():
        async with await connect_async({"backend": "noop", "middleware": ["opentelemetry"]}) as client:
            await client.register_partition("p", ["x"], None, ["t"])
            with trace.get_tracer("server").start_as_current_span("request") as request:
                await client.put_samples(["a"], "p", {"x": torch.zeros(1)})
            await client.claim_meta("p", "t", ["x"], 1)
            return request.get_span_context()

    request = asyncio.run(run())
    (put,), (claim,) = spans("put_samples"), spans("claim")
    assert put.parent.span_id == request.span_id
    assert claim.links[0].context.trace_id == request.trace_id


def test_clients_with_and_without_it_share_a_store(client):
    with joined(client, connect({"backend": "noop"})) as plain:
        client.put_samples(["a"], "p", {"x": torch.zeros(1)}, tags=[{"n": 1}])
        plain.put_samples(["b"], "p", {"x": torch.zeros(1)}, tags=[{"~trace.x": "not a context"}])
        (mark,) = [name for name in plain.list_samples("p").tags[0] if name != "n"]
        assert mark == "~trace.x"
        assert client.claim_meta("p", "t", ["x"], 2).tags == [{"n": 1}, {}]
        assert linked(spans("claim")[0]) == [spans("put_samples")[0].context.span_id]


def test_without_a_recorded_trace_no_tag_is_written(client, monkeypatch):
    (middleware,) = client.middleware
    monkeypatch.setattr(middleware, "_tracer", trace.NoOpTracer())
    client.put_samples(["a"], "p", {"x": torch.zeros(1)})
    request = ListRequest(partition_id="p", tag_filter=None, deadline=float("inf"))
    assert backend_of(client).list_samples(request).tags == [{}]
    assert client.claim_meta("p", "t", ["x"], 1).sample_ids == ["a"]
