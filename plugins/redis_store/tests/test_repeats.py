"""Puts, acks, nacks and renewals whose reply was lost are repeated, and carried out once."""

import contextlib
import socket
import threading
import time

import pytest
import torch
from tensordict import TensorDict

from dataplane_core.errors import BackendUnavailableError, LostReplyError
from dataplane_core.spec import AckRequest, NackRequest, RenewRequest, new_id
from dataplane_testkit import backend_of


class Cutter:
    """A proxy that cuts a connection after the server answered, before the reply reaches the client.

    Attributes:
        pass_on: How many replies to pass on before that. None: all.
        refuses: Whether a new connection is closed at once.
    """

    def __init__(self, port):
        self.target = port
        self.pass_on = None
        self.num_cuts = 0
        self.refuses = False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.threads = [threading.Thread(target=self._accept)]
        self.sockets = []
        self.threads[0].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                if self.refuses:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self.target))
                self.sockets += [client, server]
                for call in ((client, server, False), (server, client, True)):
                    self.threads.append(threading.Thread(target=self._pass, args=call))
                    self.threads[-1].start()

    def _pass(self, source, sink, replies):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if replies and self.pass_on is not None:
                    self.pass_on -= 1
                    if self.pass_on < 0:
                        self.pass_on = None
                        self.num_cuts += 1
                        break
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.threads[0].join()
        for each in self.sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self.threads[1:]:
            thread.join()
        for each in (*self.sockets, self.listener):
            each.close()


@pytest.fixture
def cutter(plain):
    made = Cutter(plain.port)
    yield made
    made.close()


_CASES = [("put_samples", 1, 2), ("put_samples", 3, 200_000), ("put_samples", 1, 0), ("ack", 2, 2), ("ack", 2500, 2)]
_CASES += [("nack", 2, 2), ("nack", 2500, 2), ("renew", 2500, 2)]


def test_an_operation_of_which_any_reply_was_lost_is_carried_out_once(plain, cutter, connect):
    """Each operation is called until it ends without a loss: first its first reply is lost, then its second, ..."""
    made = connect(url=f"redis://127.0.0.1:{cutter.port}/0", namespace="repeats", op_timeout_s=60.0)
    other = connect(url=plain.url, namespace="repeats", op_timeout_s=60.0)
    made.register_partition("p", ["x"], None, ["train"])

    def claim(count):
        return other.claim_meta("p", "train", [], count, blocking=False, lease_s=600)

    def call(operation, count, size, pass_on):
        """Calls it with the reply of that number lost. Returns whether that reply came."""
        number, num_cuts = len(other.list_samples("p").sample_ids), cutter.num_cuts
        ids = [f"s{number + each}" for each in range(count)]
        columns = TensorDict({"x": torch.full((count, size), number)}, batch_size=[count]) if size else None
        if operation == "put_samples":
            cutter.pass_on = pass_on
            made.put_samples(ids, "p", columns, tags=[{"n": number}] * count)
        else:
            other.put_samples(ids, "p", columns)
        held = claim(count + 1)
        assert held.sample_ids == ids  # what was put before is all acked
        cutter.pass_on = pass_on if operation != "put_samples" else None
        if operation == "ack":
            made.ack(held)
        elif operation == "nack":
            made.nack(held)
            held = claim(count + 1)
            assert held.sample_ids == ids
        elif operation == "renew":
            made.renew(held, 300)
        cutter.pass_on = None
        if operation != "ack":
            other.ack(held)
        if columns is not None:
            assert other.get_samples(ids[-1:], "p", ["x"])["x"][0, 0] == number
        assert other.check_consumption_status("p", ["train"])
        return cutter.num_cuts > num_cuts

    for case in _CASES:
        num_lost = next(nth for nth in range(100) if not call(*case, nth))
        assert num_lost, f"no reply of {case} was lost"
    other.clear_samples(list(other.list_samples("p").sample_ids), "p")
    kept = plain.admin("KEYS", "dp:{repeats}:done:*")
    assert kept
    assert all(plain.admin("PTTL", each) > 0 for each in kept)
    assert int(plain.admin("HGET", "dp:{repeats}:instance", "held")) == 0
    assert not plain.admin("KEYS", "dp:{repeats}:w:*")


def test_the_error_at_the_deadline_says_what_is_known(plain, cutter, connect, hurries):
    made = connect(url=f"redis://127.0.0.1:{cutter.port}/0", namespace="known")
    made.register_partition("p", ["x"], None, ["train"])
    cutter.pass_on, cutter.refuses = 0, True
    repeated = r"It may have been done or not\. It was repeated: "
    with hurries(2.0), pytest.raises(LostReplyError, match=repeated) as caught:
        made.put_samples(["a"], "p", TensorDict({"x": torch.ones(1, 2)}, batch_size=[1]))
    assert caught.value.outcome == "unknown"
    with hurries(1.0), pytest.raises(BackendUnavailableError, match=r"It was not done\.") as caught:
        made.put_samples(["b"], "p", TensorDict({"x": torch.ones(1, 2)}, batch_size=[1]))
    assert caught.value.outcome == "not_done"
    cutter.refuses = False
    assert made.list_samples("p").sample_ids == ["a"]


@pytest.mark.parametrize("operation", ["ack", "nack", "renew"])
def test_a_settling_that_was_carried_out_between_two_scripts_of_its_repetition_succeeds(
    plain, connect, scripts_of, monkeypatch, operation
):
    one = connect(url=plain.url, op_timeout_s=60.0)
    two = connect(url=plain.url, namespace=one.config.options["namespace"], bootstrap=False, op_timeout_s=60.0)
    one.register_partition("p", ["x"], None, ["train"])
    ids = [f"s{row}" for row in range(4500)]
    one.put_samples(ids, "p", tags=[{}] * len(ids))
    kinds = {"ack": AckRequest, "nack": NackRequest, "renew": RenewRequest}

    def repeats(act_at):
        """Whether a repetition of the request ran so many scripts. After that number, the first request is done."""
        one.reset_consumption("p", "train")
        held = one.claim_meta("p", "train", [], len(ids), lease_s=600).subset(range(1, len(ids)))
        request = kinds[operation](
            partition_id="p",
            task_name="train",
            sample_ids=held.sample_ids,
            lease_tokens=held.lease_tokens,
            deadline=time.monotonic() + 60,
            request_id=new_id(),
            **({"lease_s": 60.0} if operation == "renew" else {}),
        )
        ran = scripts_of(one, act_at, lambda: getattr(backend_of(two), operation)(request))
        assert getattr(backend_of(one), operation)(request).num_samples == len(ids) - 1
        monkeypatch.undo()
        return len(ran) >= act_at

    num_scripts = next(number for number in range(1, 100) if not repeats(number))
    assert num_scripts > 5
