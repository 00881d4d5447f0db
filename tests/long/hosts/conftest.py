"""Two hosts for the tests of this folder."""

from two_hosts import mortal_pair as mortal_pair
