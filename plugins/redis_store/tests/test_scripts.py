"""The texts of the scripts: each name is defined where it is used, and none is defined in vain."""

import re

import pytest

from dataplane_redis import _scripts
from dataplane_redis._scripts import SCRIPTS

_TOKENS = re.compile(r"--[^\n]*|'(?:\\.|[^'\\])*'|[A-Za-z_]\w*|\d[\w.]*|\.\.\.?|[=~<>]=|\S")
_KEYWORDS = {"and", "break", "do", "else", "elseif", "end", "false", "for", "function", "if", "in", "local", "nil"}
_KEYWORDS |= {"not", "or", "repeat", "return", "then", "true", "until", "while"}
_GLOBALS = {"KEYS", "ARGV", "redis", "cmsgpack", "struct", "string", "table", "math", "ipairs", "pairs", "unpack"}
_GLOBALS |= {"tonumber", "tostring", "type", "error"}


def undefined_names(text):
    """Names that no scope around their use defines."""
    tokens = [each for each in _TOKENS.findall(text) if not each.startswith(("--", "'"))]
    scopes, braces, loop, found = [set(_GLOBALS)], [], set(), set()
    at = 0

    def names():
        """Those that follow, separated by commas."""
        nonlocal at
        listed = set()
        while re.match(r"[A-Za-z_,]", tokens[at + 1]) and tokens[at + 1] not in _KEYWORDS:
            at += 1
            listed.add(tokens[at])
        return listed

    def parameters():
        nonlocal at
        at = tokens.index("(", at)
        listed = names()
        at = tokens.index(")", at)
        return listed

    while at < len(tokens):
        token = tokens[at]
        if token == "local" and tokens[at + 1] == "function":
            scopes[-1].add(tokens[at + 2])
            at += 2
            scopes.append(parameters())
        elif token == "local":
            scopes[-1] |= names()
        elif token == "function":
            scopes.append(parameters())
        elif token == "for":
            loop = names()
        elif token in ("do", "then", "repeat"):
            scopes.append(loop)
            loop = set()
        elif token in ("end", "until", "elseif", "else"):
            scopes.pop()
            if token == "else":
                scopes.append(set())
        elif token in "{([":
            braces.append(token)
        elif token in "})]":
            braces.pop()
        elif re.match(r"[A-Za-z_]", token) and token not in _KEYWORDS and tokens[at - 1] not in (".", ":"):
            is_key = braces[-1:] == ["{"] and tokens[at - 1] in "{," and tokens[at + 1] == "="
            if not is_key and not any(token in scope for scope in scopes):
                found.add(token)
        at += 1
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_name_of_a_script_is_defined_where_it_is_used(name):
    assert undefined_names(SCRIPTS[name].text.decode().partition("\n")[2]) == set()


def test_a_name_that_is_defined_elsewhere_only_is_found():
    text = "local function one(a) if a then local inner = 1 end return inner, {key = a} end return two(one)"
    assert undefined_names(text) == {"inner", "two"}


def names_given_in(text):
    """Names of variables, parameters and functions."""
    text = re.sub(r"--.*", "", text)
    lists = re.findall(r"\blocal (?!function)([\w, ]+)", text) + re.findall(r"\bfor ([\w, ]+?) (?:=|in)\b", text)
    lists += re.findall(r"\bfunction ?\w*\(([\w, ]*)", text) + re.findall(r"\blocal function (\w+)", text)
    return {name for each in lists for name in re.findall(r"\w+", each)}


def test_no_script_gives_the_name_of_a_definition_to_something_else():
    """A block that wants the definition would get the other."""
    definitions = _scripts._definitions()
    names = {name for each in definitions for name in each.names}
    for name, script in SCRIPTS.items():
        assert not (names_given_in(_scripts._read(name)) | set(script.names)) & names, name
    for each in definitions:
        assert not (names_given_in("".join(each.lines)) - each.names) & names, each.names


def test_each_definition_is_in_some_script():
    used = "".join(script.text.decode() for script in SCRIPTS.values())
    assert [each.names for each in _scripts._definitions() if each.lines[0] not in used] == []
