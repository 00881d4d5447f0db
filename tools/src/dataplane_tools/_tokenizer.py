"""The tokenizer that ``--tokenizer`` names: turns token ids into text. Nothing is downloaded."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from dataplane_core.errors import InvalidRequestError, UnsupportedOperationError
from dataplane_tools._sample import Decode

_FILE: Final = "tokenizer.json"
#: What a decoder writes for bytes that are no whole character.
_BROKEN: Final = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """Turns ids into text.

    Args:
        name: A folder with a ``tokenizer.json``, such a file, a name of Hugging Face whose file is in its cache, or
            ``module:function``, which turns a list of ids into text.
        skip_special: Leave special tokens out. A function decides by itself.
    """

    def __init__(self, name: str, *, skip_special: bool = False) -> None:
        self._name = name
        self._decode = _load(name, skip_special)
        self._pieces: dict[int, str] = {}

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        try:
            text = self._decode(list(ids))
        except Exception as error:
            some = ", ".join(map(str, ids[:5]))
            raise InvalidRequestError(
                f"--tokenizer {self._name} cannot decode [{some}{', ...' if len(ids) > 5 else ''}]: "
                f"{type(error).__name__}: {error}."
            ) from error
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"--tokenizer {self._name} returned {type(text).__name__}. Expected a function that returns a str."
            )
        return text

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each id. A character of several ids is with the first of them."""
        for token in {*ids} - self._pieces.keys():
            # the second of two: a decoder may drop the space before the first word
            self._pieces[token] = self.decode([token, token])[len(self.decode([token])) :]
        pieces: list[str] = []
        for broken, run in groupby(ids, key=lambda token: _BROKEN in self._pieces[token]):
            some = list(run)
            pieces += [self.decode(some), *[""] * (len(some) - 1)] if broken else map(self._pieces.__getitem__, some)
        return pieces


def _load(name: str, skip_special: bool) -> Decode:
    path = Path(name)
    if path.is_dir():
        path = path / _FILE
        if not path.is_file():
            raise InvalidRequestError(f"--tokenizer {name} refused: the folder has no {_FILE}.")
    elif not path.is_file():
        module, colon, function = name.partition(":")
        if colon:
            return _function(name, module, function)
        path = _cached(name)
    try:
        from tokenizers import Tokenizer as Loaded
    except ImportError as error:
        raise _lacks("tokenizers") from error
    try:
        tokenizer = Loaded.from_file(os.fspath(path))
    except Exception as error:
        raise InvalidRequestError(f"--tokenizer {name} refused: '{path}' is no tokenizer: {error}.") from error
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=skip_special))


def _function(name: str, module: str, function: str) -> Decode:
    sys.path.append(os.getcwd())
    try:
        found: Any = getattr(importlib.import_module(module), function)
    except Exception as error:
        raise InvalidRequestError(
            f"--tokenizer {name} refused: {type(error).__name__}: {error}. Expected module:function, which Python can "
            "import from here."
        ) from error
    finally:
        sys.path.pop()
    if not callable(found):
        raise InvalidRequestError(f"--tokenizer {name} refused: it is no function.")
    decode: Decode = found
    return decode


def _cached(name: str) -> Path:
    """The file of a name of Hugging Face, as its tools keep it."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError as error:
        raise _lacks("huggingface_hub") from error
    try:
        found = try_to_load_from_cache(name, _FILE)
    except ValueError:  # no name of Hugging Face
        found = None
    if not isinstance(found, str):
        raise InvalidRequestError(
            f"--tokenizer {name} refused: there is no such file or folder, and no {_FILE} of that name in the cache of "
            "Hugging Face. Nothing is downloaded: name a folder, a tokenizer.json, or module:function."
        )
    return Path(found)


def _lacks(package: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"the package {package} is not installed, which reads tokenizers.", hint="pip install 'dataplane-tools[text]'"
    )
