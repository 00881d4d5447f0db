"""NeMo Gym's own tests of its token capture, over our store.

``NEMO_GYM_CHECKOUT`` names a checkout (`scripts/checkout.sh` gets one), ``NEMO_GYM_PYTHON`` a Python that can
import both it and dataplane; without it, this one. See docs/trainers.md.
"""

import json
import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest

CHECKOUT = os.environ.get("NEMO_GYM_CHECKOUT")
PYTHON = os.environ.get("NEMO_GYM_PYTHON", sys.executable)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHECKOUT is None, reason="NEMO_GYM_CHECKOUT names no checkout of NeMo Gym"),
]


def run(*arguments, timeout_s, **environment):
    """Python with NeMo Gym, dataplane and the folder of this file on its path, in the checkout's folder."""
    paths = [CHECKOUT, os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [PYTHON, *arguments], cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=timeout_s
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["noop", "shm_store", "redis_store", "tq_simple", "tq_mooncake"])
def test_nemo_gyms_own_tests_pass_over_our_store(tmp_path, backend):
    report = tmp_path / "report.xml"
    suite = ["-m", "pytest", "-q", "-o", "addopts=", "-p", "nemo_gym_suite", "-p", "no:cacheprovider"]
    files = [f"tests/unit_tests/{name}.py" for name in ("test_token_id_capture", "test_trajectory_builder")]
    config = json.dumps({"backend": backend})
    arguments = [*suite, "--confcutdir=tests/unit_tests", *files, f"--junitxml={report}"]
    done = run(*arguments, timeout_s=880, DATAPLANE_SUITE_CONFIG=config)
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    (results,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(results.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    print(backend, counts, done.stdout.splitlines()[-1])
    assert counts["failures"] == counts["errors"] == 0, done.stdout[-6000:]
    assert counts["tests"] - counts["skipped"] >= 97


NAMES = """
import asyncio, dataclasses, inspect
from nemo_gym import token_id_capture as theirs
from dataplane_compat.nemo_gym import DataPlaneTokenStore

assert theirs.TOKEN_ENTRY_RECORD_SCHEMA_VERSION == 1
assert list(theirs.TokenEntry.model_fields) == [
    "schema_version", "rollout_id", "model_call_id", "model", "prompt_token_ids", "generation_token_ids",
    "generation_log_probs", "routed_experts", "output_items", "token_item_index", "created_at",
]
names = [each.name for each in dataclasses.fields(theirs.TokenCaptureSnapshot)]
assert names == ["rollout_id", "entries", "incomplete", "snapshot_id", "version"]

def parameters(function):
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]

for protocol, methods in {theirs.TokenSink: {"put", "mark_incomplete", "close"},
                          theirs.TokenSource: {"freeze", "drop", "close"}}.items():
    assert {name for name in vars(protocol) if inspect.iscoroutinefunction(getattr(protocol, name))} == methods
    for name in methods:
        assert parameters(getattr(DataPlaneTokenStore, name)) == parameters(getattr(protocol, name)), name
begin_call = parameters(theirs.TokenCaptureStore.begin_call)
assert parameters(DataPlaneTokenStore.begin_call) == begin_call

import nemo_gym_suite  # before Python 3.12, protocols get what the config asks for

block = {
    "enabled": True, "rebuild_response": False, "sink": "dataplane_compat.nemo_gym:DataPlaneTokenStore",
    "sink_kwargs": {"config": {"backend": "noop"}, "bootstrap": True},
}
sink = theirs.TokenIdCaptureConfig.model_validate({"token_id_capture": block}).build_sink()
assert isinstance(sink, theirs.TokenSource)

async def main():
    message = {"type": "message", "role": "assistant", "content": [], "prompt_token_ids": [1, 2],
               "generation_token_ids": [3], "generation_log_probs": [-0.5]}
    theirs.set_token_sink(theirs.CaptureContext(rollout_id="r", model_call_id="c", token_sink=sink))
    await theirs.register_call_intent()
    await theirs.capture_tokens({"output": [message]})
    built = await theirs.trajectories_from_source("r", sink)
    await sink.close()
    return built["rebuilt_response"]["output"], built["mask_sample"]

((item,), masked) = asyncio.run(main())
assert (item["prompt_token_ids"], item["generation_token_ids"], masked) == ([1, 2], [3], False)
print("as expected")
"""


def test_nemo_gyms_names_are_those_that_the_adapter_uses():
    """And its config makes our sink, into which its capture writes, and from which its builder reads."""
    done = run("-c", NAMES, timeout_s=240, DATAPLANE_SUITE_CONFIG='{"backend": "noop"}')
    assert done.stdout.splitlines()[-1:] == ["as expected"], done.stderr[-3000:]
