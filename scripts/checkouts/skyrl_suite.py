"""A pytest plugin that puts our dispatch under SkyRL's own tests. `test_trainer_checkouts.py` runs pytest with it."""

import os

import ray

from dataplane_compat.skyrl import activate


def pytest_configure(config):
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
    config.stash_client = activate(os.environ["DATAPLANE_CONFIG"])


def pytest_unconfigure(config):
    config.stash_client.close()
    ray.shutdown()
