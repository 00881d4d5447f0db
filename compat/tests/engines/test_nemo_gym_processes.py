"""The token store for NeMo Gym with other processes: those that die, and the commands that look into the store."""

import asyncio
import json
import os
import subprocess
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from nemo_gym_stores import OTHERS, STAND_IN, call_ids, config, entry, nemo_gym, open_store, store
from tiers import in_long

from dataplane_core.cli import main

__all__ = ["config", "nemo_gym", "open_store", "store"]


@pytest.mark.parametrize("config", ["shm_store"], indirect=True)
def test_read_and_export_show_the_rows(store, config, tmp_path, capsys):
    (tmp_path / "run.json").write_text(json.dumps(config))
    name, run = store._partition, str(tmp_path / "run.json")

    async def write():
        await store.put(entry("first", rollout_id="a"))
        await store.put(entry("second", rollout_id="a", ids=(6, 7, 8)))
        await store.freeze("a")

    asyncio.run(write())
    assert main(["read", run, name, "--json"]) == 0
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    assert sample["sample_id"] == "a"
    assert sample["objects"]["generation_token_ids"] == [4, 5, 6, 7, 8]
    assert main(["export", run, name, str(tmp_path / "out")]) == 0
    (row,) = pq.read_table(tmp_path / "out").to_pylist()
    assert row["sample_id"] == "a"
    assert row["generation_token_ids"] == [4, 5, 6, 7, 8]
    assert row["generation_lengths"] == [2, 3]
    assert [each["model_call_id"] for each in json.loads(row["calls"])] == ["first", "second"]


WRITER = """
import asyncio, json, sys
from nemo_gym_stores import entry
from dataplane_compat.nemo_gym import DataPlaneTokenStore

async def main(config, partition, rollout_id, count, tokens):
    store = DataPlaneTokenStore(config, partition=partition)
    for i in range(count):
        await store.begin_call(rollout_id, str(i))
    print("begun", flush=True)
    await asyncio.gather(*(store.put(entry(str(i), rollout_id=rollout_id, ids=[i] * tokens)) for i in range(count)))
    print("done", flush=True)
    await asyncio.sleep(600)

asyncio.run(main(*json.loads(sys.argv[1])))
"""


def start_writer(python, *arguments):
    own = [str(Path(__file__).parents[1]), str(Path(__file__).parents[3] / "tests")]
    paths = [STAND_IN, *own, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return python.start("-c", WRITER, json.dumps(arguments), env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("config", ["shm_store", *in_long(*OTHERS)], indirect=True)
@pytest.mark.parametrize("in_its_puts", [False, True])
def test_a_writer_is_killed(store, config, python, in_its_puts):
    count, tokens = (60, 20_000) if in_its_puts else (3, 2)

    async def wait_for_a_call():
        deadline = time.monotonic() + 120
        while not any("call" in tags for tags in (await store.client.list_samples(f"{store._partition}/r")).tags):
            assert time.monotonic() < deadline

    with start_writer(python, config, store._partition, "r", count, tokens) as writer:
        assert writer.stdout.readline() == "begun\n"
        if in_its_puts:
            asyncio.run(wait_for_a_call())
        else:
            assert writer.stdout.readline() == "done\n"
        writer.kill()
    snapshot = asyncio.run(store.freeze("r"))
    assert asyncio.run(store.freeze("r")) == snapshot
    for each in snapshot.entries:
        assert each == entry(each.model_call_id, rollout_id="r", ids=[int(each.model_call_id)] * tokens)
    assert snapshot.incomplete == (len(snapshot.entries) < count)
    assert in_its_puts or sorted(call_ids(snapshot)) == ["0", "1", "2"]
