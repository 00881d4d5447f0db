"""Ranks that have what models of several processes take long to import, and stores of every backend."""

import os

import pytest


@pytest.fixture(scope="session")
def imported_by_ranks():
    """Megatron and Redis too; `megatron.core.models.gpt` imports torch._dynamo."""
    return [
        "torch.distributed.fsdp",
        "megatron.core.hyper_comm_grid",
        "megatron.core.models.gpt",
        "dataplane_integrations.trainer.worker",
        "dataplane_redis",
    ]


@pytest.fixture(scope="module")
def config_of(request):
    """``config_of(backend)``: the config of a store of the file's own, with Ray where the backend needs it."""

    def make(backend):
        name = f"{request.module.__name__}-{os.getpid()}"
        options = {"noop": {}, "redis_store": {"namespace": name}, "shm_store": {"namespace": name}}.get(backend)
        if options is None:
            ray = request.getfixturevalue("local_ray")
            options = {"instance": name}
            if backend == "tq_simple":
                options["ray_address"] = ray.get_runtime_context().gcs_address
        return {"backend": backend, "op_timeout_s": 60, "options": options}

    return make
