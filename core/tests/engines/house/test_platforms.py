"""Core is imported, and noop runs, on systems without the calls that only Linux or POSIX has."""

import ast
import subprocess
import sys
from pathlib import Path

import dataplane_core

SOURCE = Path(dataplane_core.__file__).parent

#: Modules that Windows lacks.
MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "termios", "tty"}
#: Attributes of modules that Windows or macOS lacks.
ATTRIBUTES = {
    "os": {
        "fork",
        "getuid",
        "geteuid",
        "killpg",
        "memfd_create",
        "pidfd_open",
        "register_at_fork",
        "sched_getaffinity",
    },
    "signal": {"SIGKILL", "SIGHUP", "SIGSTOP", "SIGCONT", "pidfd_send_signal"},
    "socket": {"AF_UNIX", "SO_PEERCRED", "send_fds", "recv_fds"},
    "mmap": {"MADV_HUGEPAGE", "MAP_ANONYMOUS", "MAP_PRIVATE", "MAP_SHARED", "PROT_READ"},
}
#: Where they may be used, and why that is right.
ALLOWED = {
    "host_memory/arena.py": "only shm_store makes an arena, and it is for Linux",
    "host_memory/copying.py": "asks first whether there are forks",
    "host_memory/limits.py": "asks first whether there are masks of cores",
    "host_memory/recycled.py": "asks first whether mmap has the flags",
    "backends/private_folder.py": "the folder of a server that redis_store or shm_store starts, which Windows lacks",
    "backends/owned_process.py": "asks first whether there are forks",
    "middleware/events.py": "a lock tells which segments may be deleted; without it, all count as written",
    "hosting/durable.py": "locks a folder of shm_store or tq_simple, which are for Linux",
    "hosting/session.py": "uses a Unix socket only where the host has one; asks first whether there are forks",
    "hosting/server.py": "uses these only over a Unix socket, which shm_store chooses on Linux",
}


def uses(path):
    """(line, name) of each use."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names if each.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield node.lineno, node.module
        elif isinstance(node, ast.ImportFrom) and node.module in ATTRIBUTES:
            names = (each.name for each in node.names if each.name in ATTRIBUTES[node.module])
            yield from ((node.lineno, f"{node.module}.{name}") for name in names)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.attr in ATTRIBUTES.get(node.value.id, ())
        ):
            yield node.lineno, f"{node.value.id}.{node.attr}"


def test_calls_of_one_system_are_used_only_where_they_are_guarded():
    found = {
        f"{path.relative_to(SOURCE)}:{line} uses {name}"
        for path in SOURCE.rglob("*.py")
        if not {str(path.relative_to(SOURCE)), path.relative_to(SOURCE).parts[0]} & ALLOWED.keys()
        for line, name in uses(path)
    }
    assert found == set()


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

import dataplane_core.batch, dataplane_core.cli, dataplane_core.dataloader, dataplane_core.middleware
from dataplane_core import connect

with connect({{"backend": "noop", "middleware": ["metrics", "wire_guard"]}}) as client:
    client.register_partition("p", ["x"], None, ["t"])
    client.put_samples(["a"], "p", {{"x": torch.ones(1, 1 << 20)}})
    assert client.get_data(client.claim_meta("p", "t", ["x"], 1))["x"].sum() == 1 << 20
    client.save("saved")
"""


def test_noop_runs_without_them(tmp_path):
    attributes = {module: sorted(names) for module, names in ATTRIBUTES.items()}
    program = WITHOUT.format(modules=sorted(MODULES - {"posix"}), attributes=attributes)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
