"""Errors: their base classes, their attributes and messages, and that they can be pickled."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataplane_core.errors import BackendError, ClientClosedError, DataPlaneError, LeaseExpiredError
from dataplane_core.meta import KVBatchMeta
from dataplane_core.spec import Capability
from dataplane_core.testing._base import Suite
from dataplane_core.testing._columns import batch
from dataplane_core.testing._store import BOUNDED_BYTES, Store, check_error

__all__ = ["ErrorSuite"]


def _nacked(store: Store, partition: str) -> KVBatchMeta:
    meta = store.claim(partition, 1, lease_s=600)
    store.client.nack(meta)
    return meta


def _overfill(store: Store) -> None:
    client = store.deployment.bounded("raise")
    large = torch.zeros(1, 2 * BOUNDED_BYTES, dtype=torch.uint8)
    client.put_samples(["b"], store.register("x", client=client), batch(1, x=large))


#: A user's mistake -> the call, the builtin exception that the user would catch, the capability that the call needs.
_CASES: dict[str, tuple[Callable[[Store, str], Any], type[Exception], Capability | None]] = {
    "put_unknown_partition": (lambda s, p: s.put(p + "?", ["b"], x=torch.zeros(1)), KeyError, None),
    "put_other_dtype": (lambda s, p: s.put(p, ["b"], x=torch.zeros(1, dtype=torch.int8)), ValueError, None),
    "put_repeated_ids": (lambda s, p: s.put(p, ["b", "b"], x=torch.zeros(2)), ValueError, None),
    "put_string": (lambda s, p: s.client.put_samples(["b"], p, {"x": "text"}), TypeError, None),
    "get_missing_sample": (lambda s, p: s.get(p, ["b"]), KeyError, None),
    "get_missing_cell": (lambda s, p: s.get(p, ["a"], "y"), KeyError, None),
    "get_unknown_partition": (lambda s, p: s.get(p + "?", ["a"]), KeyError, None),
    "claim_timeout": (lambda s, p: s.claim(p, 9, blocking=True, timeout_s=0.01), TimeoutError, Capability.CLAIMS),
    "claim_unknown_task": (lambda s, p: s.claim(p, 1, task="nobody"), KeyError, Capability.CLAIMS),
    "claim_unknown_partition": (lambda s, p: s.claim(p + "?", 1), KeyError, Capability.CLAIMS),
    "lease_expired": (
        lambda s, p: s.client.ack(_nacked(s, p)),
        LeaseExpiredError,
        Capability.LEASES,
    ),
    "store_full": (lambda s, p: _overfill(s), RuntimeError, Capability.CAPACITY),
    "client_closed": (lambda s, p: s.deployment.closed_client().clear_samples(None, p), ClientClosedError, None),
    "list_unknown_partition": (lambda s, p: s.client.list_samples(p + "?"), KeyError, Capability.LISTING),
}


def _ready(store: Store, case: str) -> str:
    capability = _CASES[case][2]
    store.require(capability)
    partition = store.register("x", "y")
    store.put(partition, ["a"], x=torch.zeros(1))
    return partition


class ErrorSuite(Suite, chapter="errors"):
    """Every failure is a data-plane error and also the builtin exception that a user would catch."""

    @pytest.mark.parametrize("case", list(_CASES))
    def test_errors_are_of_the_hierarchy(self, store: Store, case: str) -> None:
        """Contract: "Errors derive from DataPlaneError, which carries backend, retryable and hint, survives pickling,
        and keeps its cause."

        Check first: raise the errors of dataplane_core.errors. Each of them is also the builtin exception that a user
        would catch.
        """
        partition = _ready(store, case)
        call, builtin, _ = _CASES[case]
        with pytest.raises(DataPlaneError) as caught:
            call(store, partition)
        assert isinstance(caught.value, builtin), (
            f"{type(caught.value).__name__} does not derive from {builtin.__name__}"
        )
        assert not isinstance(caught.value, BackendError), (
            f"the backend raised an error that is no data-plane error: {caught.value.__cause__!r}"
        )
        check_error(caught.value, store.name)

    @pytest.mark.parametrize("case", list(_CASES))
    def test_errors_survive_pickling(self, store: Store, case: str) -> None:
        """Contract: "Errors derive from DataPlaneError, which carries backend, retryable and hint, survives pickling,
        and keeps its cause."

        Check first: an error class of your own must keep its values as attributes and pass its message to
        DataPlaneError.
        """
        partition = _ready(store, case)
        with pytest.raises(DataPlaneError) as caught:
            _CASES[case][0](store, partition)
        error = caught.value
        error.__cause__ = OSError(104, "Connection reset by peer")
        copied = pickle.loads(pickle.dumps(error))
        assert type(copied) is type(error)
        assert str(copied) == str(error)
        assert (copied.backend, copied.retryable, copied.hint) == (error.backend, error.retryable, error.hint)
        assert vars(copied) == vars(error), "pickling changed the attributes"
        assert isinstance(copied.__cause__, OSError), "pickling lost the cause"
        assert copied.__cause__.args == error.__cause__.args

    @pytest.mark.parametrize("case", list(_CASES))
    def test_messages_are_sentences(self, store: Store, case: str) -> None:
        """Contract: "Errors derive from DataPlaneError".

        Check first: whether the message is a repr of text, in quotes. This happens with the __str__ of KeyError.
        """
        partition = _ready(store, case)
        with pytest.raises(DataPlaneError) as caught:
            _CASES[case][0](store, partition)
        text = str(caught.value)
        assert store.name in text, "the message does not name the backend"
        assert not text.startswith(("'", '"')), f"the message is a repr: {text}"
        assert len(text) < 2000, "the message is too long to read"

    def test_foreign_errors_are_wrapped_with_their_cause(self, store: Store) -> None:
        """Contract: "Errors derive from DataPlaneError, which carries backend, retryable and hint, survives pickling,
        and keeps its cause."

        Check first: core, not the backend: core must wrap an error that is not a data-plane error, and keep it as the
        cause.
        """
        partition = store.register("x")
        cause = OSError(28, "No space left on device")
        with (
            store.faults.error_before("put_samples", cause),
            store.refusal(BackendError, "put_samples", "No space left") as caught,
        ):
            store.put(partition, ["a"], x=torch.zeros(1))
        assert caught.value.__cause__ is cause
        copied = pickle.loads(pickle.dumps(caught.value))
        assert isinstance(copied.__cause__, OSError)
        assert copied.__cause__.args == cause.args

    def test_a_missing_reply_is_an_error(self, store: Store) -> None:
        """Contract: "Core does the following once, for all backends: argument checks, empty batches, repeated ids in a
        read, row and field counts of every reply".

        Check first: every hook must return its reply type. None is not a reply.
        """
        partition = store.register("x")
        store.put(partition, ["a"], x=torch.zeros(1))
        calls: dict[str, Callable[[], Any]] = {
            "put_samples": lambda: store.put(partition, ["b"], x=torch.zeros(1)),
            "get_samples": lambda: store.get(partition, ["a"]),
            "clear_samples": lambda: store.client.clear_samples(["a"], partition),
        }
        for operation, call in calls.items():
            with store.faults.after(operation, lambda request, reply: None), store.refusal(RuntimeError, operation):
                call()

    def test_a_client_works_after_errors(self, store: Store) -> None:
        """Contract: "Every call ends by its deadline: op_timeout_s of the config".

        Check first: after a failed operation, the connection, the locks and the thread pool must be usable.
        """
        partition = store.register("x")
        for number in range(10):
            for case in ("put_other_dtype", "get_missing_sample", "get_unknown_partition"):
                with pytest.raises(DataPlaneError):
                    _CASES[case][0](store, partition if number else store.new_id())
            store.put(partition, [f"s{number}"], x=torch.zeros(1))
        assert store.client.get_samples([f"s{n}" for n in range(10)], partition, ["x"]).batch_size == torch.Size([10])

    # --- what the client makes of a backend's faults ------------------------------------------------------------------

    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_a_lost_put_never_reports_success(self, store: Store, moment: str) -> None:
        """Contract: "A timeout or lost connection raises, and never reports success; the write may then have happened
        or not."

        Check first: core, not the backend: a middleware around the backend's hook injects the fault.
        """
        partition = store.register("x")
        fault = store.faults.error_before if moment == "before" else store.faults.error_after
        with fault("put_samples", TimeoutError("the engine did not answer")), pytest.raises(DataPlaneError) as caught:
            store.put(partition, ["a"], [{"n": 1}], x=torch.tensor([1]))
        check_error(caught.value, store.name)
        if moment == "before":
            assert not store.has(partition, "a"), "a put that never reached the backend was written"
            store.put(partition, ["a"], [{"n": 1}], x=torch.tensor([1]))
        assert store.get(partition, ["a"])["x"].tolist() == [1]
        assert store.tags_of(partition) == {"a": {"n": 1}}

    @pytest.mark.parametrize("lost", ["a row", "a column"])
    def test_a_short_reply_is_refused(self, store: Store, lost: str) -> None:
        """Contract: "row and field counts of every reply" ... "A read never returns fewer rows."

        Check first: core, not the backend: a middleware around the backend's hook injects the fault.
        """
        partition = store.register("x", "y", "o")
        fields = batch(3, x=torch.arange(3), y=torch.zeros(3, 2))
        store.client.put_samples(["a", "b", "c"], partition, fields)
        fault = store.faults.truncation() if lost == "a row" else store.faults.truncation(field="y")
        with fault, pytest.raises(DataPlaneError) as caught:
            store.get(partition, ["a", "b", "c"], "x", "y")
        check_error(caught.value, store.name)
        assert store.get(partition, ["a", "b", "c"], "x", "y")["x"].tolist() == [0, 1, 2]
