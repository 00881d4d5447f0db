"""Importing core does not import torch's compiler, and what tensordict says to the compiler is not lost."""

import json
import subprocess
import sys

_CODE = """
import json, sys
import dataplane_core.cli
import tensordict.base, tensordict.utils, torch
was_imported = "torch._dynamo" in sys.modules
from torch._dynamo import trace_rules
marked = [tensordict.base._foreach_copy_compiled, tensordict.utils._add_batch_dim_c]
print(json.dumps([
    was_imported,
    torch.compiler.allow_in_graph.__module__,
    [trace_rules.is_callable_allowed(each) for each in marked],
    tensordict.utils._lock_warn._dynamo_marked_constant,
]))
"""


def test_core_imports_no_compiler_and_tensordicts_marks_are_made_once_somebody_does():
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [False, "torch.compiler", [True, True], True]
