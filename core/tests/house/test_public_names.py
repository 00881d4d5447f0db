"""The public names are a promise: a change here is a change of the package's version."""

import importlib

import pytest

#: The names of each face.
FACES = {
    "dataplane_core": """
        AsyncDataPlaneClient Backend BatchedDataDict Capability DataPlaneClient DataPlaneConfig
        DataPlaneError KVBatchMeta NamedSharding OperationCancelledError RowStoreBackend SlicedDataDict
        WireFormat connect connect_async kv_first_write materialize pack_jagged_fields read_columns
        shard_meta_for_dp stream to_arrow to_numpy write_columns
    """,
    "dataplane_observe": """
        Record Recorder Recording TensorBoardListener WandbListener Writer is_followed is_recording row_digests
    """,
    "dataplane_testkit": """
        AuthorsClass BackendConformance ConformanceError Disturbance EngineConformance Faults Report
        Settings Shim Verdict backend_of kill_owner run_chaos run_shim
    """,
    "dataplane_testkit.commands": "conformance new_plugin",
    "dataplane_tools": "Exported export_partition follow_partition",
    "dataplane_tools.commands": "audit export metrics read top why",
    "dataplane_compat": "",
    "dataplane_compat.nemo_gym": "DataPlaneTokenStore FIELDS token_entries",
    "dataplane_compat.nemo_rl": "NemoRLAdapter Section activate client_class",
    "dataplane_compat.transfer_queue": """
        BaseSampler BatchMeta GRPOGroupNSampler KVBatchMeta RankAwareSampler SeqlenBalancedSampler
        SequentialSampler StorageKeyNotFoundError StreamingDataLoader StreamingDataset TransferQueueClient
        async_kv_batch_get async_kv_batch_get_by_meta async_kv_batch_put async_kv_clear async_kv_list
        async_kv_put close get_client get_metrics_endpoint init kv_batch_get kv_batch_get_by_meta kv_batch_put
        kv_clear kv_list kv_put load_checkpoint save_checkpoint
    """,
    "dataplane_integrations": "DataPlanePolicy DataPlaneWorkerMixin",
    "dataplane_integrations.ray": """
        NodeReport RayWorkerGroup backend_runtime_env check_backend_on_nodes require_backend_on_nodes wait_for_all
    """,
    "dataplane_integrations.replay": """
        AsyncCollector AsyncRollout BufferCounts BufferView Collector CollectorCounts GroupView InOrderPolicy
        PromptSource ReadyFirstPolicy ReplayBuffer Reservation Rollout StalenessPolicy TargetStepPolicy WindowedPolicy
        group_of parse_sample_id serve
    """,
    "dataplane_integrations.rollout": """
        DataPlaneRolloutMixin DynamicSampling FoundRollouts GroupRule RolloutReceipt SamplingCounts
        SyncRolloutActor all_match flatten_message_logs mint_sample_ids missing_groups tag_varies
    """,
    "dataplane_integrations.trainer": """
        Batching DataPlanePolicy DataPlaneWorkerMixin DynamicBatching FetchPolicy InProcessWorkerGroup
        SequencePacking WorkerGroup
    """,
}


@pytest.mark.parametrize("module", FACES)
def test_a_face_has_the_names_that_it_promises(module):
    face = importlib.import_module(module)
    assert sorted(face.__all__) == FACES[module].split()
    assert all(hasattr(face, name) for name in face.__all__)
