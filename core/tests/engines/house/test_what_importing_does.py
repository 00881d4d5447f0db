"""What importing does, on which platforms, and which helpers need a trainer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dataplane_core
from dataplane_core import connect, kv_first_write, read_columns, write_columns

_CODE = """
import json, sys
import dataplane_core.client, dataplane_core.codec
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


def test_the_client_imports_no_compiler_and_tensordicts_marks_are_made_once_somebody_does():
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [False, "torch.compiler", [True, True], True]


def test_the_ledger_the_command_and_the_client_are_imported_without_torch():
    """So the process of a ledger starts fast and stays small, and a command that only asks answers at once."""
    code = (
        "import sys, dataplane_core.ledger, dataplane_core.host_memory, dataplane_core.cli, dataplane_core.connecting\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


def test_every_wing_that_uses_tensordict_delays_its_marks():
    core = Path(dataplane_core.__file__).parent
    wings = {file.relative_to(core).parts[0] for file in core.rglob("*.py") if "tensordict import" in file.read_text()}
    faces = {wing: (core / wing / "__init__.py").read_text() for wing in wings}
    assert faces.keys() == {"batch", "client", "codec"}
    del faces["client"]  # it imports the codec first
    assert all("import _compiler_marks" in face for face in faces.values())


def test_importing_our_packages_leaves_the_process_alone():
    """It changes no environment, opens no socket, starts no thread, configures no logging and imports no engine."""
    code = """
import importlib, importlib.util, json, logging, os, socket, sys, threading
opened = []
class Watched(socket.socket):
    def __init__(self, *args, **kwargs):
        opened.append(args)
        super().__init__(*args, **kwargs)
import tensordict, torch, pydantic  # what others do is not ours
before, handlers, level = dict(os.environ), list(logging.root.handlers), logging.root.level
socket.socket = Watched
import dataplane_core.middleware.metrics, dataplane_core.cli
for name in ("noop", "shm", "redis", "tq_simple", "mooncake", "mooncake.machine", "integrations.trainer.megatron"):
    if importlib.util.find_spec("dataplane_" + name.partition(".")[0]):
        importlib.import_module("dataplane_" + name)
print(json.dumps([
    before == dict(os.environ), opened, threading.active_count(), handlers == logging.root.handlers,
    level == logging.root.level, sorted({"ray", "mooncake", "megatron"} & set(sys.modules))
]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [True, [], 1, True, True, []]


# --- platforms --------------------------------------------------------------------------------------------------------

#: Modules that Windows lacks.
MODULES = ["fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"]
#: Attributes of modules that Windows or macOS lacks.
ATTRIBUTES = {
    "os": [
        *("fork", "getuid", "geteuid", "killpg", "memfd_create", "pidfd_open", "register_at_fork", "sched_getaffinity")
    ],
    "signal": ["SIGKILL", "SIGHUP", "SIGSTOP", "SIGCONT", "pidfd_send_signal"],
    "socket": ["AF_UNIX", "SO_PEERCRED", "send_fds", "recv_fds"],
    "mmap": ["MADV_HUGEPAGE", "MAP_ANONYMOUS", "MAP_PRIVATE", "MAP_SHARED", "PROT_READ"],
}


WITHOUT = """
import os, signal, sys
import tensordict, torch  # these have guards of their own


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in {modules!r}:
            raise ModuleNotFoundError(name)


for name in {modules!r}:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Refuse())
for module, names in {attributes!r}.items():
    module = __import__(module)
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

import dataplane_core.batch, dataplane_core.cli, dataplane_core.middleware
from dataplane_core import connect

with connect({{"backend": "noop", "middleware": ["metrics", "wire_guard"]}}) as client:
    client.register_partition("p", ["x"], None, ["t"])
    client.put_samples(["a"], "p", {{"x": torch.ones(1, 1 << 20)}})
    assert client.get_data(client.claim_meta("p", "t", ["x"], 1))["x"].sum() == 1 << 20
    client.save("saved")
"""


def test_noop_runs_without_them(tmp_path):
    program = WITHOUT.format(modules=MODULES, attributes=ATTRIBUTES)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


# --- helpers of trainers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "under a default device"])
def test_a_trainers_helpers_do_the_same(compiled):
    ids, tokens = ["a", "b"], torch.tensor([[1, 2, 0], [1, 2, 3]])
    batch = {"input_ids": tokens, "input_lengths": torch.tensor([2, 3]), "logprobs": [[0.5], [1, 2.0]]}
    with connect({"backend": "noop"}) as client:
        client.register_partition("p", [], None, [])

        def step():
            meta = kv_first_write(batch, sample_ids=ids, dp_client=client, partition_id="p")
            meta = write_columns(client, meta, {"prev_logprobs": tokens * 0.5})
            return read_columns(client, meta)

        if compiled:
            found = torch.compile(step, backend="eager")()
        else:
            with torch.device("meta"):
                found = step()
    assert found["input_ids"].equal(tokens)
    assert found["prev_logprobs"].equal(tokens * 0.5)
