"""The house's doors: what core and the other packages may import."""

import ast
import functools
import importlib
from pathlib import Path

import pytest

import dataplane_core

SOURCE = Path(dataplane_core.__file__).parent
FORBIDDEN = ("ray", "megatron", "torch.distributed", "transfer_queue", "redis", "mooncake")
OURS = (
    "dataplane_testkit",
    "dataplane_tools",
    "dataplane_compat",
    "dataplane_noop",
    "dataplane_redis",
    "dataplane_shm",
    "dataplane_tq_simple",
    "dataplane_mooncake",
    "dataplane_integrations",
)


@functools.cache
def nodes_of(path):
    """The statements of a file that import, and the whole of it at first."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))]


def imports(path):
    """(module, whether at module level) of every import in a file."""
    tree, *nodes = nodes_of(path)
    top = set(map(id, tree.body))
    for node in nodes:
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


# --- wings ------------------------------------------------------------------------------------------------------------

#: From the ground up: each imports only from those before it.
WINGS = (
    *(
        "_compiler_marks",
        "errors",
        "arguments",
        "regular_files",
        "durable_files",
        "entry_points",
        "config",
        "schema",
        "meta",
        "packed",
    ),  # modules beside the wings
    *(
        "spec",
        "host_memory",
        "codec",
        "ledger",
        "hosting",
        "journal",
        "backends",
        "saves",
        "middleware",
        "client",
        "connecting",
        "dataloader",
        "sharding",
        "batch",
    ),
    "cli",
)
ROOT = Path(__file__).resolve().parents[3]
#: Sources that stand outside of core, and see it as its users do.
OUTSIDE = [
    path
    for pattern in (
        "plugins/*/src",
        "integrations/src",
        "examples",
        "benchmarks",
        "testkit/src",
        "tools/src",
        "compat/src",
    )
    for folder in ROOT.glob(pattern)
    for path in sorted(folder.rglob("*.py"))
]


def modules_of_core(path):
    """The modules of core that a file imports from, as parts of their names behind ``dataplane_core``."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dataplane_core."):
            yield node.module.split(".")[1:]


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


def test_wings_and_other_packages_enter_a_wing_by_its_face():
    found = []
    for path in [*SOURCE.rglob("*.py"), *OUTSIDE]:
        inside = path.relative_to(SOURCE).parts[0] if path.is_relative_to(SOURCE) else None
        for parts in modules_of_core(path):
            if len(parts) > 1 and parts[0] != inside:
                found.append(f"{path.relative_to(ROOT)}: {'.'.join(parts)}")
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
        nodes = [node for node in nodes_of(path) if isinstance(node, ast.ImportFrom)]
        found = [(node.module, f"{node.module}.{alias.name}") for node in nodes for alias in node.names]
        edges[name] = {inner if inner in modules else module for module, inner in found}
        edges[name] |= {each.name for node in nodes_of(path) if isinstance(node, ast.Import) for each in node.names}
    while leaves := [name for name, imported in edges.items() if not imported & edges.keys()]:
        for name in leaves:
            del edges[name]
    return sorted(edges)


def test_no_circle_of_imports_within_core():
    assert circle(SOURCE) == []


@pytest.mark.parametrize("wing", [name for name in WINGS if (SOURCE / name).is_dir()])
def test_a_face_says_what_lives_in_the_wing_and_what_others_may_import(wing):
    face = importlib.import_module(f"dataplane_core.{wing}")
    assert len((face.__doc__ or "").strip().splitlines()) >= 3  # what lives here; a blank line; who calls it
    assert all(hasattr(face, name) for name in face.__all__)


# --- other packages ---------------------------------------------------------------------------------------------------

PACKAGES = sorted(
    path.parent
    for pattern in ("plugins/*/src/*/__init__.py", "*/src/*/__init__.py")
    for path in ROOT.glob(pattern)
    if path.parent != SOURCE
)


@pytest.mark.parametrize("source", PACKAGES, ids=lambda source: source.name)
def test_no_circle_of_imports_within_a_package(source):
    assert circle(source) == []


def test_no_package_imports_another_but_tq_mooncake_which_enters_by_a_face():
    found = []
    for source in PACKAGES:
        others = {each.name for each in PACKAGES} - {source.name}
        for path in source.rglob("*.py"):
            for module in {module for module, _ in imports(path) if named(module, others)}:
                entered = source.name == "dataplane_mooncake" and named(module, ["dataplane_tq_simple"])
                if not entered or "._" in module:
                    found.append(f"{path.relative_to(ROOT)}: {module}")
    assert {"dataplane_integrations", "dataplane_noop", "dataplane_testkit"} <= {each.name for each in PACKAGES}
    assert found == []


def test_rooms_of_a_package_enter_each_other_by_their_faces():
    found = []
    for source in PACKAGES:
        rooms = [f"{source.name}.{path.parent.name}" for path in source.glob("*/__init__.py")]
        for path in source.rglob("*.py"):
            own = ".".join((source.name, *path.relative_to(source).parts[:1]))
            for module in {module for module, _ in imports(path) if named(module, set(rooms) - {own})}:
                if "._" in module:
                    found.append(f"{path.relative_to(ROOT)}: {module}")
    assert found == []
