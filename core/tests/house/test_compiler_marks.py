"""Importing core does not import torch's compiler, and what tensordict says to the compiler is not lost."""

import json
import subprocess
import sys


def outcome(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_core_and_its_command_are_imported_without_the_compiler():
    code = """
import json, sys
import dataplane_core.cli, tensordict
print(json.dumps("torch._dynamo" in sys.modules))
"""
    assert outcome(code) is False


def test_what_tensordict_marks_for_the_compiler_is_marked_once_it_is_imported():
    """The same functions, whether tensordict is imported by us or before us."""
    code = """
import json
import {first}
import torch, tensordict.base, tensordict.utils
from torch._dynamo import trace_rules
from tensordict import TensorDict
before = torch.compiler.allow_in_graph.__module__
compiled = torch.compile(lambda data: data["x"] + data.to(torch.float64)["x"], backend="eager", fullgraph=True)
marked = [tensordict.base._foreach_copy_compiled, tensordict.utils._add_batch_dim_c]
print(json.dumps([
    before,
    [trace_rules.is_callable_allowed(each) for each in marked],
    tensordict.utils._lock_warn._dynamo_marked_constant,
    compiled(TensorDict({{"x": torch.ones(2)}}, [2])).tolist(),
]))
"""
    ours = outcome(code.format(first="dataplane_core"))
    assert ours == ["torch.compiler", [True, True], True, [2.0, 2.0]]
    assert ours == outcome(code.format(first="tensordict, dataplane_core"))
