"""Handlers that use a client in the middle of its calls never hang, and neither does a program that ends there."""

import faulthandler
import itertools
import logging
import signal
import sys
import uuid

import pytest
import torch

from dataplane_core import connect
from dataplane_core.errors import DataPlaneError, UnsupportedOperationError

BACKENDS = ["noop", "shm_store", "redis_store"]


@pytest.fixture
def config(request):
    options = {} if request.param == "noop" else {"namespace": f"handlers-{uuid.uuid4().hex[:8]}"}
    if request.param == "shm_store":
        options["capacity_bytes"] = 1 << 24
    # a call that waits for its own thread lets the test time out
    return {"backend": request.param, "options": options, "op_timeout_s": 300, "middleware": ["metrics"]}


def at_each_line(act, work):
    """Does some work, and acts before each line of ours in it, when it comes there first."""
    acting, seen = False, set()

    def trace(frame, event, _):
        nonlocal acting
        if acting or "dataplane_" not in frame.f_code.co_filename:
            return trace if not acting else None
        if event == "line" and (frame.f_code, frame.f_lineno) not in seen:
            seen.add((frame.f_code, frame.f_lineno))
            acting = True
            try:
                act()
            finally:
                acting = False
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)


class Deleted:
    """Acts when nobody refers to it."""

    def __init__(self, act):
        self.act = act

    def __del__(self):
        self.act()


@pytest.fixture
def in_handlers(tmp_path):
    """Has a function called by handlers of all kinds, in turn."""
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)
    log, logs = logging.getLogger("handlers"), logging.Handler()

    def make(act):
        for each in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(each, lambda *_: act())
        faulthandler.register(signal.SIGUSR2, file=dump, all_threads=False, chain=True)
        logs.emit = lambda _: act()
        log.addHandler(logs)
        kinds = itertools.cycle(
            [
                lambda: signal.raise_signal(signal.SIGUSR1),
                lambda: signal.raise_signal(signal.SIGUSR2),
                lambda: Deleted(act) and None,
                lambda: log.warning("now"),
            ]
        )
        return lambda: next(kinds)()

    with (tmp_path / "dump").open("w") as dump:
        yield make
        faulthandler.unregister(signal.SIGUSR2)
    signal.signal(signal.SIGUSR1, before[0])
    signal.signal(signal.SIGUSR2, before[1])
    log.removeHandler(logs)


@pytest.mark.parametrize("config", BACKENDS, indirect=True)
def test_a_handler_may_use_the_client_before_any_line_of_a_call(config, in_handlers):
    """In the middle of the backend it is refused, elsewhere it is answered."""
    answers = []

    def use():
        try:
            client.middleware[0].snapshot()
            client.claim_meta("p", "other", ["x"], 2, timeout_s=0, lease_s=0.001)
            answers.append(None)
        except DataPlaneError as error:
            answers.append(type(error))

    with connect(config) as client:
        client.register_partition("p", ["x"], None, ["t", "other"])
        client.put_samples(["a", "b"], "p", {"x": torch.ones(2, 3)})

        def work():
            client.put_samples(["c", "d"], "p", {"x": torch.ones(2, 3)})
            meta = client.claim_meta("p", "t", ["x"], 4, lease_s=600.0)
            client.get_data(meta)
            client.ack(meta)
            client.middleware[0].snapshot()

        at_each_line(in_handlers(use), work)
        (task, _) = client.describe("p").tasks.values()
        assert (task.num_ready, task.num_consumed) == (0, 4)
    assert None in answers
    assert UnsupportedOperationError in answers


#: Ends while other threads are in the middle of calls of all clients.
PROGRAM = """
import atexit, sys, threading
import torch
from dataplane_core import connect
from dataplane_core.errors import DataPlaneError

one = torch.ones(1)

class Held:  # by the module, which is taken apart last
    def __init__(self, client):
        self.client = client
    def use(self, refusal=Exception):  # its module and torch may be gone already
        try:
            self.client.put_samples(["last"], "p", {"x": one})
        except refusal:
            pass
    def __del__(self):
        self.use()
        self.client.close()

def put_for_ever(client, number):
    while True:
        try:
            client.put_samples([f"s{number}"], "p", {"x": one})
        except DataPlaneError:
            return

held = []
for backend in sys.argv[2:]:
    options = {} if backend == "noop" else {"namespace": sys.argv[1]}
    client = connect({"backend": backend, "options": options, "op_timeout_s": 300})
    client.register_partition("p", ["x"], None, ["t"])
    held.append(Held(client))
    atexit.register(held[-1].use)
    for number in range(2):
        threading.Thread(target=put_for_ever, args=(client, number), daemon=True).start()
    while len(client.list_samples("p").sample_ids) < 2:
        pass
del client
sys.exit(7)
"""


def test_a_program_ends_with_its_status_while_its_threads_are_in_calls(python):
    """Its exit functions and what is deleted last use and close the clients."""
    name = f"handlers-{uuid.uuid4().hex[:8]}"
    assert python.run("-c", PROGRAM, name, *BACKENDS, check=False).returncode == 7
