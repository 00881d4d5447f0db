"""Core is imported, and noop runs, on systems without the calls that only Linux or POSIX has."""

import subprocess
import sys

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

import dataplane_core.batch, dataplane_core.cli, dataplane_core.dataloader, dataplane_core.middleware
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
