"""The packages around core: what each may import of the others, and the names that it promises."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
#: Import name -> its folder.
PACKAGES = {
    path.name: path for path in sorted([*ROOT.glob("*/src/dataplane_*"), *ROOT.glob("plugins/*/src/dataplane_*")])
}
#: Which other packages than core it builds on.
BUILDS_ON = {"dataplane_mooncake": {"dataplane_tq_simple"}}

#: A change here is a change of the package's version.
FACES = {
    "dataplane_testkit": [
        "AuthorsClass",
        "BackendConformance",
        "ConformanceError",
        "Disturbance",
        "Faults",
        "Progress",
        "Report",
        "Settings",
        "Suite",
        "Verdict",
        "backend_of",
        "chapter_of",
        "limit_of",
        "rule_of",
        "run_chaos",
        "to_json",
    ],
    "dataplane_testkit.commands": ["conformance", "new_plugin"],
    "dataplane_tools": [],
    "dataplane_tools.commands": ["flow", "inspect", "metrics", "top", "units"],
    "dataplane_compat": [],
    "dataplane_compat.nemo_rl": ["NemoRLAdapter", "Section", "activate", "client_class"],
    "dataplane_compat.transfer_queue": [
        "BaseSampler",
        "BatchMeta",
        "GRPOGroupNSampler",
        "KVBatchMeta",
        "RankAwareSampler",
        "SeqlenBalancedSampler",
        "SequentialSampler",
        "StorageKeyNotFoundError",
        "StreamingDataLoader",
        "StreamingDataset",
        "TransferQueueClient",
        "async_kv_batch_get",
        "async_kv_batch_get_by_meta",
        "async_kv_batch_put",
        "async_kv_clear",
        "async_kv_list",
        "async_kv_put",
        "close",
        "get_client",
        "get_metrics_endpoint",
        "init",
        "kv_batch_get",
        "kv_batch_get_by_meta",
        "kv_batch_put",
        "kv_clear",
        "kv_list",
        "kv_put",
        "load_checkpoint",
        "save_checkpoint",
    ],
    "dataplane_integrations": ["DataPlanePolicy", "DataPlaneWorkerMixin"],
    "dataplane_integrations.ray": [
        "ActorGroup",
        "ActorRequest",
        "NodeReport",
        "RayWorkerGroup",
        "backend_runtime_env",
        "check_backend_on_nodes",
        "check_placement",
        "require_backend_on_nodes",
        "start_actors",
        "wait_for_all",
    ],
    "dataplane_integrations.replay": [
        "AsyncCollector",
        "AsyncRollout",
        "BufferCounts",
        "BufferView",
        "ClaimedBatch",
        "Collector",
        "CollectorCounts",
        "GroupView",
        "InOrderPolicy",
        "ReadyFirstPolicy",
        "RemoteReplayBuffer",
        "ReplayBuffer",
        "Reservation",
        "RestoredReplay",
        "Rollout",
        "StalenessPolicy",
        "StreamingConsumer",
        "TargetStepPolicy",
        "WindowedPolicy",
        "group_of",
        "parse_sample_id",
        "restore_replay",
        "save_replay",
    ],
    "dataplane_integrations.rollout": [
        "DataPlaneRolloutMixin",
        "DynamicSampling",
        "GroupRule",
        "RolloutReceipt",
        "SamplingCounts",
        "SyncRolloutActor",
        "all_match",
        "flatten_message_logs",
        "mint_sample_ids",
        "tag_varies",
    ],
    "dataplane_integrations.trainer": [
        "Batching",
        "DataPlanePolicy",
        "DataPlaneWorkerMixin",
        "DynamicBatching",
        "FetchPolicy",
        "InProcessWorkerGroup",
        "SequencePacking",
        "WorkerGroup",
    ],
}


def imported(path):
    """The modules of ours that a file imports from."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("dataplane_"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dataplane_"):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_go_one_way():
    found = [
        f"{path.relative_to(ROOT)}: {module}"
        for name, folder in PACKAGES.items()
        for path in folder.rglob("*.py")
        for module in imported(path)
        if module.split(".")[0] not in {name, "dataplane_core", *BUILDS_ON.get(name, ())}
    ]
    assert {"dataplane_core", "dataplane_testkit", "dataplane_tools", "dataplane_compat"} <= PACKAGES.keys()
    assert found == []


@pytest.mark.parametrize("name", ["dataplane_testkit", "dataplane_tools", "dataplane_integrations", "dataplane_compat"])
def test_no_circle_of_imports_within_a_package(name):
    folder = PACKAGES[name]
    files = {".".join(path.relative_to(folder.parent).with_suffix("").parts): path for path in folder.rglob("*.py")}
    edges = {module: files.keys() & set(imported(path)) for module, path in files.items()}
    while leaves := [module for module, others in edges.items() if not others & edges.keys()]:
        for module in leaves:
            del edges[module]
    assert not edges, f"these modules import each other, or one that does: {sorted(edges)}"


@pytest.mark.parametrize("module", FACES)
def test_a_face_has_the_names_that_it_promises(module):
    face = importlib.import_module(module)
    assert sorted(face.__all__) == FACES[module]
    assert all(hasattr(face, name) for name in face.__all__)
