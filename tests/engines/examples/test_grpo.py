"""`examples/grpo.py`: as a program, bit for bit as without a data plane, and recorded and run again."""

import json
import re
import subprocess
import sys

import grpo
import pytest
from grpo_runs import EXAMPLES, STEPS, plane_of, run_in_memory, run_over
from megatron_grpo import MegatronWorker
from tiers import in_long

from dataplane_core import connect
from dataplane_integrations.rollout import RolloutReceipt, mint_sample_ids
from dataplane_integrations.trainer import Batching, SequencePacking
from dataplane_observe import Recording

pytestmark = pytest.mark.timeout(540)

PACKING = SequencePacking(train_mb_tokens=1024, sequence_length_pad_multiple=4)


@pytest.fixture(scope="module")
def in_memory(ray_address, tmp_path_factory):
    """The results of a run without a data plane: what others are compared with."""
    return run_in_memory(tmp_path_factory.mktemp("in-memory"))


@pytest.fixture(scope="module")
def recording(ray_address, tmp_path_factory):
    """The folder of a recorded run, and its results."""
    folder = tmp_path_factory.mktemp("recorded")
    recorder = {"recorder": {"folder": str(folder / "recording"), "payload": "all"}}
    plane = {**plane_of("shm_store", folder), "middleware": [recorder]}

    def on_step(policy, record):
        policy.client.mark_step(record["step"], loss=record["loss"])

    return folder / "recording", run_over(plane, folder, on_step=on_step)


def test_a_run_trains_with_the_newest_weights(in_memory):
    assert [record["step"] for record in in_memory] == [1, 2, 3]
    for record in in_memory:
        assert 0.0 < record["reward"] < 1.0
        assert record["generation_logprob_error"] < 1e-5
        assert record["grad_norm"] > 0
    assert in_memory[0]["kl"] == 0.0  # the policy still is the reference
    assert in_memory[-1]["kl"] > 0.0


def test_a_recorded_run_over_shm_store_equals_the_run_in_memory_bit_for_bit(in_memory, recording):
    assert recording[1] == in_memory


@pytest.mark.parametrize("backend", in_long("tq_simple", "redis_store", "tq_mooncake"))
def test_a_run_over_a_backend_equals_the_run_in_memory_bit_for_bit(in_memory, tmp_path, backend):
    assert run_over(plane_of(backend, tmp_path), tmp_path) == in_memory


@pytest.mark.parametrize(
    ("tensor_parallel", "packed", "backend"),
    [(2, True, "shm_store"), *in_long((1, False, "redis_store"), (2, False, "tq_mooncake"), (1, True, "tq_simple"))],
)
def test_megatron_workers_train_as_fsdp2_does_but_for_rounding(in_memory, tmp_path, tensor_parallel, packed, backend):
    batching = Batching(packing=PACKING) if packed else grpo.BATCHING
    options = {"arguments": (tensor_parallel, packed), "dp_ranks": [0, 0] if tensor_parallel == 2 else [0, 1]}
    results = run_over(plane_of(backend, tmp_path), tmp_path, worker=MegatronWorker, batching=batching, **options)
    assert len(results) == STEPS
    for expected, record in zip(in_memory, results, strict=True):
        assert (record["reward"], record["tokens"]) == (expected["reward"], expected["tokens"])
        for name in ("loss", "grad_norm", "kl"):
            assert record[name] == pytest.approx(expected[name], abs=1e-5), name
        assert record["generation_logprob_error"] < 1e-5


class RecordedRollout(grpo.RolloutWorker):
    """Generates nothing to train on: the rows that it would write are in the recording."""

    def rollout(self, step, prompts, partition):
        ids = mint_sample_ids([f"s{step}_p{number}" for number in range(len(prompts))], grpo.ANSWERS_PER_PROMPT)
        meta = self._require_dp_client().list_samples(partition, sample_ids=ids)
        rows = self._require_dp_client().get_data(meta, ["reward", "input_lengths"])
        return RolloutReceipt(meta=meta, carry={name: rows[name].tolist() for name in ("reward", "input_lengths")})


def test_a_replay_gives_the_losses_of_the_run_bit_for_bit(recording, tmp_path):
    folder, results = recording
    plane = {"backend": "recording", "options": {"folder": str(folder)}}
    assert run_over(plane, tmp_path, rollout=RecordedRollout) == results
    losses = [record.values["loss"] for record in Recording(folder).records() if record.op == "step"]
    assert losses == [record["loss"] for record in results]
    assert len(losses) == STEPS


def test_the_program_leaves_its_metrics_a_picture_a_recording_and_the_last_rows(tmp_path):
    command = [sys.executable, EXAMPLES / "grpo.py", "--steps", "2", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^step +(\d+)/2  reward ", done.stdout, re.MULTILINE) == ["1", "2"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    steps = [record for record in Recording(tmp_path / "events").records() if record.op == "step"]
    assert [record.step for record in steps] == [1, 2]
    with connect({"backend": "noop"}) as client:
        client.load(tmp_path / "last_step")
        assert client.list_samples("train").size == grpo.PROMPTS_PER_STEP * grpo.ANSWERS_PER_PROMPT


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("steps", in_long("150"))
def test_a_whole_run_learns(tmp_path, steps):
    subprocess.run([sys.executable, EXAMPLES / "grpo.py", "--out", tmp_path, "--steps", steps], check=True)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["exact"] >= 0.9
