"""Stores of NeMo Gym's token calls over a stand-in for its records: the fixtures that tests of them share."""

import asyncio
import sys
from pathlib import Path

import pytest
from tiers import in_long

from dataplane_compat.nemo_gym import DataPlaneTokenStore
from dataplane_core import connect

STAND_IN = str(Path(__file__).parent / "nemo_gym_stand_in")
#: Backends that are only tried in `make test-long`.
OTHERS = ("redis_store", "tq_simple", "tq_mooncake")


@pytest.fixture(autouse=True)
def nemo_gym(monkeypatch):
    """The stand-in, importable."""
    monkeypatch.syspath_prepend(STAND_IN)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_gym"]:
        del sys.modules[name]


@pytest.fixture(scope="module", params=["noop", *in_long("shm_store", *OTHERS)])
def config(request):
    """The config of a store that runs."""
    config = {"backend": request.param, "op_timeout_s": 120}
    if request.param == "noop":
        yield config
        return
    if request.param.startswith("tq_"):
        config["options"] = {"ray_address": request.getfixturevalue("ray_address")}  # for the processes of the tests
    with connect(config):
        yield config


@pytest.fixture
def open_store(config, request):
    """Opens further stores of the same test. On noop, which has no second client, all are one."""
    made = []

    def open_store(**options):
        if config["backend"] != "noop" or not made:
            bootstrap = config["backend"] == "noop"
            made.append(DataPlaneTokenStore(config, partition=request.node.name, bootstrap=bootstrap, **options))
        return made[-1]

    yield open_store
    for store in made:
        asyncio.run(store.close())


@pytest.fixture
def store(open_store):
    return open_store()


def entry(call_id, *, rollout_id="r", prompt=(1, 2, 3), ids=(4, 5), **others):
    from nemo_gym.token_id_capture import TokenEntry

    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=call_id,
        prompt_token_ids=list(prompt),
        generation_token_ids=list(ids),
        generation_log_probs=[-0.1 * each for each in range(len(ids))],
        **others,
    )


def call_ids(snapshot):
    return [each.model_call_id for each in snapshot.entries]
