"""`LedgerBackend`: what it does when payload is gone, when a put fails late, and while it waits."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dataplane_core import DataPlaneConfig
from dataplane_core.connecting import connect_backend
from dataplane_core.errors import (
    BackendUnavailableError,
    CapacityExceededError,
    OperationTimeoutError,
    RoomTimeoutError,
)
from dataplane_core.ledger import commands
from dataplane_noop import NoopBackend
from dataplane_testkit import backend_of


def open_client(cls=NoopBackend, op_timeout_s=10, **options):
    client = connect_backend(cls, DataPlaneConfig(backend="noop", options=options, op_timeout_s=op_timeout_s))
    client.register_partition("p", ["x", "y"], None, ["t"])
    return client


def put(client, ids, size=1):
    client.put_samples(ids, "p", {"x": torch.zeros(len(ids), size, dtype=torch.uint8)})


# --- payload that is gone ---------------------------------------------------------------------------------------------


def test_rows_that_move_while_they_are_read_are_not_lost():
    moves = []

    class Moves(NoopBackend):
        def fetch_fields(self, located, num_samples, deadline):
            if len(moves) < 6:  # each time another row of one write, so that the rest is named again
                moves.append(None)
                with ThreadPoolExecutor(1) as another:
                    another.submit(put, self.client, [f"s{len(moves)}"]).result()
            return super().fetch_fields(located, num_samples, deadline)

    with open_client(Moves) as client:
        backend_of(client).client = client
        ids = [f"s{i}" for i in range(9)]
        put(client, ids)
        assert len(client.get_samples(ids, "p", ["x"])) == 9
        assert len(moves) == 6


# --- puts that fail ---------------------------------------------------------------------------------------------------


class _FailsLate(NoopBackend):
    """Stores take until the deadline and fail; a ledger that hangs as long as it is allowed, when it is to undo."""

    hangs = True
    until, undone_until = 0.0, 0.0

    def store_write(self, write_id, columns, num_samples, deadline):
        if self.hangs:
            self.until = deadline
            time.sleep(max(0.0, deadline - time.monotonic()))
            raise OperationTimeoutError("the store did not answer.")
        super().store_write(write_id, columns, num_samples, deadline)

    def call_ledger(self, deadline, command, wake=None):
        if isinstance(command, commands.AbortPut) and self.hangs:
            self.undone_until = deadline
            time.sleep(max(0.0, deadline - time.monotonic()))
            raise OperationTimeoutError("the controller did not answer.")
        return super().call_ledger(deadline, command)


def test_undoing_a_failed_put_keeps_to_its_deadline_and_the_next_call_goes_on_with_it():
    with open_client(_FailsLate, op_timeout_s=1.0, capacity_bytes=100, on_full="raise") as client:
        with pytest.raises(OperationTimeoutError):
            put(client, ["a"], size=80)
        backend = backend_of(client)
        assert backend.undone_until <= backend.until
        assert backend._service.ledger.held_bytes == 80
        backend.hangs = False
        put(client, ["b"], size=80)  # the room is free again
        assert client.list_samples("p").sample_ids == ["b"]


# --- waiting ----------------------------------------------------------------------------------------------------------


class _Interrupted(BaseException):
    pass


@pytest.mark.parametrize("error", [_Interrupted(), BackendUnavailableError("gone")], ids=["interrupted", "failed"])
def test_a_put_that_ends_without_its_room_leaves_the_queue(error):
    class Fails(NoopBackend):
        tries = 0

        def put_once(self, request, row_bytes, ticket):
            self.tries += request.sample_ids == ["large"]
            if self.tries == 2:
                raise error
            return super().put_once(request, row_bytes, ticket)

    with open_client(Fails, capacity_bytes=100) as client:
        put(client, ["a"], size=60)
        with pytest.raises(type(error)):
            put(client, ["large"], size=90)
        backend_of(client).tries = 3
        assert not backend_of(client)._service.ledger.room.waiting


def test_a_put_that_finds_the_engine_full_queues_again():
    asked = []

    class EngineIsFull(NoopBackend):
        def store_write(self, write_id, columns, num_samples, deadline):
            if len(asked) < 4 and columns["x"].shape[1] == 50:
                raise CapacityExceededError("the engine is full.")
            super().store_write(write_id, columns, num_samples, deadline)

        def call_ledger(self, deadline, command, wake=None):
            if wake is not None:
                assert isinstance(command, commands.WaitForRoom)
                asked.append(command.wait_s)
            return super().call_ledger(deadline, command, wake)

    with open_client(EngineIsFull, capacity_bytes=100) as client:
        put(client, ["a"], size=50)
        assert len(asked) == 4
        assert max(asked) <= client.config.op_timeout_s


@pytest.mark.parametrize("cut", [commands.BeginPut, commands.WaitForRoom])
def test_a_put_whose_last_question_got_no_answer_says_that_the_store_was_full(cut):
    class AnswersOnce(NoopBackend):
        num_asked = 0

        def call_ledger(self, deadline, command, wake=None):
            if isinstance(command, cut) and not getattr(command, "wait_s", 1) <= 0:
                self.num_asked += 1
                if self.num_asked > 2:
                    raise OperationTimeoutError("no answer. It may have been executed or not.")
            return super().call_ledger(deadline, command)

    with open_client(AnswersOnce, capacity_bytes=100) as client:
        put(client, ["a"], size=60)
        backend_of(client).num_asked = 1 if cut is commands.BeginPut else 2
        with pytest.raises(RoomTimeoutError) as caught:
            put(client, ["b"], size=60)
        assert isinstance(caught.value, CapacityExceededError)
        assert caught.value.outcome == "not_done"
        assert str(caught.value).count("60 of 100 bytes are held") == 1
        assert "did not answer the last question" in str(caught.value)
        assert client.list_sample_ids("p") == ["a"]


def test_a_put_whose_commit_got_no_answer_may_be_done_though_it_waited_for_room():
    class LosesTheCommit(NoopBackend):
        def call_ledger(self, deadline, command, wake=None):
            reply = super().call_ledger(deadline, command)
            if isinstance(command, commands.WaitForRoom) and command.wait_s:
                super().call_ledger(deadline, commands.ClearRequest("p", ["a"]))
            if isinstance(command, commands.CommitPut) and "a" not in self.list_all():
                raise OperationTimeoutError("no answer.")
            return reply

        def list_all(self):
            return self._service.call(commands.ListRequest("p", None)).sample_ids

    with open_client(LosesTheCommit, capacity_bytes=100) as client:
        put(client, ["a"], size=60)
        with pytest.raises(OperationTimeoutError) as caught:
            put(client, ["b"], size=60)
        assert not isinstance(caught.value, CapacityExceededError)
        assert caught.value.outcome == "unknown"
        assert client.list_sample_ids("p") == ["b"]


def test_a_put_that_says_that_it_waits_is_woken_at_once_if_room_became_free_since_it_was_refused():
    with open_client(capacity_bytes=10, on_full="raise") as client:
        put(client, ["a"], size=10)
        with pytest.raises(CapacityExceededError):
            put(client, ["b"], size=10)
        client.clear_samples(["a"], "p")
        woken = []
        wait = commands.WaitForRoom("ticket", 10, wait_s=60.0)
        backend_of(client).call_ledger(0.0, wait, lambda: bool(woken.append(True)))
        assert woken == [True]
