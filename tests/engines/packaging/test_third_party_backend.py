"""A backend of somebody else: its wheel beside core's in a clean environment, chosen by name, killed on the way."""

import json
import subprocess
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "third_party_sqlite"
NUM_SAMPLES = 40
IDS = [f"prompt{number // 2}_g{number % 2}" for number in range(NUM_SAMPLES)]

COMMON = """
import json, sys, time
import torch
from dataplane_core import connect

config, ids = {"backend": "sqlite_example", "options": {"path": sys.argv[1]}}, sys.argv[2:]

def put(client, first):
    rows = [torch.full((first + 1,), first), torch.arange(3)]
    client.put_samples(ids[first : first + 2], "train", {"tokens": rows, "reward": [float(first), first + 1.0]})
"""

# Registers, then puts two samples at a time and says so after each commit; never ends by itself.
PRODUCER = f"""{COMMON}
client = connect(config)
assert client.scope == "host" and "durable" in client.capabilities
client.register_partition("train", ["tokens", "reward"], len(ids), ["trainer"], grpo_group_size=2)
for first in range(0, 22, 2):
    put(client, first)
    print(first, flush=True)
while True:  # the next put, over and over: the kill comes in the middle of one
    put(client, 22)
"""

# Puts what the producer had not, takes eight samples on a lease, and hangs.
SUCCESSOR = f"""{COMMON}
client = connect(config, bootstrap=False)
there = client.list_samples("train").sample_ids
read = client.get_samples(ids[:22], "train", ["reward"])["reward"].tolist()
for first in range(22, len(ids), 2):
    put(client, first)
held = client.claim_meta("train", "trainer", ["tokens", "reward"], 8, lease_s=3.0)
print(json.dumps({{"there": there, "read": read, "held": held.sample_ids}}), flush=True)
time.sleep(600)
"""

# Consumes everything, what the killed process held included.
CONSUMER = f"""{COMMON}
import dataplane_core
from dataplane_core.entry_points import find_plugins

client = connect(config, bootstrap=False)
consumed = {{}}
while not client.check_consumption_status("train", ["trainer"]):
    meta = client.claim_meta("train", "trainer", ["tokens", "reward"], 8, lease_s=60.0, blocking=False)
    if meta.size:
        columns = client.get_data(meta)
        for sample_id, row, reward in zip(meta.sample_ids, columns["tokens"].unbind(), columns["reward"].tolist()):
            assert sample_id not in consumed
            consumed[sample_id] = [row.tolist(), reward]
        client.ack(meta)
found = {{each.name: each.distribution for each in find_plugins()}}
print(json.dumps([dataplane_core.__file__, found, consumed]))
"""


@pytest.fixture(scope="module")
def installed(clean, forked):
    """Python of the clean environment, with the example's wheel in it too."""
    clean.install(EXAMPLE)
    return forked


def test_a_job_across_processes_survives_two_kills(clean, installed, tmp_path):
    path = tmp_path / "run.sqlite"
    producer = installed.start("-c", PRODUCER, path, *IDS, stdout=subprocess.PIPE, text=True)
    with producer:
        said = [producer.stdout.readline().strip() for _ in range(11)]
        producer.kill()
    assert said == [str(number) for number in range(0, 22, 2)]

    successor = installed.start("-c", SUCCESSOR, path, *IDS, stdout=subprocess.PIPE, text=True)
    with successor:
        seen = json.loads(successor.stdout.readline())
        successor.kill()
    # what was committed is there whole; of the put that was cut, both samples are there or neither
    assert seen["there"] in (IDS[:22], IDS[:24])
    assert seen["read"] == [float(number) for number in range(22)]
    assert seen["held"] == IDS[:8]

    done = installed.run("-c", CONSUMER, path)
    core, found, consumed = json.loads(done.stdout)
    assert Path(core).is_relative_to(clean.folder)
    assert found["sqlite_example"] == "dataplane-sqlite-example"
    assert "noop" not in found
    assert sorted(consumed) == sorted(IDS)
    for number, sample_id in enumerate(IDS):
        tokens = [0, 1, 2] if number % 2 else [number] * (number + 1)
        assert consumed[sample_id] == [tokens, float(number)]


@pytest.mark.timeout(600)
def test_its_own_test_file_passes_the_whole_kit(installed, tmp_path):
    file = tmp_path / "test_conformance.py"
    file.write_text((EXAMPLE / "tests" / "test_conformance.py").read_text(encoding="utf-8"), encoding="utf-8")
    report = tmp_path / "report.json"
    words = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", tmp_path, "--dataplane-json", report, file]
    done = installed.run("-m", "pytest", *words, timeout=590, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (result,) = json.loads(report.read_text(encoding="utf-8"))
    assert result["counts"]["fail"] == 0
    assert result["counts"]["pass"] >= 90
