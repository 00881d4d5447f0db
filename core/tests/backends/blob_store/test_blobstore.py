"""`BlobStore`: one process without a journal, many with one; every process comes to the same state."""

import os
import threading

import pytest
import torch
from blob_stores import Plain, journaled, open_client

from dataplane_core.backends import RefsGoneError
from dataplane_core.errors import (
    BackendError,
    BackendUnavailableError,
    CapacityExceededError,
    CorruptDataError,
    LostSamplesError,
)
from dataplane_core.ledger import commands
from dataplane_testkit import backend_of


@pytest.mark.parametrize("byte", [0, 4, 8, 12, -1], ids=["magic", "count", "length", "second_length", "cut"])
def test_a_row_whose_index_is_damaged_is_named_with_its_sample_and_fields(byte):
    with open_client(Plain) as client:
        client.register_partition("p", ["x", "y", "z"], None, ["t"])
        rows = torch.ones(1, 60_000).expand(4, -1)  # equal rows, which are stored once
        ids = ["a", "b", "c", "d"]
        client.put_samples(ids, "p", {"x": torch.arange(4.0), "y": torch.arange(4.0), "z": rows})
        blobs = backend_of(client).blobs
        for key, fields in zip([list(blobs)[2], list(blobs)[4]], [("x", "y"), ("z",)], strict=True):
            kept, row = blobs[key], bytearray(blobs[key])
            row[byte] ^= 0x40
            blobs[key] = bytes(row[:-1] if byte < 0 else row)
            sample_id = "a" if fields == ("z",) else "c"
            with pytest.raises(CorruptDataError, match=f"sample '{sample_id}'.*{fields[0]}") as caught:
                client.get_samples(ids, "p", ["x", "y", "z"])
            assert (caught.value.cells, caught.value.hint is None) == ({sample_id: fields}, False)
            blobs[key] = kept


def test_what_was_refused_for_want_of_room_shifts_nothing_in_a_process_with_more_room():
    cls = journaled()
    with open_client(cls, capacity_bytes=100, on_full="raise") as one:
        one.register_partition("p", ["x"], None, ["t"])
        for name, value in (("a", 1), ("b", 2)):
            column = {"x": torch.full((1, 64), value, dtype=torch.uint8)}
            if name == "b":
                with pytest.raises(CapacityExceededError):
                    one.put_samples([name], "p", column)
                one.clear_samples(["a"], "p")
            one.put_samples([name], "p", column)
        with open_client(cls, bootstrap=False, capacity_bytes=1000) as two:  # which replays what came before
            two.put_samples(["c"], "p", {"x": torch.full((1, 64), 3, dtype=torch.uint8)})
            for client in (one, two):
                assert client.get_samples(["b", "c"], "p", ["x"])["x"][:, 0].tolist() == [2, 3]
            with pytest.raises(CapacityExceededError):
                one.put_samples(["d"], "p", column)
            one.put_samples(["c"], "p", tags=[{"n": 1}])  # takes no room
            assert two.list_samples("p").tags == [{}, {"n": 1}]


def test_a_put_that_waits_for_room_leaves_two_records_and_none_of_its_tries():
    cls = journaled()
    with open_client(cls, capacity_bytes=20) as client:
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["a"], "p", {"x": torch.zeros(1, dtype=torch.int64)})
        before = len(backend_of(client).journal)
        config = client.config
        for timeout_s in (1.0, 10.0, 60.0):
            client._config = config.model_copy(update={"op_timeout_s": timeout_s})
            with pytest.raises(TimeoutError):
                client.put_samples(["b"], "p", {"x": torch.zeros(1, dtype=torch.int64)})
            if len(backend_of(client).journal) > before:  # else this machine stood still until the put timed out
                break
        client._config = config
        with pytest.raises(ValueError, match="field 'x'"):  # at once: it will never do
            client.put_samples(["b"], "p", {"x": torch.zeros(1)})
        assert len(backend_of(client).journal) == before + 2  # which say to others that it waits, and no longer does
        with open_client(cls, False, capacity_bytes=20, on_full="raise") as other:
            other.list_samples("p")
            assert not backend_of(other)._journal.service.ledger.room.waiting


def test_vain_questions_of_a_waiting_claim_are_not_recorded():
    cls = journaled()
    with open_client(cls) as client:
        client.register_partition("p", ["x"], None, ["t"])
        before = len(backend_of(client).journal)
        with pytest.raises(TimeoutError):
            client.claim_meta("p", "t", ["x"], 1, timeout_s=0.2)
        assert len(backend_of(client).journal) == before


def test_threads_wait_for_a_store_that_does_not_answer_no_longer_than_they_may():
    cls = journaled()
    asked, answered = threading.Event(), threading.Event()

    class Stuck(cls):
        def append(self, seq, record):
            if threading.current_thread() is not threading.main_thread():
                asked.set()
                answered.wait(30)
            return super().append(seq, record)

    with open_client(Stuck) as client:
        client.register_partition("p", ["x"], None, ["t"])
        stuck = threading.Thread(target=client.clear_samples, args=(["a"], "p"))
        stuck.start()
        assert asked.wait(30)
        client._config = client.config.model_copy(update={"op_timeout_s": 0.2})
        with pytest.raises(TimeoutError, match=r"list_samples: other threads .* until the deadline"):
            client.list_samples("p")
        answered.set()
        stuck.join()
        assert client.list_samples("p").sample_ids == []


def test_the_stores_methods_know_how_long_the_operation_may_take():
    left = {}

    def asking(name):
        def ask(self, *args):
            left[name] = self.seconds_left()
            return getattr(super(asked, self), name)(*args)

        return ask

    asked = type("Asked", (journaled(),), {name: asking(name) for name in ("put", "get", "delete", "append", "read")})
    with open_client(asked, op_timeout_s=500) as client:
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(["a"], "p", {"x": torch.zeros(1)})
        client.get_samples(["a"], "p", ["x"])
        client.clear_samples(["a"], "p")
        assert sorted(left) == ["append", "delete", "get", "put", "read"]
        assert all(400 < seconds <= 500 for seconds in left.values())
        assert backend_of(client).seconds_left() == 60  # no operation


@pytest.mark.parametrize(("one", "other"), [("append", "read"), ("read", "append")])
def test_half_a_journal_is_refused_when_the_class_is_made(one, other):
    with pytest.raises(TypeError, match=f"Half overrides '{one}' without '{other}'. Expected both"):
        type("Half", (Plain,), {one: lambda *_: None})


@pytest.mark.parametrize(("number", "expected"), [(5, BackendError), (28, BackendUnavailableError)])
def test_a_store_that_fails_reaches_the_user_with_its_cause_though_its_undoing_fails_too(number, expected):
    """A full disk may be tried again."""

    class Failing(Plain):
        def put(self, key, data):
            raise OSError(number, os.strerror(number))

        def delete(self, key):
            raise RuntimeError("the engine is gone")

    with open_client(Failing) as client:
        client.register_partition("p", ["x"], None, ["t"])
        with pytest.raises(expected, match=os.strerror(number)) as failed:
            client.put_samples(["a"], "p", {"x": torch.zeros(1)})
        assert isinstance(failed.value.__cause__, OSError)
        assert failed.value.retryable == (number == 28)
        assert client.list_samples("p").sample_ids == []


def test_lost_rows_that_an_engine_does_not_name_are_found_by_reading_again():
    class Vague(Plain):
        lost = frozenset()

        def get_rows(self, handles, deadline):
            if not self.lost.isdisjoint(handles):
                raise RefsGoneError("some are gone")
            return super().get_rows(handles, deadline)

    ids = [f"s{i}" for i in range(32)]
    with open_client(Vague) as client:
        client.register_partition("p", ["x"], None, ["t"])
        client.put_samples(ids, "p", {"x": torch.zeros(32)})
        (part,) = backend_of(client).call_ledger(0.0, commands.Locate("p", ["s3", "s30"], ["x"])).parts
        backend_of(client).lost = frozenset(part.write_id + position for position in part.positions)
        with pytest.raises(LostSamplesError) as caught:
            client.get_samples(ids, "p", ["x"])
        assert caught.value.missing_cells == {"s3": ("x",), "s30": ("x",)}
