"""Lets Python 3.11 import other projects, also in Ray's workers: pydantic refuses ``typing.TypedDict`` before 3.12."""

import sys
import typing

import typing_extensions

if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict
