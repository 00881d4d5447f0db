"""`KVBatchMeta`: what aligns, and that every transform is an independent copy."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dataplane_core import KVBatchMeta
from dataplane_core.errors import InvalidRequestError
from dataplane_core.schema import GLOBAL_FORWARD_PAD_SEQLEN, MICRO_BATCH_INDICES, PAD_TO_MULTIPLE, padded_length


def meta(**changes):
    values = {
        "partition_id": "p",
        "task_name": "t",
        "sample_ids": ["a", "b", "c"],
        "fields": ["x"],
        "sequence_lengths": [1, 2, 3],
        "extra_info": {"plan": [[0, 1]]},
        "tags": [{"n": 1}, {"n": 2}, {"n": 3}],
        "lease_tokens": ["1.1", "1.2", "1.3"],
    }
    return KVBatchMeta(**{**values, **changes})


@pytest.mark.parametrize("column", ["tags", "lease_tokens", "sequence_lengths"])
def test_per_row_lists_must_align(column):
    with pytest.raises(ValueError, match="align 1:1"):
        meta(**{column: [{}] if column == "tags" else [1]})


def test_subset_takes_any_order_and_repeats_with_everything_that_belongs_to_the_rows():
    part = meta().subset([2, 0, 2, -2])
    assert part.sample_ids == ["c", "a", "c", "b"]
    assert part.sequence_lengths == [3, 1, 3, 2]
    assert part.tags == [{"n": 3}, {"n": 1}, {"n": 3}, {"n": 2}]
    assert part.lease_tokens == ["1.3", "1.1", "1.3", "1.2"]
    assert part.size == 4


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (3, "index 3 is out of range for 3 rows"),
        (-4, "index -4 is out of range for 3 rows"),
        *((each, "expected row numbers") for each in (True, np.True_, 0.5, "0")),
    ],
    ids=repr,
)
def test_what_is_no_row_number_is_refused(index, said):
    for call in (meta().subset, meta().drop):
        with pytest.raises(InvalidRequestError, match=said):
            call([0, index] if isinstance(index, int) and index is not True else [index])


def test_copies_are_independent():
    original = meta()
    for copy in (original.subset([0, 1, 2]), original.slice(0, 3), original.concat(), original.with_fields(["y"])):
        copy.sample_ids.append("z")
        copy.tags[0]["n"] = 99
        copy.extra_info["plan"][0].append(7)
        copy.fields.append("z")
    assert original == meta()


def test_concat_joins_rows_merges_fields_and_keeps_what_all_parts_have():
    other = meta(sample_ids=["d"], fields=["y", "x"], sequence_lengths=[4], tags=None, lease_tokens=["2.1"])
    joined = meta().concat(other)
    assert joined.sample_ids == ["a", "b", "c", "d"]
    assert joined.fields == ["x", "y"]
    assert joined.sequence_lengths == [1, 2, 3, 4]
    assert joined.tags is None
    assert joined.lease_tokens == ["1.1", "1.2", "1.3", "2.1"]
    with pytest.raises(ValueError, match="partition_ids must match"):
        meta().concat(meta(partition_id="q"))


def test_concat_keeps_what_each_part_says_of_its_rows():
    infos = (
        {PAD_TO_MULTIPLE: 8, GLOBAL_FORWARD_PAD_SEQLEN: 32, "metrics": {"reward": 1.0}, "run": "a"},
        {PAD_TO_MULTIPLE: 12, GLOBAL_FORWARD_PAD_SEQLEN: 48, "metrics": {"reward": 0.5}, "run": "a"},
        {"metrics": {"reward": 0.0}, "run": "a", MICRO_BATCH_INDICES: [[[0, 3]]]},
    )
    one, two, three = (meta(extra_info=info) for info in infos)
    metrics = [info["metrics"] for info in infos]
    joined = one.concat(two).concat(three)
    assert joined.extra_info == {PAD_TO_MULTIPLE: 24, GLOBAL_FORWARD_PAD_SEQLEN: 48, "metrics": metrics, "run": "a"}
    assert joined.extra_info == one.concat(two, three).extra_info
    assert one.concat().extra_info == infos[0]
    assert meta(extra_info={"n": 1}).concat(meta(extra_info={"n": True})).extra_info == {"n": [1, True]}
    with pytest.raises(InvalidRequestError, match="leased to task"):
        one.concat(meta(task_name="other"))
    turned = meta(token_starts=[3, 0, 1]).subset([1, 0])
    assert turned.token_starts == [0, 3]
    assert turned.concat(meta()).token_starts == [0, 3, 0, 0, 0]


def test_a_microbatch_plan_stays_only_on_all_rows_in_their_order():
    planned = meta(extra_info={MICRO_BATCH_INDICES: [[[0, 3]]], "run": "a"})
    assert all(
        each.extra_info == planned.extra_info
        for each in (planned.with_fields(["z"]), planned.subset([0, 1, 2]), planned.slice(0, 3), planned.concat())
    )
    others = planned.subset([1, 0, 2]), planned.slice(0, 2), planned.drop([0]), planned.concat(planned)
    assert [each.extra_info for each in others] == [{"run": "a"}] * 4


def test_drop_takes_repeats_in_any_order_and_gives_none_when_nothing_stays():
    assert meta().drop([2, 0, 2]).sample_ids == ["b"]
    assert meta().drop([-1]).sample_ids == ["a", "b"]
    assert meta().drop([0, 1, 2]) is None


def test_stamp_tags_works_in_place_all_columns_or_none():
    stamped = meta(tags=None)
    stamped.stamp_tags({"v": [7, 8, 9]})
    assert stamped.tags == [{"v": 7}, {"v": 8}, {"v": 9}]
    with pytest.raises(ValueError, match="tag 'w' must align 1:1"):
        stamped.stamp_tags({"v": [0, 0, 0], "w": [1]})
    assert stamped.tags == [{"v": 7}, {"v": 8}, {"v": 9}]


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([0.5, 1.0, 2.0], dtype=torch.bfloat16),
        np.array([0.5, 1.0, 2.0], dtype=np.float32),
        [np.float32(0.5), torch.tensor(1.0), 2.0],
    ],
    ids=["tensor", "array", "scalars of both"],
)
def test_stamped_tensors_and_arrays_become_python_values(values):
    stamped = meta(tags=None)
    stamped.stamp_tags({"std": values, "kept": torch.tensor([True, False, True])})
    assert stamped.tags == [{"std": 0.5, "kept": True}, {"std": 1.0, "kept": False}, {"std": 2.0, "kept": True}]
    assert {type(value) for tag in stamped.tags for value in tag.values()} == {float, bool}


def test_slice_follows_pythons_rules_and_pickling_keeps_all():
    assert meta().slice(1, 99).sample_ids == ["b", "c"]
    assert pickle.loads(pickle.dumps(meta())) == meta()


def test_a_large_meta_prints_in_three_lines_and_html_is_escaped():
    size = 500
    large = meta(
        sample_ids=[f"<{row}>" for row in range(size)],
        sequence_lengths=list(range(1, size + 1)),
        tags=[{"n": row, f"only_{row}": 1} for row in range(size)],
        lease_tokens=["1.1"] * size,
        fields=[f"f{row}" for row in range(100)],
    )
    first, fields, facts = repr(large).splitlines()
    assert first.startswith("KVBatchMeta('p', task 't'): 500 rows: '<0>', '<1>', ")
    assert first.endswith(" and 492 more")
    assert fields.endswith("'f7' and 92 more")
    assert facts.split("; ")[0] == "  125,250 tokens, 1 to 500 per row"
    assert "leased; extra_info: 'plan'" in facts
    assert max(map(len, repr(large).splitlines())) < 200


def test_an_empty_meta_prints_and_counts():
    empty = KVBatchMeta("p", None, [])
    assert repr(empty) == "KVBatchMeta('p'): 0 rows\n  fields: not known"
    assert (len(empty), list(empty), list(meta())) == (0, [], ["a", "b", "c"])


@given(st.integers(0, 200), st.lists(st.integers(1, 12), max_size=4))
def test_the_padded_length_is_the_least_that_every_party_can_divide(length, multiples):
    least = next(longer for longer in itertools.count(length) if not any(longer % multiple for multiple in multiples))
    assert padded_length(length, *multiples) == padded_length(np.asarray([length]), *multiples)[0] == least
