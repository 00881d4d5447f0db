"""The fixtures of replay, for all files of this folder."""

from replaying import commit, fill, held, make_buffer

__all__ = ["commit", "fill", "held", "make_buffer"]
