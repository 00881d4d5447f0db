"""An instance in a folder: its processes are killed, one or all, and what was committed is there again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from known_rows import STARTS_S, eventually, put, right

from dataplane_core import connect
from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import AlreadyRunningError, BackendUnavailableError, LostSamplesError
from dataplane_core.ownership import lock_folder, owner_of
from dataplane_tq_simple import TQSimpleBackend, TQSimpleConfig
from dataplane_tq_simple._messages import UnitsGoneError

NAME = "kept"


@pytest.fixture
def config(ray_address: str, tmp_path: Path) -> dict[str, Any]:
    options = {"instance": NAME, "ray_address": ray_address, "unit_bytes": 8 << 20, "durable": str(tmp_path)}
    return {"backend": "tq_simple", "op_timeout_s": STARTS_S, "options": options}


@pytest.fixture
def client(config: dict[str, Any]) -> Iterator[DataPlaneClient]:
    with connect(config, bootstrap=True) as client:
        client.register_partition("p", ["x"], None, ["leased"])
        yield client


def unit_in(folder: Path) -> Path:
    return folder / NAME / "unit"


def test_a_unit_says_what_is_wrong_with_its_folder(
    client: DataPlaneClient, tmp_path: Path, pid_of: Callable[[str], int]
) -> None:
    put(client, IDS)
    pid = pid_of(f"tq-{NAME}/")
    own = unit_in(tmp_path)
    assert owner_of(own).pid == pid
    aside = own.rename(tmp_path / "aside")
    own.write_text("this is no folder")
    with suppress(ProcessLookupError):  # it ends by itself if it happens to note something now
        os.kill(pid, signal.SIGKILL)

    def refusal() -> BackendUnavailableError | None:
        try:
            assert right(client, IDS)
        except BackendUnavailableError as error:
            return None if isinstance(error, UnitsGoneError) else error
        return None

    def is_back() -> bool:
        with suppress(BackendUnavailableError):
            return right(client, IDS[2:])
        return False

    refused = eventually(refusal, "nobody is told")
    assert not refused.retryable
    assert re.search(rf"unit-0 cannot bring its rows back: .*{own} cannot be used", str(refused))
    with pytest.raises(BackendUnavailableError, match="no storage unit takes rows"):
        put(client, ["more-1"])
    client.clear_samples([IDS[0]], "p")
    client.clear_samples([IDS[1]], "p")
    own.unlink()
    aside.rename(own)
    eventually(is_back, "it does not find it")
    assert [each.state for each in client.list_units()] == ["serving"]
    eventually(lambda: sum(each.num_rows for each in client.list_units()) == 18, "what was cleared meanwhile is kept")
    client.clear_samples(None, "p")
    assert [each.num_rows for each in client.list_units()] == [0]


# --- all processes end ------------------------------------------------------------------------------------------------


def filled(config: dict[str, Any]) -> None:
    """Bootstraps an instance, puts 20 rows, acks two and leases two, and ends it."""
    with connect(config, bootstrap=True) as client:
        client.register_partition("p", ["x"], None, ["leased"], grpo_group_size=2)
        put(client, IDS)
        client.ack(client.claim_meta("p", "leased", ["x"], 2, lease_s=600))
        client.claim_meta("p", "leased", ["x"], 2, lease_s=600)
        client.clear_samples(IDS[18:], "p")


IDS = [f"q{row // 2}_g{row % 2}-{row}" for row in range(20)]


def lost(client: DataPlaneClient, ids: list[str]) -> list[str]:
    """The samples that are lost. All others are right."""
    found = []
    for each in ids:
        try:
            assert right(client, [each])
        except LostSamplesError:
            found.append(each)
    return found


@pytest.mark.parametrize("sync", ["none", "commit"])
def test_who_bootstraps_again_has_what_was_committed(config: dict[str, Any], tmp_path: Path, sync: str) -> None:
    config["options"]["sync"] = sync

    def said() -> str:
        found = TQSimpleBackend.diagnose(TQSimpleConfig(**config["options"]), deadline=time.monotonic() + STARTS_S)
        return next(each.what for each in found if str(tmp_path / NAME) in each.what)

    assert "There is no folder" in said()
    filled(config)
    nobody = "has rows. Its journal is open in no process. It was last in process"
    eventually(lambda: nobody in said(), "the controller's process does not end")
    with connect(config, bootstrap=True) as client:
        assert right(client, IDS[:18])
        claimed = client.claim_meta("p", "leased", ["x"], 100, blocking=False, lease_s=600)
        assert list(claimed.sample_ids) == IDS[2:18], "what was acked is not given again, what was leased is"
        assert sum(each.num_rows for each in client.list_units()) == 18
        client.clear_samples(None, "p")
        assert [each.num_rows for each in client.list_units()] == [0]


def test_folders_that_are_removed_or_damaged_name_their_rows(config: dict[str, Any], tmp_path: Path) -> None:
    config["options"]["node_wait_s"] = 0.0
    filled(config)
    shutil.rmtree(unit_in(tmp_path))
    for damage in (True, False):
        with connect(config, bootstrap=True) as client:
            eventually(lambda client=client: lost(client, IDS[:18]) == IDS[:18], "they are waited for")
            assert sum(each.num_lost for each in client.list_units()) == 18
            put(client, IDS[:18])
            assert right(client, IDS[:18])
        if damage:
            os.truncate(unit_in(tmp_path) / "arena", 4096)
    with connect(config, bootstrap=True) as client:
        assert right(client, IDS[:18])
    assert list((tmp_path / NAME).glob("damaged-*")), "nothing is deleted"


def test_rows_whose_bytes_are_not_what_was_put_are_named(config: dict[str, Any], tmp_path: Path) -> None:
    filled(config)
    with (unit_in(tmp_path) / "arena").open("r+b") as file:
        data = file.read(1 << 16)
        file.seek(0)
        file.write(bytes(byte ^ 1 if at % 1024 == 0 else byte for at, byte in enumerate(data)))
    with connect(config, bootstrap=True) as client:
        assert lost(client, IDS[:18])


def test_a_journal_that_is_not_that_of_the_rows_is_refused(
    config: dict[str, Any], tmp_path: Path, actors: Callable[[str], set[str]]
) -> None:
    filled(config)
    journal = tmp_path / NAME / "journal"
    journal.rename(tmp_path / "aside")
    with pytest.raises(BackendUnavailableError, match="holds 'unit', and no store"):
        connect(config, bootstrap=True)
    (tmp_path / NAME).rename(tmp_path / "first")
    filled(config)
    shutil.rmtree(unit_in(tmp_path))
    shutil.copytree(tmp_path / "first" / "unit", unit_in(tmp_path))
    with pytest.raises(BackendUnavailableError, match="of an instance whose journal is not the one"):
        connect(config, bootstrap=True)
    eventually(lambda: not actors(f"tq-{NAME}"), "something is left behind")


def test_a_second_owner_is_refused_while_one_lives(config: dict[str, Any], tmp_path: Path) -> None:
    lock = lock_folder(tmp_path / NAME, "journal", 0.0)
    with pytest.raises(AlreadyRunningError, match=f"in use by process {os.getpid()} of host {os.uname().nodename}"):
        connect(config, bootstrap=True)
    os.close(lock)
    with connect(config, bootstrap=True):
        for folder, holds in [(tmp_path / NAME, "journal"), (unit_in(tmp_path), "notes")]:
            with pytest.raises(AlreadyRunningError, match="in use by process"):
                lock_folder(folder, holds, 0.0)
