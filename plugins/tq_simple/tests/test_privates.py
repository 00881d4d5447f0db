"""Each private name of TransferQueue that is used has one definition, and is where its docstring says."""

import ast
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import dataplane_tq_simple
from dataplane_tq_simple._diagnosis import TRIED

SOURCE = Path(dataplane_tq_simple.__file__).parent


def names():
    """What the docstrings in ``_privates.py`` name. Read, not imported: an import ends at the first that moved."""
    body = ast.parse((SOURCE / "_privates.py").read_text()).body
    texts = [ast.get_docstring(node) for node in body if isinstance(node, ast.FunctionDef)]
    texts += [node.value.value for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    return [found for text in texts for found in re.findall(r"^``(\w[\w.]*:[\w.]+)``", text)]


def is_there(name):
    """Looks in the source: Ray has made something else of the classes, and their attributes come with an object."""
    module, _, path = name.partition(":")
    outer, _, attribute = path.partition(".")
    found = importlib.import_module(module)
    if not attribute:
        return hasattr(found, outer)
    tree = ast.parse(inspect.getsource(found))
    (owner,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == outer] or [ast.Pass()]
    methods = {node.name for node in ast.walk(owner) if isinstance(node, ast.FunctionDef)}
    kept = {
        node.attr for node in ast.walk(owner) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    return attribute in methods | kept


def test_pip_accepts_the_versions_that_were_tried():
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    assert f"TransferQueue>={TRIED[0]},<={TRIED[-1]}" in project["dependencies"]


def test_transfer_queue_has_moved_none_of_them():
    assert [name for name in names() if not is_there(name)] == []


def test_each_has_a_definition_and_no_other_module_uses_transfer_queue():
    tree = ast.parse((SOURCE / "_privates.py").read_text())
    assert len(names()) == sum(isinstance(node, ast.FunctionDef | ast.AnnAssign) for node in tree.body)
    users = {
        path.name
        for path in SOURCE.rglob("*.py")
        if re.search(r"^\s*(from|import) transfer_queue", path.read_text(), re.M)
    }
    assert users == {"_privates.py"}
