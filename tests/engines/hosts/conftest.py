"""Two hosts for the tests of this folder."""

from two_hosts import pair as pair
