"""`export --follow` that is killed, stopped or not alone, and the commands."""

import signal
import time

import pytest
import torch
from contents import config_in, rows
from tiers import in_long

from dataplane_core import connect
from dataplane_core.cli import main
from dataplane_core.errors import InvalidRequestError
from dataplane_core.spec import AnnounceRequest
from dataplane_testkit import backend_of
from dataplane_testkit._timing import STARTS_S, eventually
from dataplane_tools import follow_partition

#: `dataplane export`, which reads few rows at once. No announcement of it is missed, however busy this machine is.
EXPORT = f"""
import sys
from dataplane_core.cli import main
from dataplane_core.client import announcing
from dataplane_tools import _export
announcing._TIMEOUT_S = {STARTS_S}
_export._FIRST_ROWS, _export._MOST_ROWS = 3, 4
sys.exit(main(["export", *sys.argv[1:]]))
"""


@pytest.fixture
def config(tmp_path):
    return config_in(tmp_path, announce_s=0.1, options={"capacity_bytes": "50MB"})


@pytest.fixture
def store(config):
    with connect(config) as client:
        yield client


@pytest.mark.parametrize("kills", [2, *in_long(12)])
@pytest.mark.parametrize("group_size", [None, 2])
def test_a_follower_that_is_killed_at_any_moment_has_every_row_once(python, store, config, tmp_path, group_size, kills):
    out, total = tmp_path / "out", 60 * (kills + 1)
    options = ["--shard-bytes", 1, "--every", 0.05, "--where", "keep", "--task", "export:it"]
    arguments = [config, "p", out, "--follow", *options]
    store.register_partition("p", ["x"], total, ["train"], group_size)

    def put(start, stop):
        for number in range(start, stop, 4):
            ids = [f"p{each // 2}_g{each % 2}" for each in range(number, number + 4)]
            tags = [{"keep": each % 8 < 6} for each in range(number, number + 4)]
            store.put_samples(ids, "p", {"x": torch.arange(number, number + 4)}, tags=tags)

    def num_shards():
        return len(list(out.glob("part-*.parquet")))

    for kill in range(kills):
        before = num_shards()
        with python.start("-c", EXPORT, *arguments) as follower:
            put(kill * 60, kill * 60 + 60)
            # the next shards come at their own time, so the kill falls between any two steps
            wanted = before + kill % 4
            eventually(lambda wanted=wanted: num_shards() > wanted, within_s=STARTS_S, what="shards")
            follower.send_signal(signal.SIGKILL)
    put(kills * 60, total)
    python.run("-c", EXPORT, *arguments)
    written = [(row["sample_id"], row["x"]) for row in rows(out)]
    expected = [(f"p{each // 2}_g{each % 2}", each) for each in range(total) if each % 8 < 6]
    assert sorted(written, key=lambda row: row[1]) == expected
    assert store.is_finished("p", ["export:it"])


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_follower_that_is_told_to_end_keeps_what_it_read(python, store, config, tmp_path, sent):
    out = tmp_path / "out"
    store.register_partition("p", ["x"], None, [])
    store.put_samples(["a", "b"], "p", {"x": torch.ones(2)})
    with python.start("-c", EXPORT, config, "p", out, "--follow", "--every", "3600", "--task", "export:it") as follower:
        eventually(lambda: list(out.glob(".part-*")), within_s=STARTS_S, what="an open shard")
        follower.send_signal(sent)
        assert follower.wait(STARTS_S) == 0
    assert [row["sample_id"] for row in rows(out)] == ["a", "b"]
    assert store.list_consumed("p", "export:it") == ["a", "b"]


def test_a_task_that_another_follower_has_is_refused(python, store, config, tmp_path):
    def follow():
        return follow_partition(store, "p", tmp_path / "two", task="export:mine", idle_s=0.0).num_rows

    def operations():
        return [work.operation for each in store.list_clients() for work in each.work]

    store.register_partition("p", ["x"], None, ["export:mine"])
    with python.start("-c", EXPORT, config, "p", tmp_path / "one", "--follow", "--task", "export:mine") as follower:
        try:
            eventually(lambda: "claim_meta" in operations(), within_s=STARTS_S, what="a claim")
            with pytest.raises(
                InvalidRequestError, match=rf"'export:mine' of 'p' is that of 'process {follower.pid} on"
            ):
                follow()
            assert not (tmp_path / "two" / ".export.json").exists()
        finally:
            follower.kill()
    (info,) = (each for each in store.list_clients() if each.pid == follower.pid)
    backend_of(store).announce(AnnounceRequest(client=info, ttl_s=0.1, deadline=time.monotonic() + STARTS_S))
    eventually(
        lambda: "gone" in [each.state for each in store.list_clients(ended=True)],
        within_s=STARTS_S,
        what="its end, which is known a little later",
    )
    assert follow() == 0
    store.put_samples(["a", "b"], "p", {"x": torch.ones(2)})
    assert follow() == 2


def test_the_command_export(store, config, tmp_path, capsys):
    store.register_partition("p", ["x"], None, [])
    store.put_samples(["a", "b"], "p", {"y": torch.ones(2)})
    store.put_samples(["a"], "p", {"x": torch.ones(1)})
    out, more = str(tmp_path / "out"), str(tmp_path / "more")
    assert main(["export", config, "p", out, "--shard-bytes", "1MB"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{out}: 1 rows of p in 1 shard, ")
    assert second == "1 were left out, which lack 'x' (--partial takes them)"
    assert [row["sample_id"] for row in rows(out)] == ["a"]
    before = signal.getsignal(signal.SIGINT)
    assert main(["export", config, "p", more, "--follow", "--idle", "0"]) == 0
    assert signal.getsignal(signal.SIGINT) is before
