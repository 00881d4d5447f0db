"""`dataplane audit`: recordings of real clients, some with a fault in the run or in the files. Each fault is named."""

import argparse
import json
import shutil

import pytest
import torch

from dataplane_core import connect
from dataplane_tools.commands import audit


def recorded(folder, *, role="trainer", backend="noop", payload="all", **recorder):
    """A client that records."""
    middleware = [{"recorder": {"folder": str(folder), "payload": payload, **recorder}}]
    return connect({"backend": backend, "role": role, "middleware": middleware})


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
    """Runs the command. Returns its exit status and what it printed: the object, or the text if there is no ``--json``."""

    def run(*words):
        parser = argparse.ArgumentParser()
        status = audit(parser)(parser.parse_args([str(word) for word in words]))
        said = capsys.readouterr()
        if status == 2:
            return status, said.err
        return status, json.loads(said.out) if "--json" in words else said.out

    run.__dict__["wrong"] = lambda folder: {each["kind"]: each["text"] for each in run(folder, "--json")[1]["wrong"]}
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


def test_the_samples_of_a_step(tmp_path, look):
    train(tmp_path, [q(0), q(1)])
    status, text = look(tmp_path, "--step", 2)
    assert status == 0
    assert "step 2: 2 samples, loss 0.5" in text
    assert "q1_g0 of 'train', put by trainer (process " in text
    assert "    weight_version: 0\n    x: " in text
    assert "    reward: 1.0\n" in text
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
