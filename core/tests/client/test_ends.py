"""A task that can be given no more is finished: `is_finished`, streams and `why` agree, and say what is left."""

import pytest

from dataplane_core import connect, stream

PAIR = ["q0_g0", "q0_g1"]


def nothing(client):
    pass


def lose(client):
    client.clear_samples(["q1_g1"], "p")


def give_one(client):
    client.reset_consumption("p", "train", ["q1_g0"])


@pytest.mark.parametrize(
    ("others", "then", "num_left", "said"),
    [
        (["q1_g0"], nothing, 1, "'q1' has 1. Samples in such groups: 1."),
        (["q1_g0", "q2_g0"], nothing, 2, "'q1' has 1, 'q2' has 1. Samples in such groups: 2."),
        (["q1_g0", "q1_g1"], lose, 1, ""),
        (["q1_g0", "q1_g1"], give_one, 1, ""),
    ],
    ids=["short", "two short", "one lost", "half given"],
)
@pytest.mark.parametrize("backend", ["noop", "redis_store"])
def test_a_group_that_stays_short_does_not_keep_a_task_from_its_end(caplog, backend, others, then, num_left, said):
    with connect({"backend": backend}) as client:
        client.register_partition("p", ["x"], None, ["train"], grpo_group_size=2)
        client.put_samples([*PAIR, *others], "p", {"x": [1.0] * (2 + len(others))})
        client.finish_partition("p")
        told = "finish_partition('p'): groups that lack some of their 2 samples are never given: "
        assert caplog.messages == [f"{told}{said}"] * bool(said)
        then(client)
        assert not client.is_finished("p", ["train"])
        assert [batch.meta.sample_ids for batch in stream(client, "p", "train", ["x"], 2)] == [PAIR]
        assert client.is_finished("p", ["train"])
        (verdict,) = client.why("p")
        assert (verdict.state, verdict.backlog) == ("done", num_left)
        assert f"all samples but {num_left}, which are never given" in verdict.text
        assert client.claim_meta("p", "train", ["x"], 2).size == 0
