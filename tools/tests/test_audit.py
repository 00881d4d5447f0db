"""`dataplane audit`: recordings of real clients, some with a fault in the run or in the files. Each fault is named.

One long file, since each fault is seeded in the same few runs, whose helpers stand at the top.
"""

import argparse
import json
import shutil

import pytest
import torch

from dataplane_core import connect
from dataplane_core.errors import LostSamplesError
from dataplane_core.middleware import OperationMiddleware, Recording
from dataplane_core.middleware.events import sealed, unsealed
from dataplane_tools import _audit as audit_module
from dataplane_tools._history import History
from dataplane_tools._survey import survey
from dataplane_tools.commands import audit


def recorded(folder, *, role="trainer", payload="all", bootstrap=True, max_bytes="1GB", inner=(), **config):
    """A client that records."""
    recorder = {"folder": str(folder), "payload": payload, "max_bytes": max_bytes}
    config = {"backend": "noop", "role": role, "middleware": [{"recorder": recorder}, *inner], **config}
    return connect(config, bootstrap=bootstrap)


def put(client, names, version=0, shift=0.0):
    """Puts groups of two samples."""
    ids = [f"{name}_g{member}" for name in names for member in range(2)]
    columns = {
        "x": torch.arange(3.0).repeat(len(ids), 1) + torch.arange(len(ids))[:, None] + version,
        "reward": torch.arange(float(len(ids))) + shift,
        "text": [f"an answer to {name}" for name in ids],
    }
    client.put_samples(ids, "train", columns, tags=[{"weight_version": version}] * len(ids))
    return ids


def step_on(client, number, count, loss=0.5):
    meta = client.claim_meta("train", "trainer", ["x", "reward"], count, lease_s=600.0)
    client.get_data(meta)
    client.ack(meta)
    client.mark_step(number, loss=loss)
    client.clear_samples(meta.sample_ids, "train")


def train(folder, groups, first_step=1, shift=0.0, **options):
    """A session of a run: a step for each list of prompts, on weights that are one step old from the second step on."""
    with recorded(folder, **options) as client:
        client.register_partition("train", ["x", "reward", "text"], None, ["trainer"], 2)
        for number, names in enumerate(groups, first_step):
            ids = put(client, names, version=max(0, number - 2), shift=shift)
            step_on(client, number, len(ids))


def q(*numbers):
    return [f"q{number}" for number in numbers]


@pytest.fixture
def look(capsys):
    """Runs the command. Returns its status and what it printed: an object for ``--json``, the error for status 2."""

    def run(*words):
        parser = argparse.ArgumentParser()
        status = audit(parser)(parser.parse_args([str(word) for word in words]))
        said = capsys.readouterr()
        if status == 2:
            return status, said.err
        return status, json.loads(said.out) if "--json" in words else said.out

    run.wrong = lambda folder: {each["kind"]: each["text"] for each in run(folder, "--json")[1]["wrong"]}
    return run


def test_a_healthy_run(tmp_path, look):
    train(tmp_path, [q(0, 1), q(2, 3), q(4, 5)])
    status, found = look(tmp_path, "--json")
    assert (status, found["wrong"], found["untrained"], found["lacks"], found["failures"]) == (0, [], [], [], [])
    assert (found["num_steps"], found["tasks"], found["latency"]["trainer"]["samples"]) == (3, ["trainer"], 12)
    steps = found["steps"]
    assert [each["samples"] for each in steps] == [4, 4, 4]
    assert [each["weight_versions"] for each in steps] == [[0, 0], [0, 0], [1, 1]]
    assert [each["values"] for each in steps] == [{"loss": 0.5}] * 3
    (writer,) = steps[0]["writers"]
    assert writer.startswith("trainer (process ")
    status, text = look(tmp_path)
    assert (status, text.splitlines()[-1]) == (0, "Nothing wrong was found.")


def test_which_clients_were_closed(tmp_path, look):
    for role in ("closed", "killed"):
        train(tmp_path, [q(0)], role=role)
    for path in tmp_path.glob("*-000000.jsonl"):
        lines = path.read_bytes().splitlines(keepends=True)
        if b'"role":"killed"' in lines[0]:
            path.write_bytes(b"".join(lines[:-1]))
    with recorded(tmp_path, role="open") as client:
        client.register_partition("other", ["x"], None, ["t"])
        clients = look(tmp_path, "--json")[1]["clients"]
        assert "not closed" in look(tmp_path)[1]
    states = {"closed": "closed", "killed": "not closed", "open": "open"}
    assert {each["role"]: each["state"] for each in clients} == states


def test_a_client_that_ends_or_goes_on_while_it_is_looked_at(tmp_path, look, monkeypatch):
    """Between the first reading of the recording and the report."""

    def meanwhile(recording, task):
        found = survey(recording, task)
        ending.close()
        for number in range(1500):
            going_on.put_samples([f"{number}-{place}" for place in range(20)], "p", {"x": torch.arange(20)})
        return found

    monkeypatch.setattr(audit_module, "survey", meanwhile)
    with recorded(tmp_path, role="ending") as ending, recorded(tmp_path, role="on", max_bytes=1 << 20) as going_on:
        for client in (ending, going_on):
            client.register_partition("p", ["x"], None, ["t"])
        clients = look(tmp_path, "--json")[1]["clients"]
        (writer,) = [each.client for each in Recording(tmp_path).writers if each.role == "on"]
        assert len([*tmp_path.glob(f"{writer}-*.jsonl")]) > 1, "it is in another segment"
        assert {each["role"]: each["state"] for each in clients} == {"ending": "open", "on": "open"}
        before = Recording(tmp_path)
        for number in range(1500):
            going_on.put_samples([f"{number}-{place}" for place in range(20)], "p", {"y": torch.arange(20)})
        assert before.is_open(writer)
    assert not before.is_open(writer)


def test_the_samples_of_a_step(tmp_path, look):
    train(tmp_path, [q(0), q(1)])
    status, text = look(tmp_path, "--step", 2)
    assert status == 0
    assert "step 2: 2 samples, loss 0.5" in text
    assert "q1_g0 of 'train', put by trainer (process " in text
    assert "    weight_version: 0\n    x: " in text
    assert "    reward: 1\n" in text
    assert "q0_g0" not in text
    status, text = look(tmp_path, "--step", 9)
    assert status == 2
    assert "no step 9" in text


def test_some_of_many_steps(tmp_path, look):
    train(tmp_path, [q(number) for number in range(50)])
    _, text = look(tmp_path)
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[2:13]] == [*map(str, range(1, 11)), "..."]
    assert [line.split()[0] for line in lines[13:43]] == [*map(str, range(21, 51))]
    _, text = look(tmp_path, "--steps", "12:13")
    assert [line.split()[0] for line in text.splitlines()[2:4]] == ["12", "13"]
    assert len(look(tmp_path, "--steps", "41:", "--json")[1]["steps"]) == 10
    assert look(tmp_path, "--steps", "x")[0] == 2


# --- a resume ---------------------------------------------------------------------------------------------------------


def test_a_resume_that_goes_on(tmp_path, look):
    train(tmp_path, [q(0, 1), q(2, 3)])
    train(tmp_path, [q(4, 5), q(6, 7)], first_step=3)
    status, found = look(tmp_path, "--json")
    assert (status, found["wrong"]) == (0, [])
    assert len(found["resumes"]) == 1
    assert "after step 2" in found["resumes"][0]


def test_a_resume_from_an_earlier_step_gives_its_prompts_again(tmp_path, look):
    train(tmp_path, [q(0, 1), q(2, 3), q(4, 5)])
    train(tmp_path, [q(4, 5), q(6, 7)], first_step=3)
    status, found = look(tmp_path, "--json")
    assert (status, found["wrong"]) == (0, [])
    assert [(each["step"], each["undone"]) for each in found["steps"]] == [(1, 0), (2, 0), (3, 1), (3, 0), (4, 0)]


def test_prompts_that_a_resume_skipped(tmp_path, look):
    train(tmp_path, [q(0, 1), q(2, 3)])
    train(tmp_path, [q(7, 8), q(9, 10)], first_step=3)
    wrong = look.wrong(tmp_path)
    assert wrong.keys() == {"skipped"}
    assert "3 prompts were skipped over the resume of trainer" in wrong["skipped"]
    assert "after step 2: q4 to q6" in wrong["skipped"]
    assert look(tmp_path)[0] == 1


def test_prompts_that_were_under_way_at_a_resume(tmp_path, look):
    """Rollouts end in any order: q5 was under way when the run ended, and was begun no more."""
    train(tmp_path, [q(1, 0), q(3, 2), q(4, 6)])
    train(tmp_path, [q(8, 7), q(9, 10)], first_step=4)
    assert "1 prompt was skipped over the resume of trainer" in look.wrong(tmp_path)["skipped"]
    assert "after step 3: q5." in look.wrong(tmp_path)["skipped"]


def test_numbers_that_are_missing_anyway_are_no_fault(tmp_path, look):
    train(tmp_path, [q(0, 1), q(2, 5), q(6, 7)])
    train(tmp_path, [q(10, 11), q(12, 13)], first_step=4)
    assert look.wrong(tmp_path) == {}


def test_numbers_that_jump_are_no_fault(tmp_path, look):
    train(tmp_path, [q(0, 1), q(2, 3)])
    train(tmp_path, [q(10**17, 10**17 + 1), q(10**17 + 2, 10**17 + 3)], first_step=3)
    assert look.wrong(tmp_path) == {}


def test_prompts_that_were_generated_before_a_resume_and_never_again(tmp_path, look):
    with recorded(tmp_path) as client:
        client.register_partition("train", ["x", "reward", "text"], None, ["trainer"], 2)
        put(client, q(0, 1, 2, 3))
        step_on(client, 1, 4)
    train(tmp_path, [q(4, 5), q(6, 7)], first_step=2)
    wrong = look.wrong(tmp_path)
    assert wrong.keys() == {"skipped"}
    assert "2 prompts were skipped over the resume of trainer" in wrong["skipped"]
    assert "after step 1: q2 to q3. They were put before it" in wrong["skipped"]


def test_prompts_of_a_step_that_was_undone_and_not_given_again(tmp_path, look):
    train(tmp_path, [q(0, 1), q(2, 3), q(4, 5)])
    train(tmp_path, [q(6, 7), q(8, 9)], first_step=3)
    wrong = look.wrong(tmp_path)
    assert wrong.keys() == {"skipped"}
    assert "after step 3: q4 to q5. They were put before it" in wrong["skipped"]


def test_a_step_that_a_resume_cut_off_does_not_count(tmp_path, look):
    """Its samples were acked, but no mark says that it ended. They are given again, rightly."""
    with recorded(tmp_path) as client:
        client.register_partition("train", ["x", "reward", "text"], None, ["trainer"], 2)
        put(client, q(0, 1, 2, 3))
        step_on(client, 1, 4)
        client.claim_meta("train", "trainer", ["x"], 4)
    train(tmp_path, [q(2, 3), q(4, 5)], first_step=2)
    status, found = look(tmp_path, "--json")
    assert (status, found["wrong"]) == (0, [])
    assert [(each["name"], each["undone"]) for each in found["steps"]] == [
        ("step 1", False),
        ("after step 1", True),
        ("step 2", False),
        ("step 3", False),
    ]


def test_how_stale_a_step_was(tmp_path, look):
    with recorded(tmp_path) as client:
        client.register_partition("train", ["x", "reward", "text"], None, ["trainer"], 2)
        for number, more in ((1, {}), (2, {"staleness": 5})):
            for version in (number, number + 2):
                put(client, q(10 * number + version), version=version)
            client.claim_meta("train", "trainer", ["x"], 4)
            client.mark_step(number, **more)
    steps = look(tmp_path, "--json")[1]["steps"]
    assert [each["weight_versions"] for each in steps] == [[1, 3], [2, 4]]
    assert [each["staleness"] for each in steps] == [[0, 2], [5, 5]]


def test_prompts_that_a_resume_gave_twice(tmp_path, look):
    train(tmp_path, [q(0, 1), q(2, 3)])
    train(tmp_path, [q(3, 4), q(5, 6)], first_step=3, shift=7.0)
    wrong = look.wrong(tmp_path)
    assert wrong.keys() == {"given twice"}
    assert "1 prompt was given twice over the resume of trainer" in wrong["given twice"]
    assert "'q3' was trained on in step 2 and in step 3" in wrong["given twice"]


def test_a_further_pass_over_all_prompts_is_no_fault(tmp_path, look):
    train(tmp_path, [q(0, 1), q(2, 3)])
    train(tmp_path, [q(0, 1), q(2, 3)], first_step=3, shift=7.0)
    assert look.wrong(tmp_path) == {}


def test_ids_that_every_step_uses_again_name_no_prompts(tmp_path, look):
    with recorded(tmp_path) as client:
        for number in (1, 2, 3):
            client.register_partition("train", ["x", "reward", "text"], None, ["trainer"], 2)
            put(client, q(0, 1), shift=number)
            step_on(client, number, 4)
    train(tmp_path, [q(1, 2)], first_step=4, shift=7.0)
    assert look.wrong(tmp_path) == {}


def test_prompts_that_a_tag_numbers(tmp_path, look):
    for first, numbers in ((1, (0, 1)), (3, (4, 5))):
        with recorded(tmp_path) as client:
            client.register_partition("train", ["x"], None, ["trainer"])
            for step, number in enumerate(numbers, first):
                client.put_samples([f"{number:x}f" * 16], "train", {"x": torch.zeros(1)}, tags=[{"prompt": number}])
                client.claim_meta("train", "trainer", ["x"], 1)
                client.mark_step(step)
    assert "prompt 2 to prompt 3" in look.wrong(tmp_path)["skipped"]


# --- samples ----------------------------------------------------------------------------------------------------------


def untrained(found):
    return {(each["reason"], each["count"], each["by"] and each["by"].split()[0]): each for each in found["untrained"]}


def test_samples_that_were_not_trained_on(tmp_path, look):
    """Each with what became of it, and by whom."""
    store = {"backend": "shm_store", "options": {"capacity_bytes": "10MB", "namespace": "audit"}}
    with (
        recorded(tmp_path, **store) as trainer,
        recorded(tmp_path, role="buffer", bootstrap=False, **store) as buffer,
    ):
        trainer.register_partition("train", ["x", "reward", "text"], None, ["trainer"])
        old, trained = put(buffer, q(0, 1), version=0), put(buffer, q(2), version=7)
        fresh = {"tag_filter": {"weight_version": (">=", 7)}}
        meta = trainer.claim_meta("train", "trainer", ["x", "reward"], 2, lease_s=600.0, **fresh)
        assert meta.sample_ids == trained
        trainer.get_data(meta)
        trainer.ack(meta)
        trainer.mark_step(1)
        put(buffer, q(3), version=7)
        buffer.clear_samples([*old[:3], "q3_g0"], "train")
        trainer.clear_samples(["q3_g1"], "train")
        put(buffer, q(4), version=7)
        leased = trainer.claim_meta("train", "trainer", ["x", "reward"], 1, lease_s=600.0, **fresh)
        buffer.clear_samples(leased.sample_ids, "train")
        buffer.put_samples(["half"], "train", {"x": torch.zeros(1, 3)})
        buffer.clear_samples(["half"], "train")
        dropped = trainer.claim_meta("train", "trainer", ["x"], 1, lease_s=600.0, tag_filter={"weight_version": 0})
        trainer.ack(dropped)
        trainer.clear_samples(dropped.sample_ids, "train")
        trainer.clear_samples(None, "train")
    status, found = look(tmp_path, "--json")
    assert (status, found["wrong"]) == (0, [])
    fates = untrained(found)
    assert fates.keys() == {
        ("filter", 3, "buffer"),
        ("evicted", 1, "buffer"),
        ("cleared by a consumer", 1, "trainer"),
        ("leased and not acked", 1, "buffer"),
        ("not ready: lacks reward", 1, "buffer"),
        ("dropped by its consumer", 1, "trainer"),
        ("end of the partition", 1, "trainer"),
    }
    evicted = fates["evicted", 1, "buffer"]
    assert (evicted["task"], evicted["last"], evicted["examples"]) == (
        "trainer",
        "put_samples",
        ["'q3_g0' of 'train' after step 1"],
    )
    assert "1 by 'trainer': evicted; cleared by buffer (process " in look(tmp_path)[1]
    assert [each["samples"] for each in found["steps"]] == [2]


def test_a_claim_that_got_nothing_tells_the_filter(tmp_path, look):
    """Such claims are recorded once, also if they come again."""
    with recorded(tmp_path) as client:
        client.register_partition("train", ["x", "reward", "text"], None, ["trainer"], 2)
        put(client, q(0), version=5)
        step_on(client, 1, 2)
        stale = [*put(client, q(1), version=1), *put(client, q(2), version=2)]
        client.clear_samples(stale, "train")

    def asked(lines):
        (claim,) = (each for each in lines if each["op"] == "claim")
        (first,) = (
            place for place, each in enumerate(lines) if "q1_g0" in each.get("ids", ()) and each["op"] == "put_samples"
        )
        nothing = {"ids": [], "tags": [], "rows": 0, "tag_filter": {"weight_version": [">=", 5]}}
        return [*lines[: first + 1], {**claim, **nothing, "at": lines[first]["at"]}, *lines[first + 1 :]]

    rewritten(tmp_path, asked)
    found = look(tmp_path, "--json")[1]
    assert [(each["reason"], each["count"]) for each in found["untrained"]] == [("filter", 4)]


class Loses(OperationMiddleware):
    """Reads fail as those of rows that the store has lost."""

    def around(self, operation, request):
        if operation == "get_samples":
            lost = [(name, ["x"]) for name in request.sample_ids]
            raise LostSamplesError.for_payload("get_samples('train')", request.partition_id, lost)
        return (yield)


def test_samples_that_the_store_lost(tmp_path, look):
    with recorded(tmp_path, inner=[Loses()]) as client:
        client.register_partition("train", ["x", "reward", "text"], None, ["trainer"], 2)
        put(client, q(0))
        meta = client.claim_meta("train", "trainer", ["x"], 2, lease_s=600.0)
        with pytest.raises(LostSamplesError):
            client.get_data(meta)
        client.clear_samples(meta.sample_ids, "train")
        client.mark_step(1)
    status, found = look(tmp_path, "--json")
    assert status == 1
    assert [each["kind"] for each in found["wrong"]] == ["lost"]
    assert "2 samples were lost by the store" in found["wrong"][0]["text"]
    assert found["failures"] == [{"operation": "get_samples", "error": "LostSamplesError", "count": 1}]


def test_a_sample_that_was_given_again_to_a_task(tmp_path, look):
    with recorded(tmp_path) as client:
        client.register_partition("train", ["x", "reward", "text"], None, ["trainer"], 2)
        put(client, q(0))
        for number in (1, 2):
            meta = client.claim_meta("train", "trainer", ["x"], 2)
            client.mark_step(number)
            client.reset_consumption("train", "trainer", [])
    status, found = look(tmp_path, "--json")
    assert status == 1
    assert [each["text"] for each in found["wrong"]] == [
        f"'{name}' was trained on twice: in step 1 and in step 2." for name in meta.sample_ids
    ]


def test_a_further_pass_without_a_resume_is_no_fault(tmp_path, look):
    """Also with the same ids, and for samples that are evaluated after each step."""
    with recorded(tmp_path) as client:
        client.register_partition("train", ["x", "reward", "text"], None, ["trainer"])
        client.register_partition("eval", ["x", "reward"], None, ["eval"])
        for number, names in enumerate([q(0), q(1), q(0), q(1)], 1):
            put(client, names)
            evaluated = ["a", "b"]
            client.put_samples(evaluated, "eval", {"x": torch.ones(2, 3)})
            client.put_samples(evaluated, "eval", {"reward": torch.full((2,), float(number))})
            client.claim_meta("eval", "eval", ["x", "reward"], 2)
            client.clear_samples(evaluated, "eval")
            step_on(client, number, 2)
    assert look.wrong(tmp_path) == {}


def test_samples_given_back_and_given_again_are_trained_on_once(tmp_path, look):
    with recorded(tmp_path) as client:
        client.register_partition("train", ["x", "reward", "text"], None, ["trainer"], 2)
        put(client, q(0))
        client.nack(client.claim_meta("train", "trainer", ["x"], 2, lease_s=600.0))
        meta = client.claim_meta("train", "trainer", ["x"], 2, lease_s=600.0)
        client.ack(meta)
        client.ack(meta)
        client.mark_step(1)
    status, found = look(tmp_path, "--json")
    assert (status, [each["samples"] for each in found["steps"]]) == (0, [2])


# --- batches without marks, reads without tasks -----------------------------------------------------------------------


def test_without_marks_the_batches_of_a_task_are_counted(tmp_path, look):
    with recorded(tmp_path) as client:
        client.register_partition("train", ["x", "reward", "text"], 8, ["trainer"])
        put(client, q(0, 1, 2, 3))
        for index in (0, 1):
            for rank in (1, 0):
                for _ in range(2):  # two processes of a rank
                    asked = {"dp_rank": rank, "dp_size": 2, "batch_index": index, "sampler": "balanced"}
                    client.claim_meta("train", "trainer", ["x"], 2, **asked)
    status, found = look(tmp_path, "--json")
    assert status == 0
    assert [(each["name"], each["samples"]) for each in found["steps"]] == [
        ("batch 1 of 'trainer'", 4),
        ("batch 2 of 'trainer'", 4),
    ]
    assert "No step is marked" in found["lacks"][0]


def test_without_tasks_a_step_is_of_what_was_read(tmp_path, look):
    with recorded(tmp_path) as client:
        client.register_partition("train", ["x", "reward", "text"], None, [])
        ids = put(client, q(0, 1, 2))
        for number, place in enumerate((0, 2), 1):
            client.get_samples(ids[place : place + 2], "train", ["x"])
            client.mark_step(number)
        client.clear_samples(None, "train")
    status, found = look(tmp_path, "--json")
    assert (status, [each["samples"] for each in found["steps"]]) == (0, [2, 2])
    assert [(each["reason"], each["count"]) for each in found["untrained"]] == [("end of the partition", 2)]


def test_without_tasks_a_driver_that_reads_at_the_end_does_not_train_in_place_of_its_workers(tmp_path, look):
    store = {"backend": "shm_store", "options": {"capacity_bytes": "10MB", "namespace": "audit"}}
    with (
        recorded(tmp_path, role="driver", **store) as driver,
        recorded(tmp_path, role="worker", bootstrap=False, **store) as worker,
    ):
        for step in (1, 2, 3):
            driver.register_partition("train", ["x", "reward", "text"], None, [])
            ids = put(driver, q(2 * step, 2 * step + 1))
            worker.get_samples(ids, "train", ["x"])
            if step == 3:
                driver.get_samples(ids, "train", ["text"])
            driver.mark_step(step)
            driver.clear_samples(None, "train")
    found = look(tmp_path, "--json")[1]
    assert [each["samples"] for each in found["steps"]] == [4, 4, 4]
    assert found["untrained"] == []


def test_without_tasks_only_what_the_trainer_read_is_of_a_step(tmp_path, look):
    store = {"backend": "shm_store", "options": {"capacity_bytes": "10MB", "namespace": "audit"}}
    with (
        recorded(tmp_path, **store) as trainer,
        recorded(tmp_path, role="reward", bootstrap=False, **store) as reward,
    ):
        trainer.register_partition("train", ["x", "reward", "text"], None, [])
        ids = put(trainer, q(0, 1))
        reward.get_samples(ids, "train", ["x"])
        trainer.get_samples(ids[:2], "train", ["x"])
        trainer.mark_step(1)
        trainer.clear_samples(ids, "train")
    found = look(tmp_path, "--json")[1]
    assert [each["samples"] for each in found["steps"]] == [2]
    assert [(each["reason"], each["count"]) for each in found["untrained"]] == [("cleared without a read", 2)]


# --- damage -----------------------------------------------------------------------------------------------------------


def test_weights_are_no_samples(tmp_path, look):
    """As `publish_weights` writes them, and a `WeightReader` reads them."""
    with recorded(tmp_path) as client:
        client.register_partition("train", ["x", "reward", "text"], None, ["trainer"], 2)
        client.register_partition("weights", ["w"], None, [])
        for number in (1, 2):
            tags = [{"weight_version": number, "weight_anchor": number}]
            client.put_samples([f"v{number}"], "weights", {"w": torch.ones(1, 3)}, tags=tags)
            client.get_samples([f"v{number}"], "weights", ["w"])
            step_on(client, number, len(put(client, q(number))))
    _, found = look(tmp_path, "--json")
    assert [each["samples"] for each in found["steps"]] == [2, 2]
    assert (found["wrong"], found["untrained"]) == ([], [])


def test_a_flipped_byte_of_the_rows(tmp_path, look):
    train(tmp_path, [q(0, 1), q(2, 3)])
    (path,) = tmp_path.glob("*.rows")
    data = bytearray(path.read_bytes())
    data[data.rindex(b"an answer to q3") + 3] ^= 1
    path.write_bytes(data)
    status, found = look(tmp_path, "--json")
    assert status == 1
    (wrong,) = found["wrong"]
    assert (wrong["kind"], wrong["sample"], wrong["column"], wrong["step"]) == ("damaged", "q3_g1", "text", "step 2")
    for options in ((), ("--step", 1)):
        assert "the rows of 'q3_g1' are damaged: column 'text', put by trainer (process" in look(tmp_path, *options)[1]


def test_rows_that_are_damaged_beyond_reading(tmp_path, look):
    train(tmp_path, [q(0), q(1)])
    (path,) = tmp_path.glob("*.rows")
    data = bytearray(path.read_bytes())
    data[8:20] = bytes(12)
    path.write_bytes(data)
    found = look(tmp_path, "--json")[1]
    assert [(each["sample"], each["column"], each["step"]) for each in found["wrong"]] == [
        ("q0_g0", "", "step 1"),
        ("q0_g1", "", "step 1"),
    ]


def test_a_flipped_byte_of_the_lines(tmp_path, look):
    train(tmp_path, [q(0), q(1)])
    (path,) = tmp_path.glob("*-000000.jsonl")
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"q1_g0"', b'"q1_g3"', 1))
    status, said = look(tmp_path)
    assert status == 2
    assert f"line 9 of segment {path.stem}" in said
    assert "after step 1" in said


def test_a_writer_that_was_killed(tmp_path, look):
    train(tmp_path, [q(0), q(1)])
    (path,) = tmp_path.glob("*-000000.jsonl")
    path.write_bytes(path.read_bytes()[:-40])
    status, found = look(tmp_path, "--json")
    assert (status, found["num_steps"]) == (0, 2)
    assert "is cut off, as a killed process leaves it" in found["lacks"][-1]


def test_recordings_that_cannot_be_read(tmp_path, look):
    assert look(tmp_path / "none")[0] == 2
    train(tmp_path, [q(0)])
    copy = shutil.copytree(tmp_path, tmp_path / "copy")
    mark = copy / "recording.json"
    mark.write_text(mark.read_text().replace('"version": 2', '"version": 9'))
    status, said = look(copy)
    assert status == 2
    assert "is of format version 9" in said
    (segment,) = tmp_path.glob("*-000000.jsonl")
    segment.rename(tmp_path / segment.name.replace("-000000", "-000001"))
    status, said = look(tmp_path)
    assert status == 2
    assert f"lacks its segment {segment.stem}" in said


def rewritten(folder, change):
    """Changes the lines of a recording, and seals them again."""
    for path in folder.glob("*-*.jsonl"):
        lines = [json.loads(unsealed(line)) for line in path.read_bytes().splitlines()]
        changed = [sealed(json.dumps(each, separators=(",", ":")).encode()) for each in change(lines)]
        path.write_bytes(b"".join(line + b"\n" for line in changed))


def test_resumes_are_not_judged_where_lines_were_lost(tmp_path, look):
    train(tmp_path, [q(0, 1), q(2, 3)])
    train(tmp_path, [q(7, 8), q(9, 10)], first_step=3)
    assert look.wrong(tmp_path).keys() == {"skipped"}
    rewritten(tmp_path, lambda lines: [*lines, {**lines[-1], "op": "lost", "lines": 3, "ids": []}])
    status, found = look(tmp_path, "--json")
    assert (status, found["wrong"]) == (0, [])
    assert any("could not write 3 lines: a full disk" in each for each in found["lacks"])


def test_a_put_that_is_recorded_after_others_trained_on_it(tmp_path, look):
    """The reply of a put may come late: others have claimed, acked and cleared its samples by then."""
    store = {"backend": "shm_store", "options": {"capacity_bytes": "10MB", "namespace": "audit"}}
    with (
        recorded(tmp_path, **store) as trainer,
        recorded(tmp_path, role="rollout", bootstrap=False, **store) as rollout,
    ):
        trainer.register_partition("train", ["x", "reward", "text"], None, ["trainer"], 2)
        put(rollout, q(0))
        step_on(trainer, 1, 2)

    def later(lines):
        puts = [each for each in lines if each["op"] == "put_samples"]
        for each in puts:
            each["at"], each["seconds"] = each["at"] + 600.0, each["seconds"] + 600.0
        return lines

    rewritten(tmp_path, later)
    status, found = look(tmp_path, "--json")
    assert (status, found["wrong"], found["untrained"]) == (0, [], [])
    assert [each["samples"] for each in found["steps"]] == [2]


@pytest.mark.parametrize("skew", [0.5, -0.5, 90.0, -90.0])  # seconds
def test_hosts_whose_clocks_differ_are_not_accused(tmp_path, look, skew):
    for first in (1, 4):
        store = {"backend": "shm_store", "options": {"capacity_bytes": "10MB", "namespace": "audit"}}
        with (
            recorded(tmp_path, **store) as trainer,
            recorded(tmp_path, role="rollout", bootstrap=False, **store) as rollout,
        ):
            trainer.register_partition("train", ["x", "reward", "text"], None, ["trainer"], 2)
            for number in range(first, first + 3):
                put(rollout, q(number))
                step_on(trainer, number, 2)

    def later(lines):
        if lines[0]["role"] == "rollout":
            for each in lines:
                each["at"] += skew
        return lines

    rewritten(tmp_path, later)
    status, found = look(tmp_path, "--json")
    assert (status, found["wrong"]) == (0, [])
    assert [each["samples"] for each in found["steps"]] == [2] * 6
    assert any("the clocks of hosts differ" in each for each in found["lacks"]) == (skew > 1)
    assert skew < 1 or found["untrained"] == []


def test_a_trainer_whose_clock_is_ahead_is_not_said_to_have_trained_on_nothing(tmp_path, look):
    with recorded(tmp_path) as trainer:
        trainer.register_partition("train", ["x", "reward", "text"], None, ["trainer"], 2)
        put(trainer, q(0))
        meta = trainer.claim_meta("train", "trainer", ["x"], 2)
        trainer.mark_step(1)
        trainer.clear_samples(None, "train")

    def cleared_early(lines):
        order = ["", "begin", "register_partition", "put_samples", "clear_samples", "claim", "step", "end"]
        lines.sort(key=lambda line: order.index(line["op"]))
        return [{**line, "at": lines[0]["at"] + place} for place, line in enumerate(lines)]

    rewritten(tmp_path, cleared_early)
    status, found = look(tmp_path, "--json")
    assert (status, found["wrong"], found["untrained"]) == (0, [], [])
    assert [each["samples"] for each in found["steps"]] == [meta.size]
    assert any("the clocks of hosts differ" in each for each in found["lacks"])


def test_what_is_written_while_it_is_read_is_left_out(tmp_path):
    with recorded(tmp_path) as trainer, recorded(tmp_path, role="rollout") as rollout:
        trainer.register_partition("train", ["x", "reward", "text"], None, ["trainer"], 2)
        put(trainer, q(0))
        step_on(trainer, 1, 2)
        recording = Recording(tmp_path)
        found = survey(recording)
        put(trainer, q(1))
        step_on(trainer, 2, 2)
        rollout.register_partition("train", ["x", "reward", "text"], None, ["trainer"], 2)
        ids = put(rollout, q(2))
        rollout.clear_samples(ids, "train")
        history = History(recording, found)
        assert [each.number for each in history.steps()] == [1]
        assert history.untrained == {}


def test_a_recording_of_nothing(tmp_path, look):
    recorded(tmp_path).close()
    status, found = look(tmp_path, "--json")
    assert (status, found["num_steps"], found["lacks"]) == (0, 0, ["It has no operation."])
    assert look(tmp_path)[0] == 0
    assert look(tmp_path, tmp_path)[0] == 0


def test_what_was_deleted_is_not_judged(tmp_path, look):
    train(tmp_path, [q(number) for number in range(60)], max_bytes="65536")
    train(tmp_path, [q(number) for number in range(70, 72)], first_step=61)
    assert look.wrong(tmp_path).keys() == {"skipped"}
    train(tmp_path, [q(number) for number in range(90, 300)], first_step=63, max_bytes="65536")
    status, found = look(tmp_path, "--json")
    assert (status, found["wrong"]) == (0, [])
    assert any("were deleted to keep max_bytes" in each for each in found["lacks"])


# --- two recordings ---------------------------------------------------------------------------------------------------


def test_two_runs_that_are_equal(tmp_path, look):
    train(tmp_path / "a", [q(0, 1), q(2, 3)])
    train(tmp_path / "b", [q(0, 1), q(2, 3), q(4)])
    train(tmp_path / "b", [q(4, 5)], first_step=3)
    train(tmp_path / "a", [q(4, 5)], first_step=3)
    status, text = look(tmp_path / "a", tmp_path / "b")
    assert status == 0
    assert "3 steps are equal\nThey do not differ." in text


def test_the_first_step_and_column_in_which_two_runs_differ(tmp_path, look):
    for name, change in (("a", 0.0), ("b", 0.5)):
        with recorded(tmp_path / name, payload="digests") as client:
            client.register_partition("train", ["x", "reward", "text"], None, ["trainer"], 2)
            for number in (1, 2, 3):
                ids = put(client, q(number), shift=change if number == 3 else 0.0)
                if number == 3:
                    client.put_samples(ids, "train", {"advantage": torch.ones(2, 4) + change})
                step_on(client, number, 2, loss=1.0 + (change if number > 1 else 0.0))
    status, found = look(tmp_path / "a", tmp_path / "b", "--json")
    assert (status, found["equal_steps"]) == (1, 1)
    value, column = found["found"]
    assert (value["kind"], value["step"], value["values"]) == ("value", "step 2", [1.0, 1.5])
    assert (column["step"], column["column"], column["sample"]) == ("step 3", "reward", "q3_g0")
    assert column["values"] == ["0", "0.5"]
    assert column["counts"] == {"reward": 2, "advantage": 2}
    assert "step 3, column 'reward' of sample 'q3_g0': 0 and 0.5" in look(tmp_path / "a", tmp_path / "b")[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2, 2, 3), torch.zeros(2, 3, 2)),
        (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int32)),
        (torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.uint8)),
    ],
    ids=["shape", "dtype", "scalars"],
)
def test_two_runs_whose_cells_have_the_same_bytes_and_another_type(tmp_path, look, one, other):
    for name, column in (("a", one), ("b", other)):
        with recorded(tmp_path / name) as client:
            client.register_partition("train", ["x"], None, ["trainer"])
            client.put_samples(["q0_g0", "q0_g1"], "train", {"x": column})
            client.claim_meta("train", "trainer", ["x"], 2)
            client.mark_step(1)
    (found,) = look(tmp_path / "a", tmp_path / "b", "--json")[1]["found"]
    assert (found["kind"], found["column"], found["counts"]) == ("column", "x", {"x": 2})
    assert found["values"][0] != found["values"][1]


def test_two_runs_whose_steps_are_of_different_samples(tmp_path, look):
    train(tmp_path / "a", [q(0), q(1, 2), q(3)])
    train(tmp_path / "b", [q(0), q(1, 9), q(3)])
    status, found = look(tmp_path / "a", tmp_path / "b", "--json")
    assert status == 1
    assert [(each["step"], each["kind"], each["samples"]) for each in found["found"]] == [
        ("step 2", "samples", ["q2_g0", "q9_g0"])
    ]


def test_two_runs_with_ids_of_their_own_are_compared_by_place(tmp_path, look):
    train(tmp_path / "a", [["a1", "a2"], ["a3"]])
    train(tmp_path / "b", [["b1", "b2"], ["b3"]])
    (found,) = look(tmp_path / "a", tmp_path / "b", "--json")[1]["found"]
    assert (found["step"], found["column"], found["counts"]) == ("step 1", "text", {"text": 4})


def test_a_run_that_begins_at_a_later_step(tmp_path, look):
    for name, first, shift in (("a", 1, 0.0), ("b", 300, 0.0), ("c", 300, 0.5)):
        with recorded(tmp_path / name) as client:
            client.register_partition("train", ["x"], None, ["trainer"])
            for number in range(first, 302):
                client.put_samples([f"q{number}"], "train", {"x": torch.full((1,), number + shift)})
                client.claim_meta("train", "trainer", ["x"], 1)
                client.mark_step(number)
                client.clear_samples([f"q{number}"], "train")
    for pair, late in ((("a", "b"), "second"), (("b", "a"), "first")):
        status, found = look(*(tmp_path / each for each in pair), "--json")
        assert (status, found["equal_steps"], found["found"]) == (0, 2, [])
        assert f"The {late} recording begins at step 300" in found["begins"][0]
    status, found = look(tmp_path / "c", tmp_path / "a", "--json")
    assert (status, [(each["step"], each["column"]) for each in found["found"]]) == (1, [("step 300", "x")])


def test_two_runs_without_a_step_in_common(tmp_path, look):
    train(tmp_path / "a", [q(0)])
    train(tmp_path / "b", [q(9)], first_step=7)
    for pair, where in ((("a", "b"), "first"), (("b", "a"), "second")):
        status, text = look(*(tmp_path / each for each in pair))
        assert status == 1
        assert f"step 1 is in the {where} recording only" in text


def test_what_two_recordings_lack_is_said(tmp_path, look):
    train(tmp_path / "a", [q(0)])
    train(tmp_path / "b", [q(0)], payload="none")
    _, text = look(tmp_path / "a", tmp_path / "b")
    assert "The second recording: No digests were recorded by trainer" in text


def test_a_run_that_ended_earlier(tmp_path, look):
    train(tmp_path / "a", [q(0)])
    train(tmp_path / "b", [q(0), q(1)])
    status, text = look(tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert "step 2 is in the second recording only" in text


# --- several processes ------------------------------------------------------------------------------------------------

ROLLOUT = """
for place in range({first}, {last}):
    ids = [f"q{{place}}_g{{member}}" for member in range(2)]
    client.put_samples(ids, "train", {{"x": [[1.0, 2.0], [3.0]]}}, tags=[{{"weight_version": place // 4}}] * 2)
"""

REWARD = """
while True:
    meta = client.claim_meta("train", "reward", ["x"], 2, timeout_s=600.0, lease_s=600.0)
    if not meta.size:
        break
    rows = client.get_data(meta)
    client.put_samples(meta.sample_ids, "train", {"reward": [1.0] * meta.size})
    client.ack(meta)
"""


def test_a_run_of_several_processes(tmp_path, look, python):
    """Two rollouts and a reward process, all on one store; the trainer marks the steps."""
    recording = tmp_path / "recording"
    config = {
        "backend": "shm_store",
        "options": {"capacity_bytes": "50MB", "namespace": "audit"},
        "middleware": [{"recorder": {"folder": str(recording)}}],
    }
    begin = "from dataplane_core import connect\nclient = connect({!r} | {{'role': {!r}}}, bootstrap=False)\n"
    with connect(config | {"role": "trainer"}) as client:
        client.register_partition("train", ["x", "reward"], 32, ["reward", "trainer"], 2)
        others = [
            python.start("-c", begin.format(config, role) + code + "\nclient.close()")
            for role, code in (
                ("rollout", ROLLOUT.format(first=0, last=8)),
                ("rollout", ROLLOUT.format(first=8, last=16)),
                ("reward", REWARD),
            )
        ]
        for number in range(1, 5):
            meta = client.claim_meta("train", "trainer", ["x", "reward"], 8, timeout_s=300.0, lease_s=600.0)
            client.get_data(meta)
            client.ack(meta)
            client.mark_step(number)
        assert [process.wait(timeout=300) for process in others] == [0, 0, 0]
        client.clear_samples(None, "train")
    status, found = look(recording, "--json")
    assert (status, found["wrong"], found["untrained"], found["tasks"]) == (0, [], [], ["trainer"])
    assert [each["samples"] for each in found["steps"]] == [8] * 4
    assert sorted(each["role"] for each in found["clients"]) == ["reward", "rollout", "rollout", "trainer"]
    assert {name.split()[0] for each in found["steps"] for name in each["writers"]} == {"rollout"}
    assert {name: each["samples"] for name, each in found["latency"].items()} == {"reward": 32, "trainer": 32}
    cells = look(recording, "--step", 1, "--json")[1]["steps"][0]["rows"][0]["cells"]
    assert (cells["x"]["writer"].split()[0], cells["reward"]["writer"].split()[0]) == ("rollout", "reward")
    assert cells["reward"]["value"] == "1"
