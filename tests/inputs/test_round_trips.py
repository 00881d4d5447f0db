"""What people have goes through a real client of a store and comes back: in one process, and in shared memory."""

import asyncio

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from dataplane_core import connect, connect_async, kv_first_write, to_arrow, to_numpy, write_columns

IDS = ["q0_g0", "q0_g1", "q1_g0"]
COLUMNS = {
    "tokens": [[5, 6, 7], [], [8, 9]],
    "reward": [0.5, 1.0, -2.0],
    "done": [True, False, True],
    "text": ["eos", None, "length"],
    "turns": [[{"role": "user"}], [], [{"role": "tool"}]],
}
SHAPES = {"tokens": np.int64, "reward": np.float64, "done": np.bool_}
INPUTS = {
    "lists": lambda: COLUMNS,
    "rows": lambda: [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)],
    "numpy": lambda: (
        COLUMNS
        | {"tokens": [np.array(row, np.int64) for row in COLUMNS["tokens"]]}
        | {name: np.array(COLUMNS[name], SHAPES[name]) for name in ("reward", "done")}
    ),
    "tensors": lambda: COLUMNS | {"tokens": [torch.tensor(row, dtype=torch.int64) for row in COLUMNS["tokens"]]},
    "Table": lambda: pa.table(COLUMNS),
    "RecordBatch": lambda: pa.RecordBatch.from_pydict(COLUMNS),
    "Dataset": lambda: datasets.Dataset.from_dict(COLUMNS),
    "slice of a Dataset": lambda: datasets.Dataset.from_dict(COLUMNS)[0:3],
    "DataFrame": lambda: pd.DataFrame(COLUMNS),
}


@pytest.fixture(scope="module", params=["noop", "shm_store"])
def config(request):
    return {"backend": request.param}


@pytest.fixture(scope="module")
def client(config):
    with connect(config) as opened:
        yield opened


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("call", ["put_samples", "kv_first_write", "write_columns"])
def test_each_kind_comes_back_as_numpy_and_as_arrow(client, call, kind):
    client.register_partition("train", list(COLUMNS), 3, ["trainer"])
    given = INPUTS[kind]()
    if call == "kv_first_write":
        kv_first_write(given, sample_ids=IDS, dp_client=client, partition_id="train")
    elif call == "write_columns":
        meta = client.put_samples(IDS, "train", {"first": [1, 2, 3]})
        write_columns(client, meta, given)
    else:
        client.put_samples(IDS, "train", given)
    meta = client.claim_meta("train", "trainer", list(COLUMNS), 3)
    read = client.get_data(meta)
    arrays = to_numpy(read)
    assert [row.tolist() for row in arrays["tokens"]] == COLUMNS["tokens"]
    assert {name: arrays[name].tolist() for name in COLUMNS if name != "tokens"} == {
        name: column for name, column in COLUMNS.items() if name != "tokens"
    }
    assert arrays["tokens"][0].dtype == np.int64
    assert arrays["done"].dtype == np.bool_
    table = to_arrow(read).select(list(COLUMNS))
    assert table.to_pydict() == COLUMNS
    assert table.schema.field("tokens").type == pa.large_list(pa.int64())


def test_the_client_of_an_event_loop_takes_the_same(client, config):
    async def main():
        async with await connect_async(config, bootstrap=config["backend"] == "noop") as client:  # else attaches
            await client.register_partition("loop", ["tokens"], 3, ["trainer"])
            await client.put_samples(IDS, "loop", pa.table(COLUMNS))
            with pytest.raises(TypeError, match="'tokens' is an Arrow column of numbers with nulls"):
                await client.put_samples(IDS, "loop", pa.table({"tokens": [[1], None, []]}))
            return to_arrow(await client.get_samples(IDS, "loop", ["tokens"]))

    assert asyncio.run(main()).to_pydict() == {"tokens": COLUMNS["tokens"]}


def test_arrays_may_be_changed_after_the_put(client):
    client.register_partition("changed", ["x"], None, ["trainer"])
    array, row = np.arange(3.0), np.arange(70_000)  # a large row is stored apart
    client.put_samples(IDS, "changed", {"x": array, "y": [row, row[:1], row]})
    array[:], row[:] = 0, 0
    read = to_numpy(client.get_samples(IDS, "changed", ["x", "y"]))
    assert read["x"].tolist() == [0, 1, 2]
    assert [each.sum() for each in read["y"]] == [sum(range(70_000)), 0, sum(range(70_000))]
