"""A clean environment for the tests of this folder."""

from clean_environment import clean as clean
