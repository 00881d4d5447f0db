"""The language of `--where`."""

import math

import pytest

from dataplane_core.errors import InvalidRequestError
from dataplane_tools._where import parse_where

ROW = {"reward": 0.25, "weight_version": 7, "task": "math", "done": True, "none": None}
ROW |= {"env/kind-2.x": "a b", "bad": math.nan}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reward<0.5 and weight_version>=7", True),
        ("reward < .5 and weight_version > 7", False),
        ("reward >= 2.5e-1 and reward <= +0.25 and reward != -1", True),
        ("weight_version == 7.0", True),
        ("task == 'math' AND done", True),
        ('task in ("code", "math",)', True),
        ("task in ('code')", False),
        ("task not in ('code')", True),
        ("not done", False),
        ("not not done == true", True),
        # `and` binds closer than `or`
        ("done or reward > 1 and reward > 2", True),
        ("(done or reward > 1) and reward > 2", False),
        ("env/kind-2.x == 'a b'", True),
        (r"task != 'ma\'th'", True),
        ("bad == nan", True),
        ("bad != nan or reward == nan", False),
        ("bad in (1, nan) and reward != nan", True),
        ("bad < inf", False),
        ("done == none", False),
        # what a row lacks, or what has no order, is neither so nor the opposite
        ("lacks < 1", False),
        ("not lacks < 1", False),
        ("lacks != 1", False),
        ("lacks", False),
        ("not lacks", False),
        ("lacks not in (1)", False),
        ("lacks < 1 or done", True),
        ("not (lacks < 1 and reward > 1)", True),
        ("task < 5", False),
        ("not task < 5", False),
    ],
)
def test_a_row_matches_or_not(text, expected):
    assert parse_where(text).matches(ROW) is expected


def test_names_are_those_compared_each_once_in_order():
    assert parse_where("b>1 and (a in ('c', 'd') or not b<3) and e").names == ("b", "a", "e")


#: What is no condition -> what was found there, and what was expected.
REFUSED = {
    "": "found the end. Expected the name of a tag or field.",
    "reward = 1": "found '= 1' at character 8. Expected '==' to compare.",
    "reward <": "found the end. Expected a number, a string in quotes",
    "task == math": "found 'math' at character 9. Expected a number, a string in quotes",
    "0.5 < reward": "found '0.5 < reward' at character 1. Expected the name",
    "a < 1 < 2": "found '< 2' at character 7. Expected 'and', 'or' or the end.",
    "(a < 1": "found the end. Expected ')'.",
    "a < 1)": "found ')' at character 6. Expected 'and', 'or' or the end.",
    "a in 1": "found '1' at character 6. Expected '('.",
    "a in ()": "found ')' at character 7. Expected a number",
    "a < 1 and": "found the end. Expected the name",
    "a not 1": "found '1' at character 7. Expected 'in'.",
    "a 'x'": "found ''x'' at character 3. Expected one of",
    "a == 'x": "found ''x' at character 6. Expected a name, a value or an operator.",
    r"a == '\x'": "Expected a string without broken escapes.",
    "a == 1; b": "found '; b' at character 7.",
    "not in (1)": "found 'in (1)' at character 5. Expected the name",
    "(" * 100_000: "too deep",
    "not " * 100_000: "too deep",
}


@pytest.mark.parametrize(("text", "said"), REFUSED.items(), ids=lambda each: each[:20])
def test_what_is_no_condition_is_refused_with_its_place(text, said):
    with pytest.raises(InvalidRequestError) as caught:
        parse_where(text)
    assert said in str(caught.value)
