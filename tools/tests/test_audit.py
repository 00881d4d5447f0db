"""`dataplane audit`: recordings of real clients, some with a fault in the run or in the files. Each fault is named."""

import json
import shutil
from contextlib import ExitStack, contextmanager

import pytest
import torch
from contents import recording, run
from one_store import joined

from dataplane_core import connect
from dataplane_core.errors import LostSamplesError
from dataplane_core.middleware import OperationMiddleware
from dataplane_observe import Recording, recorder as recorder_module
from dataplane_observe._lines import sealed, unsealed
from dataplane_tools import _audit as audit_module
from dataplane_tools._survey import survey
from dataplane_tools.commands import audit

FIELDS = ["x", "reward", "text"]


def recorded(folder, *, role="trainer", inner=(), **options):
    """A client that records."""
    config = recording(folder, **options)
    return connect(config | {"role": role, "middleware": [*config["middleware"], *inner]})


@contextmanager
def recorded_run(folder, *others, tasks=("trainer",), group_size=None, num_samples=None, rollouts=False, **options):
    """A client that records, with a partition; and those of other roles in the same store."""
    with ExitStack() as stack:
        client = stack.enter_context(recorded(folder, **options))
        beside = [stack.enter_context(joined(client, recorded(folder, role=role))) for role in others]
        client.register_partition("train", FIELDS, num_samples, list(tasks), group_size, rollouts=rollouts)
        yield (client, *beside) if others else client


def put(client, names, version=0, shift=0.0, reward=True):
    """Puts groups of two samples, with their reward or without."""
    ids = [f"{name}_g{member}" for name in names for member in range(2)]
    columns = {
        "x": torch.arange(3.0).repeat(len(ids), 1) + torch.arange(len(ids))[:, None] + version,
        "reward": torch.arange(float(len(ids))) + shift,
        "text": [f"an answer to {name}" for name in ids],
    }
    if not reward:
        del columns["reward"]
    client.put_samples(ids, "train", columns, tags=[{"weight_version": version}] * len(ids))
    return ids


def step_on(client, number, count, loss=0.5, clears=True):
    meta = client.claim_meta("train", "trainer", ["x", "reward"], count, lease_s=600.0)
    client.get_data(meta)
    client.ack(meta)
    client.mark_step(number, loss=loss)
    if clears:
        client.clear_samples(meta.sample_ids, "train")
    return meta


def train(folder, groups, first_step=1, shift=0.0, **options):
    """A session of a run: a step for each list of prompts, on weights that are one step old from the second step on."""
    with recorded_run(folder, group_size=2, **options) as client:
        for number, names in enumerate(groups, first_step):
            ids = put(client, names, version=max(0, number - 2), shift=shift)
            step_on(client, number, len(ids))


def q(*numbers):
    return [f"q{number}" for number in numbers]


def rewritten(folder, change):
    """Changes the lines of a recording, and seals them again."""
    for path in folder.glob("*-*.jsonl"):
        lines = [json.loads(unsealed(line)) for line in path.read_bytes().splitlines()]
        changed = [sealed(json.dumps(each, separators=(",", ":")).encode()) for each in change(lines)]
        path.write_bytes(b"".join(line + b"\n" for line in changed))


@pytest.fixture
def look(capsys):
    """Runs the command. Returns its status and what it printed: an object for ``--json``, the error for status 2."""

    def call(*words):
        status = run(audit, *words)
        said = capsys.readouterr()
        if status == 2:
            return status, said.err
        return status, json.loads(said.out) if "--json" in words else said.out

    return call


@pytest.fixture
def finds(tmp_path, look):
    """Audits the recording in ``tmp_path``. Compares what it says is wrong, and what else a test names.

    Texts are by the kind of the fault; a step is told by how many samples it has; untrained samples by (why, how many).
    """

    def check(wrong, *, steps=None, untrained=None, lacks=()):
        status, found = look(tmp_path, "--json")
        assert {each["kind"] for each in found["wrong"]} == wrong.keys(), found["wrong"]
        for each in found["wrong"]:
            texts = wrong[each["kind"]]
            assert all(text in each["text"] for text in ([texts] if isinstance(texts, str) else texts)), each["text"]
        assert status == (1 if wrong else 0)
        if steps is not None:
            assert [each["samples"] for each in found["steps"]] == steps
        if untrained is not None:
            assert [(each["reason"], each["count"]) for each in found["untrained"]] == untrained
        for text in [lacks] if isinstance(lacks, str) else lacks:
            assert any(text in each for each in found["lacks"]), found["lacks"]
        return found

    return check


def test_a_healthy_run(tmp_path, look, finds):
    """Rollouts and rewards come from clients of their own."""
    with recorded_run(tmp_path, "rollout", "reward", tasks=["reward", "trainer"], group_size=2) as clients:
        trainer, rollout, reward = clients
        for number, names in enumerate([q(0, 1), q(2, 3), q(4, 5)], 1):
            ids = put(rollout, names, version=max(0, number - 2), reward=False)
            meta = reward.claim_meta("train", "reward", ["x"], len(ids), lease_s=600.0)
            reward.put_samples(meta.sample_ids, "train", {"reward": torch.ones(len(ids))})
            reward.ack(meta)
            step_on(trainer, number, len(ids))
    found = finds({}, steps=[4, 4, 4], untrained=[])
    assert (found["lacks"], found["failures"], found["num_steps"], found["tasks"]) == ([], [], 3, ["trainer"])
    assert {name: each["samples"] for name, each in found["latency"].items()} == {"reward": 12, "trainer": 12}
    assert [each["weight_versions"] for each in found["steps"]] == [[0, 0], [0, 0], [1, 1]]
    assert [each["values"] for each in found["steps"]] == [{"loss": 0.5}] * 3
    assert sorted(each["role"] for each in found["clients"]) == ["reward", "rollout", "trainer"]
    (writer,) = found["steps"][0]["writers"]
    assert writer.startswith("rollout (process ")
    cells = look(tmp_path, "--step", 1, "--json")[1]["steps"][0]["rows"][0]["cells"]
    assert (cells["x"]["writer"].split()[0], cells["reward"]["writer"].split()[0]) == ("rollout", "reward")
    assert cells["reward"]["value"] == "1"
    assert look(tmp_path)[1].splitlines()[-1] == "Nothing wrong was found."


def test_what_is_no_fault(tmp_path, finds):
    """The same samples again without a resume, also given back and acked twice; what is evaluated; and weights."""
    with recorded_run(tmp_path) as client:
        client.register_partition("eval", ["x", "reward"], None, ["eval"])
        client.register_partition("weights", ["w"], None, ["replica"])
        for number, names in enumerate([q(0), q(1), q(0), q(1)], 1):
            put(client, names)
            evaluated = ["a", "b"]
            client.put_samples(evaluated, "eval", {"x": torch.ones(2, 3)})
            client.put_samples(evaluated, "eval", {"reward": torch.full((2,), float(number))})
            client.claim_meta("eval", "eval", ["x", "reward"], 2)
            client.clear_samples(evaluated, "eval")
            tags = [{"weight_version": number, "weight_anchor": number}]  # as `publish_weights` writes them
            client.put_samples([f"v{number}"], "weights", {"w": torch.ones(1, 3)}, tags=tags)
            client.get_data(client.claim_meta("weights", "replica", ["w"], 1))
            client.nack(client.claim_meta("train", "trainer", ["x"], 2, lease_s=600.0))
            client.ack(step_on(client, number, 2, clears=False))
            client.clear_samples(None, "train")
            client.register_partition("train", FIELDS, None, ["trainer"])
    assert finds({}, steps=[4] * 4, untrained=[])["tasks"] == ["eval", "trainer"]


@pytest.mark.parametrize("in_a_line", [False, True], ids=["between two lines", "in a line"])
def test_which_clients_were_closed_and_which_one_was_killed(tmp_path, look, finds, in_a_line):
    for number, role in enumerate(("closed", "killed")):
        train(tmp_path, [q(number)], first_step=number + 1, role=role)
    (path,) = (path for path in tmp_path.glob("*-000000.jsonl") if b'"role":"killed"' in path.read_bytes())
    data = path.read_bytes()
    path.write_bytes(data[:-40] if in_a_line else data[: data.rindex(b"\n", 0, -1) + 1])
    with recorded_run(tmp_path, role="open"):
        report = finds({}, steps=[2, 2], lacks="is cut off, as a killed process leaves it" if in_a_line else ())
        assert in_a_line or not report["lacks"]
        assert "not closed" in look(tmp_path)[1]
    states = {"closed": "closed", "killed": "not closed", "open": "open"}
    assert {client["role"]: client["state"] for client in report["clients"]} == states


def test_a_client_that_ends_or_goes_on_while_it_is_looked_at(tmp_path, look, monkeypatch):
    """Between the first reading of the recording and the report, which leaves out what came meanwhile."""
    monkeypatch.setattr(recorder_module, "_MOST_SEGMENT_BYTES", 1 << 10)
    monkeypatch.setattr(recorder_module, "_LEAST_SEGMENT_BYTES", 1 << 10)

    def goes_on():
        """Writes until it is in another segment."""
        before = len([*tmp_path.glob(f"{writer}-*.jsonl")])
        while len([*tmp_path.glob(f"{writer}-*.jsonl")]) == before:
            put(going_on, q(0))

    def meanwhile(recording, task):
        found = survey(recording, task)
        step_on(ending, 2, len(put(ending, q(1))))
        ending.close()
        going_on.register_partition("train", FIELDS, None, ["trainer"], 2)
        going_on.clear_samples(put(going_on, q(2)), "train")
        goes_on()
        return found

    monkeypatch.setattr(audit_module, "survey", meanwhile)
    with recorded_run(tmp_path, role="ending") as ending, recorded_run(tmp_path, role="on") as going_on:
        (writer,) = [each.client for each in Recording(tmp_path).writers if each.role == "on"]
        step_on(ending, 1, len(put(ending, q(0))))
        found = look(tmp_path, "--json")[1]
        assert {each["role"]: each["state"] for each in found["clients"]} == {"ending": "open", "on": "open"}
        assert ([each["step"] for each in found["steps"]], found["untrained"]) == ([1], [])
        before = Recording(tmp_path)
        goes_on()
        assert before.is_open(writer)
    assert not before.is_open(writer)


def test_which_steps_are_shown_and_the_samples_of_one(tmp_path, look):
    train(tmp_path, [q(0), q(1)])
    with recorded_run(tmp_path) as client:
        for number in range(3, 43):
            client.mark_step(number)
    lines = [line.split()[0] for line in look(tmp_path)[1].splitlines()[2:43]]
    assert lines == [*map(str, range(1, 11)), "...", *map(str, range(13, 43))]
    lines = look(tmp_path, "--steps", "12:13")[1].splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["12", "13"]
    assert "..." not in look(tmp_path, "--steps", "1:40")[1]
    assert len(look(tmp_path, "--steps", "41:", "--json")[1]["steps"]) == 2
    assert look(tmp_path, "--steps", "x")[0] == 2
    status, text = look(tmp_path, "--step", 2)
    assert status == 0
    for said in (
        "step 2: 2 samples, loss 0.5",
        "q1_g0 of 'train', put by trainer (process ",
        "    weight_version: 0\n    x: ",
        "    reward: 1\n",
    ):
        assert said in text
    assert "q0_g0" not in text
    status, text = look(tmp_path, "--step", 99)
    assert status == 2
    assert "no step 99" in text


def test_how_stale_a_step_was(tmp_path, look):
    with recorded_run(tmp_path, group_size=2) as client:
        for number, more in ((1, {}), (2, {"staleness": 5})):
            for version in (number, number + 2):
                put(client, q(10 * number + version), version=version)
            client.claim_meta("train", "trainer", ["x"], 4)
            client.mark_step(number, **more)
    steps = look(tmp_path, "--json")[1]["steps"]
    assert [each["weight_versions"] for each in steps] == [[1, 3], [2, 4]]
    assert [each["staleness"] for each in steps] == [[0, 2], [5, 5]]


# --- a resume ---------------------------------------------------------------------------------------------------------

#: The prompts of the steps before a resume, the step that it begins with, its prompts; and which ones are wrong, how.
RESUMES = {
    "it goes on": ([q(0, 1), q(2, 3)], 3, [q(4, 5), q(6, 7)], {}),
    "an undone step is given again": ([q(0, 1), q(2, 3), q(4, 5)], 3, [q(4, 5), q(6, 7)], {}),
    "prompts are skipped": ([q(0, 1), q(2, 3)], 3, [q(7, 8), q(9, 10)], {"skipped": ("3 prompts", "q4 to q6")}),
    # rollouts end in any order
    "one that was under way": ([q(1, 0), q(3, 2), q(4, 6)], 4, [q(8, 7), q(9, 10)], {"skipped": ("1 prompt", "q5.")}),
    "an undone step is skipped": ([q(0, 1), q(2, 3), q(4, 5)], 3, [q(6, 7), q(8, 9)], {"skipped": ("q4 to q5. They",)}),
    "given twice": (
        [q(0, 1), q(2, 3)],
        3,
        [q(3, 4), q(5, 6)],
        {"given twice": ("1 prompt", "'q3'", "2 and in step 3")},
    ),
    "given twice, and no new one": ([q(0, 1), q(2, 3)], 3, [q(3)], {"given twice": ("1 prompt", "'q3'")}),
    "numbers are missing anyway": ([q(0, 1), q(2, 5), q(6, 7)], 4, [q(10, 11), q(12, 13)], {}),
    "numbers jump": ([q(0, 1), q(2, 3)], 3, [q(10**17, 10**17 + 1), q(10**17 + 2, 10**17 + 3)], {}),
    "a further pass over all prompts": ([q(0, 1), q(2, 3)], 3, [q(0, 1), q(2, 3)], {}),
}


@pytest.mark.parametrize(("before", "first_step", "after", "wrong"), RESUMES.values(), ids=RESUMES)
def test_a_resume(tmp_path, finds, before, first_step, after, wrong):
    train(tmp_path, before)
    train(tmp_path, after, first_step, shift=7.0)
    found = finds(wrong)
    (resume,) = found["resumes"]
    assert all(f"after step {len(before)}" in text for text in (resume, *(each["text"] for each in found["wrong"])))
    steps = [(number, int(number >= first_step)) for number in range(1, len(before) + 1)]
    steps += [(number, 0) for number in range(first_step, first_step + len(after))]
    assert [(each["step"], each["undone"]) for each in found["steps"]] == steps


@pytest.mark.parametrize(
    ("again", "wrong"),
    [
        ([2, 3], {}),
        ([3, 4], {"skipped": ("1 prompt", "q2.")}),
        ([1, 2], {"given twice": ("1 prompt", "'q1' was trained on in step 2 and in step 3")}),
    ],
)
def test_a_resume_with_rollouts_of_one_to_three_rows(tmp_path, finds, again, wrong):
    """The third one of each group dies, and the group is sealed without it."""

    def step(client, number, prompt):
        ids = [f"q{prompt}_g{rollout}/{row}" for rollout, rows in enumerate([3, 1, 2]) for row in range(rows)]
        client.put_samples(ids, "train", {"x": torch.ones(6, 3), "reward": torch.ones(6), "text": ["it"] * 6})
        client.seal({f"q{prompt}_g0": 3, f"q{prompt}_g1": 1}, "train", ends_groups=True)
        assert step_on(client, number, 1).sample_ids == ids[:4]

    for numbers in (enumerate([0, 1], 1), enumerate(again, 3)):
        with recorded_run(tmp_path, group_size=3, rollouts=True) as client:
            for number, prompt in numbers:
                step(client, number, prompt)
    found = finds(wrong, steps=[4, 4, 4, 4])
    assert sum(each["count"] for each in found["untrained"]) == 8


@pytest.mark.parametrize("claimed", [False, True], ids=["generated before it", "of a step that it cut off"])
def test_prompts_that_no_step_trained_on_before_a_resume(tmp_path, finds, claimed):
    """Those that a step has claimed, but no mark says that the step ended, are given again rightly."""
    with recorded_run(tmp_path, group_size=2) as client:
        put(client, q(0, 1, 2, 3))
        step_on(client, 1, 4)
        if claimed:
            client.claim_meta("train", "trainer", ["x"], 4)
    train(tmp_path, [q(2, 3), q(4, 5)] if claimed else [q(4, 5), q(6, 7)], first_step=2)
    two = ("2 prompts were skipped over the resume of trainer", "after step 1: q2 to q3. They were put before it")
    found = finds({} if claimed else {"skipped": two})
    if claimed:
        names = [("step 1", False), ("after step 1", True), ("step 2", False), ("step 3", False)]
        assert [(each["name"], each["undone"]) for each in found["steps"]] == names


@pytest.mark.parametrize("given_again", [False, True])
def test_prompts_of_undone_steps_where_rollouts_ran_ahead(tmp_path, finds, given_again):
    """All prompts were put before the trainer was killed. The one that begins anew goes on with those that are left."""
    with recorded_run(tmp_path, group_size=2, role="rollout") as rollout:
        put(rollout, q(*range(8)))
        for _ in range(2):
            with joined(rollout, recorded(tmp_path)) as trainer:
                if given_again:
                    trainer.reset_consumption("train", "trainer")
                for step in (1, 2):
                    step_on(trainer, step, 4, clears=False)
    two = ("4 prompts were skipped over the resume of trainer", "after step 2: q0 to q3. They were put before it")
    finds({} if given_again else {"skipped": two}, steps=[4] * 4)


def test_prompts_that_pass_no_filter_are_not_skipped_over_a_resume(tmp_path, finds):
    with recorded_run(tmp_path, group_size=2, role="rollout") as rollout:
        for number, version in enumerate([1, 0, 1]):
            put(rollout, q(number), version=version)
        for step in (1, 2):
            with joined(rollout, recorded(tmp_path)) as trainer:
                trainer.claim_meta("train", "trainer", ["x"], 2, tag_filter={"weight_version": 1})
                trainer.mark_step(step)
                if step == 2:
                    trainer.clear_samples(None, "train")
    finds({}, steps=[2, 2], untrained=[("filter", 2)])


def test_ids_that_every_step_uses_again_name_no_prompts(tmp_path, finds):
    with recorded_run(tmp_path, group_size=2) as client:
        for number in (1, 2, 3):
            client.register_partition("train", FIELDS, None, ["trainer"], 2)
            put(client, q(0, 1), shift=number)
            step_on(client, number, 4)
    train(tmp_path, [q(1, 2)], first_step=4, shift=7.0)
    finds({})


def test_prompts_that_a_tag_numbers(tmp_path, finds):
    for first, numbers in ((1, (0, 1)), (3, (4, 5))):
        with recorded_run(tmp_path) as client:
            for step, number in enumerate(numbers, first):
                client.put_samples([f"{number:x}f" * 16], "train", {"x": torch.zeros(1)}, tags=[{"prompt": number}])
                client.claim_meta("train", "trainer", ["x"], 1)
                client.mark_step(step)
    finds({"skipped": "prompt 2 to prompt 3"})


# --- samples ----------------------------------------------------------------------------------------------------------


def test_samples_that_were_not_trained_on(tmp_path, look, finds):
    """Each with what became of it, and by whom."""
    with recorded_run(tmp_path, "buffer") as (trainer, buffer):
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
    found = finds({}, steps=[2])
    fates = {(each["reason"], each["count"], each["by"].split()[0]): each for each in found["untrained"]}
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
    assert (evicted["task"], evicted["last"]) == ("trainer", "put_samples")
    assert evicted["examples"] == ["'q3_g0' of 'train' after step 1"]
    assert "1 by 'trainer': evicted; cleared by buffer (process " in look(tmp_path)[1]


def test_a_claim_that_got_nothing_tells_the_filter(tmp_path, finds):
    """Such claims are recorded once, also if they come again."""
    asked = {"blocking": False, "tag_filter": {"weight_version": (">=", 5)}}
    with recorded_run(tmp_path, group_size=2) as client:
        put(client, q(0), version=5)
        step_on(client, 1, 2)
        stale = []
        for number in (1, 2):
            stale += put(client, q(number), version=number)
            assert client.claim_meta("train", "trainer", ["x", "reward"], 2, **asked).size == 0
        client.clear_samples(stale, "train")
    finds({}, untrained=[("filter", 4)])


class Loses(OperationMiddleware):
    """Reads fail as those of rows that the store has lost."""

    def around(self, operation, request):
        if operation == "get_samples":
            lost = [(name, ["x"]) for name in request.sample_ids]
            raise LostSamplesError.for_payload("get_samples('train')", request.partition_id, lost)
        return (yield)


def test_samples_that_the_store_lost(tmp_path, finds):
    with recorded_run(tmp_path, group_size=2, inner=[Loses()]) as client:
        put(client, q(0))
        meta = client.claim_meta("train", "trainer", ["x"], 2, lease_s=600.0)
        with pytest.raises(LostSamplesError):
            client.get_data(meta)
        client.clear_samples(meta.sample_ids, "train")
        client.mark_step(1)
    found = finds({"lost": "2 samples were lost by the store"})
    assert found["failures"] == [{"operation": "get_samples", "error": "LostSamplesError", "count": 1}]


def test_a_sample_that_was_given_again_to_a_task(tmp_path, look):
    with recorded_run(tmp_path, group_size=2) as client:
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


# --- batches without marks, reads without tasks -----------------------------------------------------------------------


def test_without_marks_the_batches_of_a_task_are_counted(tmp_path, finds):
    with recorded_run(tmp_path, num_samples=8) as client:
        put(client, q(0, 1, 2, 3))
        for index in (0, 1):
            for rank in (1, 0):
                for _ in range(2):  # two processes of a rank
                    asked = {"dp_rank": rank, "dp_size": 2, "batch_index": index, "sampler": "balanced"}
                    client.claim_meta("train", "trainer", ["x"], 2, **asked)
    found = finds({}, steps=[4, 4], lacks="No step is marked")
    assert [each["name"] for each in found["steps"]] == ["batch 1 of 'trainer'", "batch 2 of 'trainer'"]


def test_without_tasks_a_step_is_of_what_was_read(tmp_path, finds):
    with recorded_run(tmp_path, tasks=()) as client:
        ids = put(client, q(0, 1, 2))
        for number, place in enumerate((0, 2), 1):
            client.get_samples(ids[place : place + 2], "train", ["x"])
            client.mark_step(number)
        client.clear_samples(None, "train")
    finds({}, steps=[2, 2], untrained=[("end of the partition", 2)])


@pytest.mark.parametrize(
    ("driver_reads", "steps", "untrained"),
    [
        ({3: ("text", 4)}, [4, 4, 4], []),  # its workers train, it reads at the end
        (dict.fromkeys((1, 2, 3), ("x", 2)), [2, 2, 2], [("cleared without a read", 6)]),  # it trains, they do not
    ],
)
def test_without_tasks_a_step_is_of_who_trains_and_not_of_who_reads_beside_it(
    tmp_path, finds, driver_reads, steps, untrained
):
    with recorded_run(tmp_path, "worker", tasks=(), role="driver") as (driver, worker):
        for step in (1, 2, 3):
            driver.register_partition("train", FIELDS, None, [])
            ids = put(driver, q(2 * step, 2 * step + 1))
            worker.get_samples(ids, "train", ["x"])
            if step in driver_reads:
                field, count = driver_reads[step]
                driver.get_samples(ids[:count], "train", [field])
            driver.mark_step(step)
            driver.clear_samples(ids, "train")
    finds({}, steps=steps, untrained=untrained)


# --- damage -----------------------------------------------------------------------------------------------------------


def test_rows_that_are_damaged_and_a_recording_that_is_not_there(tmp_path, look):
    status, text = look(tmp_path)
    assert (status, "no recording in" in text) == (2, True)
    folder = tmp_path / "recording"
    train(folder, [q(0, 1), q(2, 3)])
    rows = next(folder.glob("*.rows")).name
    for place, damaged in (
        (lambda data: data.rindex(b"an answer to q3") + 3, [("q3_g1", "text", "step 2")]),
        (lambda data: 8, [(f"q{n}_g{member}", "", "step 1") for n in range(2) for member in range(2)]),  # of the frame
    ):
        copy = shutil.copytree(folder, tmp_path / f"copy-{len(damaged)}")
        data = bytearray((copy / rows).read_bytes())
        start = place(data)
        data[start : start + 12] = bytes(each ^ 1 for each in data[start : start + 12])
        (copy / rows).write_bytes(data)
        status, found = look(copy, "--json")
        assert (status, {each["kind"] for each in found["wrong"]}) == (1, {"damaged"})
        assert [(each["sample"], each["column"], each["step"]) for each in found["wrong"]] == damaged
        said = f"the rows of '{damaged[0][0]}' are damaged: "
        for options in ((), ("--step", 1)):
            assert said in look(copy, *options)[1]


@pytest.mark.parametrize("deleted", [False, True], ids=["lines were lost", "segments were deleted"])
def test_resumes_are_not_judged_where_something_is_missing(tmp_path, finds, monkeypatch, deleted):
    monkeypatch.setattr(recorder_module, "_LEAST_SEGMENT_BYTES", 1 << 12)
    train(tmp_path, [q(*range(20)), q(*range(20, 40))])
    train(tmp_path, [q(45), q(46)], first_step=3)
    finds({"skipped": ()})
    if deleted:
        train(tmp_path, [q(number) for number in range(60, 80)], first_step=5, max_bytes=str(1 << 14))
        finds({}, lacks="were deleted to keep max_bytes")
    else:
        rewritten(tmp_path, lambda lines: [*lines, {**lines[-1], "op": "lost", "lines": 3, "ids": []}])
        finds({}, lacks="could not write 3 lines: a full disk")


# --- clocks that differ -----------------------------------------------------------------------------------------------


def late_reply(lines):
    """The reply of a put may come late: others have claimed, acked and cleared its samples by then."""
    for each in lines:
        if each["op"] == "put_samples":
            each["at"], each["seconds"] = each["at"] + 600.0, each["seconds"] + 600.0
    return lines


def skewed(seconds):
    """The clock of the rollouts shows so much more."""

    def later(lines):
        more = seconds if lines[0]["role"] == "rollout" else 0.0
        return [{**each, "at": each["at"] + more} for each in lines]

    return later


@pytest.mark.parametrize("skew", [None, 0.5, -0.5, 90.0, -90.0])
def test_late_replies_and_hosts_whose_clocks_differ_are_not_accused(tmp_path, finds, skew):
    for first in (1, 4):
        with recorded_run(tmp_path, "rollout", group_size=2) as (trainer, rollout):
            for number in range(first, first + 3):
                put(rollout, q(number))
                step_on(trainer, number, 2)
    rewritten(tmp_path, late_reply if skew is None else skewed(skew))
    found = finds({}, steps=[2] * 6)
    ahead = skew is not None and skew > 1
    assert any("the clocks of hosts differ" in each for each in found["lacks"]) == ahead
    assert found["untrained"] == [] or not (skew is None or ahead)


def test_a_trainer_whose_clock_is_ahead_is_not_said_to_have_trained_on_nothing(tmp_path, finds):
    with recorded_run(tmp_path, group_size=2) as trainer:
        put(trainer, q(0))
        trainer.claim_meta("train", "trainer", ["x"], 2)
        trainer.mark_step(1)
        trainer.clear_samples(None, "train")

    def cleared_early(lines):
        order = ["", "begin", "register_partition", "put_samples", "clear_samples", "claim", "step", "end"]
        lines.sort(key=lambda line: order.index(line["op"]))
        return [{**line, "at": lines[0]["at"] + place} for place, line in enumerate(lines)]

    rewritten(tmp_path, cleared_early)
    finds({}, steps=[2], untrained=[], lacks="the clocks of hosts differ")


def test_a_recording_of_nothing(tmp_path, look, finds):
    recorded(tmp_path).close()
    assert finds({}, steps=[])["lacks"] == ["It has no operation."]
    assert look(tmp_path)[0] == 0
    assert look(tmp_path, tmp_path)[0] == 0


# --- two recordings ---------------------------------------------------------------------------------------------------


@pytest.fixture
def compare(tmp_path, look):
    """Compares the recordings ``a`` and ``b``: the status, and what it says as text."""
    return lambda *words: look(tmp_path / "a", tmp_path / "b", *words)


def test_two_runs_that_are_equal_also_after_a_resume_that_undid_a_step(tmp_path, compare):
    train(tmp_path / "a", [q(0, 1), q(2, 3)])
    train(tmp_path / "b", [q(0, 1), q(2, 3), q(4)])
    for name in "ab":
        train(tmp_path / name, [q(4, 5)], first_step=3)
    status, text = compare()
    assert (status, "3 steps are equal\nThey do not differ." in text) == (0, True)


def test_the_first_step_and_column_in_which_two_runs_differ(tmp_path, compare):
    for name, change in (("a", 0.0), ("b", 0.5)):
        with recorded_run(tmp_path / name, payload="digests", group_size=2) as client:
            for number in (1, 2, 3):
                ids = put(client, q(number), shift=change if number == 3 else 0.0)
                if number == 3:
                    client.put_samples(ids, "train", {"advantage": torch.ones(2, 4) + change})
                step_on(client, number, 2, loss=1.0 + (change if number > 1 else 0.0))
    status, found = compare("--json")
    assert (status, found["equal_steps"]) == (1, 1)
    value, column = found["found"]
    assert (value["kind"], value["step"], value["values"]) == ("value", "step 2", [1.0, 1.5])
    assert (column["step"], column["column"], column["sample"]) == ("step 3", "reward", "q3_g0")
    assert column["values"] == ["0", "0.5"]
    assert column["counts"] == {"reward": 2, "advantage": 2}
    assert "step 3, column 'reward' of sample 'q3_g0': 0 and 0.5" in compare()[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2, 2, 3), torch.zeros(2, 3, 2)),
        (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int32)),
        (torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.uint8)),
    ],
    ids=["shape", "dtype", "scalars"],
)
def test_two_runs_whose_cells_have_the_same_bytes_and_another_type(tmp_path, compare, one, other):
    for name, column in (("a", one), ("b", other)):
        with recorded_run(tmp_path / name) as client:
            client.put_samples(["q0_g0", "q0_g1"], "train", {"x": column})
            client.claim_meta("train", "trainer", ["x"], 2)
            client.mark_step(1)
    (found,) = compare("--json")[1]["found"]
    assert (found["kind"], found["column"], found["counts"]) == ("column", "x", {"x": 2})
    assert found["values"][0] != found["values"][1]


def test_two_runs_whose_steps_are_of_different_samples_or_of_ids_of_their_own(tmp_path, look):
    train(tmp_path / "a", [q(0), q(1, 2), q(3)])
    train(tmp_path / "b", [q(0), q(1, 9), q(3)])
    train(tmp_path / "c", [["c0"], ["c1", "c2"], ["c3"]])
    status, found = look(tmp_path / "a", tmp_path / "b", "--json")
    assert status == 1
    (only,) = found["found"]
    assert (only["step"], only["kind"], only["samples"]) == ("step 2", "samples", ["q2_g0", "q9_g0"])
    (found,) = look(tmp_path / "a", tmp_path / "c", "--json")[1]["found"]  # compared by place
    assert (found["step"], found["column"], found["counts"]) == ("step 1", "text", {"text": 2})


def test_a_run_that_begins_at_a_later_step(tmp_path, look):
    for name, first, shift in (("a", 1, 0.0), ("b", 40, 0.0), ("c", 40, 0.5)):
        with recorded_run(tmp_path / name) as client:
            for number in range(first, 42):
                client.put_samples([f"q{number}"], "train", {"x": torch.full((1,), number + shift)})
                client.claim_meta("train", "trainer", ["x"], 1)
                client.mark_step(number)
                client.clear_samples([f"q{number}"], "train")
    for pair, late in ((("a", "b"), "second"), (("b", "a"), "first")):
        status, found = look(*(tmp_path / each for each in pair), "--json")
        assert (status, found["equal_steps"], found["found"]) == (0, 2, [])
        assert f"The {late} recording begins at step 40" in found["begins"][0]
    status, found = look(tmp_path / "c", tmp_path / "a", "--json")
    assert (status, [(each["step"], each["column"]) for each in found["found"]]) == (1, [("step 40", "x")])


def test_what_one_of_two_recordings_lacks_is_said(tmp_path, look):
    train(tmp_path / "a", [q(0)])
    train(tmp_path / "later", [q(9)], first_step=7)
    train(tmp_path / "bare", [q(0)], payload="none")
    for pair, status, said in (
        (("a", "later"), 1, "step 1 is in the first recording only"),
        (("later", "a"), 1, "step 1 is in the second recording only"),
        (("a", "bare"), 0, "The second recording: No digests were recorded by trainer"),
    ):
        found, text = look(*(tmp_path / each for each in pair))
        assert (found, said in text) == (status, True)
