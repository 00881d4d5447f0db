"""What a tag may be, and a filter on tags: the rest is refused before a store sees it."""

import pytest

from dataplane_core.errors import InvalidRequestError, InvalidTypeError
from dataplane_core.spec import check_tag_filter
from dataplane_core.spec.tags import check_tags

LONE = "\udc80"


@pytest.mark.parametrize("tags", [{"word": LONE}, {LONE: 1}])
def test_a_tag_is_valid_unicode(tags):
    with pytest.raises(InvalidRequestError, match=r"tags\[1\].*is not valid Unicode"):
        check_tags([{"wörd": "ü"}, tags], 2)


@pytest.mark.parametrize("tags", [{"word": 1}, {"a": {"word": 1}}, "a", 5, iter([{}])])
def test_tags_that_are_no_list_are_refused_with_what_to_write(tags):
    with pytest.raises(InvalidTypeError, match=r"must be a list with one dict per sample, got .* write tags=\[\{"):
        check_tags(tags, 1)


def test_the_version_of_weights_is_a_number():
    for version in (7, 7.5, None):
        check_tags([{"weight_version": version, "weights": "7"}], 1)
    with pytest.raises(InvalidTypeError, match=r"tags\[0\]\['weight_version'\] must be a number, got the str '10'"):
        check_tags([{"weight_version": "10"}], 1)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (([1], 2), "must be a value or"),
        (("any", 2), "must be a value or .* in, or 'any ' before one of them"),
        (("any in", 2), "a list of primitives"),
        (("<", 2**70), "does not fit in 64 bits"),
        (("in", [1, -(2**70)]), "does not fit in 64 bits"),
        (LONE, "is not valid Unicode"),
        (("in", ["ü", LONE]), "is not valid Unicode"),
    ],
)
def test_a_filter_that_no_tag_can_match_is_refused(condition, message):
    with pytest.raises(InvalidRequestError, match=message):
        check_tag_filter({"x": condition})
