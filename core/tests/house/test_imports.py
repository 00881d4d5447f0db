"""Who imports whom, and that torch's defaults change nothing."""

import ast
import functools
import importlib
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import dataplane_core

SOURCE = Path(dataplane_core.__file__).parent
ROOT = Path(__file__).resolve().parents[3]
PACKAGES = [path.parent for path in [*ROOT.glob("plugins/*/src/*/__init__.py"), *ROOT.glob("*/src/*/__init__.py")]]
PACKAGES.remove(SOURCE)
FORBIDDEN = (
    *("ray", "megatron", "torch.distributed", "transfer_queue", "redis", "mooncake"),
    *(path.name for path in PACKAGES),
)


class Import(NamedTuple):
    """One name that a file imports: ``from module import name`` or, with no name, ``import module``."""

    module: str
    name: str | None
    at_module_level: bool

    @property
    def whole(self):
        return self.module if self.name is None else f"{self.module}.{self.name}"


@functools.cache
def imports_of(path):
    """Every import of a file. Its tree is not kept: those of all files would make each collection of garbage slow."""
    found, tree = [], ast.parse(path.read_text(encoding="utf-8"))
    unread = [(tree.body, True)]
    while unread:
        statements, at_module_level = unread.pop()
        for node in statements:
            if isinstance(node, ast.Import):
                found += [Import(alias.name, None, at_module_level) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                found += [Import(node.module, alias.name, at_module_level) for alias in node.names]
            for blocks in ("body", "orelse", "finalbody", "handlers", "cases"):
                unread.append((getattr(node, blocks, []), False))
    return found


def named(module, roots):
    return any(module == root or module.startswith(root + ".") for root in roots)


def test_core_imports_no_backend_no_engine_and_no_trainer():
    """But for `all_gather`, which imports `torch.distributed` when it is called."""
    found = {
        f"{path.relative_to(SOURCE)}: {each.module}"
        for path in SOURCE.rglob("*.py")
        for each in imports_of(path)
        if named(each.module, FORBIDDEN) or named(each.whole, FORBIDDEN)
        if (path.name, each.whole, each.at_module_level) != ("batched_data_dict.py", "torch.distributed", False)
    }
    assert found == set()


# --- wings ------------------------------------------------------------------------------------------------------------

#: From the ground up: each imports only from those before it. The first two lines are of modules beside the wings.
WINGS = (
    *("_compiler_marks", "errors", "arguments", "durable_files", "ownership", "entry_points", "config", "schema"),
    *("meta", "digests", "spec", "host_memory"),
    *("codec", "ledger", "hosting", "log", "kept_extents", "backends", "saves", "middleware", "client"),
    *("connecting", "sharding", "batch", "cli"),
)
#: Sources that stand outside of core, and see it as its users do.
OUTSIDE = [
    path
    for pattern in ("plugins/*/src", "*/src", "examples", "benchmarks")
    for folder in ROOT.glob(pattern)
    for path in sorted(folder.rglob("*.py"))
    if not path.is_relative_to(SOURCE)
]


def modules_of_core(path):
    """The modules of core that a file imports from, as parts of their names behind ``dataplane_core``."""
    found = {each.module for each in imports_of(path) if each.name and each.module.startswith("dataplane_core.")}
    return [module.split(".")[1:] for module in sorted(found)]


def test_no_wing_imports_from_one_above_it():
    found = []
    for path in SOURCE.rglob("*.py"):
        wing = path.relative_to(SOURCE).with_suffix("").parts[0]
        if wing in ("__init__", "__main__"):
            continue
        for parts in modules_of_core(path):
            if WINGS.index(parts[0]) > WINGS.index(wing):
                found.append(f"{path.relative_to(SOURCE)}: {'.'.join(parts)}")
    assert found == []


def test_other_packages_enter_a_wing_by_its_face():
    """A face exports what another package imports. Within core, a module imports from the one that has the name."""
    found = [
        f"{path.relative_to(ROOT)}: {'.'.join(parts)}"
        for path in OUTSIDE
        for parts in modules_of_core(path)
        if len(parts) > 1
    ]
    assert len(OUTSIDE) > 50
    assert found == []


def circle(source):
    """The modules of a package that import each other, or one that does. Also imports for types count."""
    modules = {
        ".".join(path.relative_to(source.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in source.rglob("*.py")
    }
    edges = {}
    for name, path in modules.items():
        edges[name] = {each.whole if each.whole in modules else each.module for each in imports_of(path)}
    while leaves := [name for name, imported in edges.items() if not imported & edges.keys()]:
        for name in leaves:
            del edges[name]
    return sorted(edges)


@pytest.mark.parametrize("wing", [name for name in WINGS if (SOURCE / name).is_dir()])
def test_a_face_says_what_lives_in_the_wing_and_what_others_may_import(wing):
    face = importlib.import_module(f"dataplane_core.{wing}")
    assert len((face.__doc__ or "").strip().splitlines()) >= 3  # what lives here; a blank line; who calls it
    assert all(hasattr(face, name) for name in face.__all__)


# --- other packages ---------------------------------------------------------------------------------------------------

#: Who may import another package than core.
ENTERED = {
    ("dataplane_mooncake", "dataplane_tq_simple"),
    ("dataplane_tools", "dataplane_observe"),
    ("dataplane_recording", "dataplane_observe"),
}


@pytest.mark.parametrize("source", [SOURCE, *PACKAGES], ids=lambda source: source.name)
def test_no_circle_of_imports_within_a_package(source):
    assert circle(source) == []


def test_packages_stand_alone_and_enter_rooms_by_their_faces():
    """Only tq_mooncake imports another backend, tq_simple. Whoever reads recordings imports observe."""
    found = []
    for source in PACKAGES:
        others = {each.name for each in PACKAGES} - {source.name}
        rooms = {f"{source.name}.{path.parent.name}" for path in source.glob("*/__init__.py")}
        for path in source.rglob("*.py"):
            own = ".".join((source.name, *path.relative_to(source).parts[:1]))
            imported = {name for imports in imports_of(path) for name in (imports.module, imports.whole)}
            for module in imported:
                entered = (source.name, module.split(".")[0]) in ENTERED
                inside = "._" in module and named(module, others | rooms - {own})
                if inside or (named(module, others) and not entered):
                    found.append(f"{path.relative_to(ROOT)}: {module}")
    assert {"dataplane_integrations", "dataplane_noop", "dataplane_testkit"} <= {each.name for each in PACKAGES}
    assert found == []


# --- torch's defaults -------------------------------------------------------------------------------------------------

#: What makes a tensor on the default device, if no device is named.
_MAKERS = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "nested_tensor", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor"),
    *("sparse_coo_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}
#: Those of the default dtype, whatever they are given.
_OF_DEFAULT_DTYPE = {
    *("empty", "empty_permuted", "empty_strided", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros")
}


def _lacking(call):
    """What a call that makes a tensor leaves to torch's defaults."""
    function = call.func
    if not isinstance(function, ast.Attribute) or not ast.unparse(function.value).startswith("torch"):
        return set()
    needed = {"device"} if function.attr in _MAKERS else set()
    return (needed | ({"dtype"} if function.attr in _OF_DEFAULT_DTYPE else set())) - {
        each.arg for each in call.keywords
    }


def test_every_new_tensor_names_its_device():
    files = [
        file
        for folder in ("core", "observe", "tools", "plugins", "integrations", "compat")
        for file in (ROOT / folder).rglob("src/**/*.py")
    ]
    assert len(files) > 100
    candidates = re.compile(rf"\btorch[\w.]*\.({'|'.join(_MAKERS)})\(")
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)} lacks {sorted(_lacking(node))}"
        for file in files
        if candidates.search(source := file.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and _lacking(node)
    ]
    assert not found, "\n".join(found)
