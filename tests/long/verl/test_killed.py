"""verl's replay-buffer tests over a store in a folder, whose process is killed in the middle of each.

A test is run again for each call that it makes of the store: before that call, the process that holds the rows and the
ledger ends by SIGKILL, and the next owner of the folder goes on. verl's own objects live on.
"""

import json
import os
import signal
import threading
import uuid
from pathlib import Path

import pytest
import test_replay_buffer
import transfer_queue
import yaml

pytestmark = pytest.mark.timeout(1800)

#: The `async_` forms first: each becomes the other form of its call, before that is replaced.
CALLS = sorted(name for name in vars(transfer_queue) if name.startswith(("kv_", "async_kv_")))
TESTS = {
    f"{name}[{metric}]" if metric else name: (test, {"metric": metric} if metric else {})
    for name, test in vars(test_replay_buffer).items()
    if name.startswith("test_")
    for metric in (("reward", "acc") if name.startswith("test_groups_without") else (None,))
}


class Store:
    """A store in a folder, whose process ends by SIGKILL before one of the calls."""

    def __init__(self, folder):
        self._folder = folder
        self.kill_at, self.num_calls = None, 0

    def start(self):
        transfer_queue.init({"backend": {"storage_backend": "SimpleStorage"}})

    def kill(self):
        os.kill(json.loads((self._folder / "lock").read_bytes())["pid"], signal.SIGKILL)
        transfer_queue.close()
        self.start()

    def before_a_call(self):
        if self.num_calls == self.kill_at:
            self.kill()
        self.num_calls += 1

    def clear(self):
        client = transfer_queue.get_client()
        for name in client.get_partition_list():
            client.clear_partition(name)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    path = Path(os.environ["DATAPLANE_CONFIG"])
    options = {
        "namespace": f"verl-{uuid.uuid4().hex[:8]}",
        "durable": str(tmp_path / "store"),
        "capacity_bytes": 1 << 26,
    }
    path.write_text(yaml.safe_dump({"backend": "shm_store", "options": options}))
    store = Store(tmp_path / "store")

    one_at_a_time = threading.RLock()  # no other call is under way when the process is killed

    def counted(call):
        def before(*args, **kwargs):
            with one_at_a_time:
                store.before_a_call()
                return call(*args, **kwargs)

        return before

    def awaited(call):
        async def before(*args, **kwargs):
            return call(*args, **kwargs)

        return before

    for name in CALLS:
        call = counted(getattr(transfer_queue, name.removeprefix("async_")))
        monkeypatch.setattr(transfer_queue, name, awaited(call) if name.startswith("async_") else call)
    transfer_queue.close()  # the store of the tests before, which lasts as long as this folder's tests
    store.start()
    yield store
    transfer_queue.close()
    path.unlink()


@pytest.mark.parametrize("name", TESTS)
def test_a_store_that_is_killed_before_any_call_changes_nothing(name, kept):
    test, arguments = TESTS[name]
    test(transfer_queue, **arguments)
    num_calls = kept.num_calls
    assert num_calls > 2
    for at in range(num_calls):
        kept.clear()
        kept.kill_at, kept.num_calls = at, 0
        test(transfer_queue, **arguments)
        assert kept.num_calls > at, "it was never killed"
    print(f"{name}: {num_calls} calls, killed before each")
