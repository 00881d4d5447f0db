"""The house's doors: what core may import, and what importing it may do."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import dataplane_core

SOURCE = Path(dataplane_core.__file__).parent
FORBIDDEN = ("ray", "megatron", "torch.distributed", "transfer_queue", "redis", "mooncake")
OURS = ("dataplane_noop", "dataplane_redis", "dataplane_tq_simple", "dataplane_mooncake", "dataplane_integrations")


def imports(path):
    """(module, whether at module level) of every import in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, id(node) in top
            yield from ((f"{node.module}.{alias.name}", id(node) in top) for alias in node.names)


def named(module, roots):
    return any(module == root or module.startswith(root + ".") for root in roots)


def test_core_imports_no_backend_no_engine_and_no_trainer():
    found = []
    for path in SOURCE.rglob("*.py"):
        for module, _ in imports(path):
            allowed = path == SOURCE / "batch" / "gather.py" and module == "torch.distributed"
            if named(module, (*FORBIDDEN, *OURS)) and not allowed:
                found.append(f"{path.relative_to(SOURCE)}: {module}")
    assert found == []


def test_all_gather_alone_imports_torch_distributed_and_only_when_called():
    levels = [top for module, top in imports(SOURCE / "batch" / "gather.py") if module == "torch.distributed"]
    assert levels == [False]


def test_importing_core_changes_no_environment_opens_no_socket_and_configures_no_logging():
    code = """
import json, logging, os, socket
opened = []
class Watched(socket.socket):
    def __init__(self, *args, **kwargs):
        opened.append(args)
        super().__init__(*args, **kwargs)
import tensordict, torch, pydantic  # what others do is not ours
before, handlers, level = dict(os.environ), list(logging.root.handlers), logging.root.level
socket.socket = Watched
import dataplane_core, dataplane_core.middleware.metrics, dataplane_core.cli
print(json.dumps([before == dict(os.environ), opened, handlers == logging.root.handlers, level == logging.root.level]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [True, [], True, True]
