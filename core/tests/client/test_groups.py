"""Groups that stay short, and groups that pass a filter in part: what is given, and what is said of the rest."""

import pytest

from dataplane_core import connect, stream
from dataplane_core.errors import ClaimTimeoutError

PAIR = ["q0_g0", "q0_g1"]
BACKENDS = pytest.mark.parametrize("backend", ["noop", "redis_store"])


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
@BACKENDS
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


@BACKENDS
@pytest.mark.parametrize(
    ("tags", "condition", "wrong"),
    [
        ([{"v": 0}, {"v": 1}], (">=", 1), "q0_g0"),
        ([{"v": 1}, {"v": 0}], (">=", 1), "q0_g1"),
        ([{}, {"v": 1}], (">=", 1), "q0_g0"),
        ([{"v": 0}, {"v": 1}], ("any <", 1), None),
        ([{"v": 1}, {}], ("any ==", 1), None),
        ([{"v": 1}, {}], ("any in", [0, 2]), "q0_g1"),
    ],
)
def test_a_filter_holds_for_all_of_a_group_or_any_and_who_does_not_pass_is_named(backend, tags, condition, wrong):
    with connect({"backend": backend}) as client:
        client.register_partition("p", ["x"], None, ["train"], grpo_group_size=2)
        client.put_samples(PAIR, "p", {"x": [1.0, 2.0]}, tags)
        claim = {"timeout_s": 0.0, "tag_filter": {"v": condition}}
        if wrong is None:
            assert client.claim_meta("p", "train", ["x"], 2, **claim).sample_ids == PAIR
            return
        with pytest.raises(ClaimTimeoutError) as caught:
            client.claim_meta("p", "train", ["x"], 2, **claim)
        assert caught.value.shortfall.not_matching == (wrong,)
