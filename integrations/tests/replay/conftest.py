"""The fixtures of replay, for all files of this folder."""

from replaying import answers_fixture, commit, fill, held, make_buffer, write_fixture

__all__ = ["answers_fixture", "commit", "fill", "held", "make_buffer", "write_fixture"]
