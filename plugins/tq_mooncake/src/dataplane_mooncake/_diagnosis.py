"""What `dataplane doctor tq_mooncake` checks on this node, before Ray: Mooncake's files, devices, memory, address."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

from dataplane_core.backends import Finding
from dataplane_core.errors import ConfigError
from dataplane_core.host_memory import memory_limit
from dataplane_mooncake.config import TQMooncakeConfig
from dataplane_mooncake.machine import (
    NodeMemory,
    check_distributions,
    check_library,
    check_master,
    check_memory,
    check_rdma,
    check_version,
    installed,
)
from dataplane_tq_simple.addresses import announced_address


def diagnose(config: TQMooncakeConfig) -> Iterator[Finding]:
    """Findings for these options; see `Backend.diagnose`."""
    yield _finding(check_distributions, f"Mooncake is installed once: {' '.join(chain(*installed().items()))}.")
    severity = Finding.warning if config.any_mooncake_version else Finding.error
    yield _finding(check_version, "This version of Mooncake is accepted.", severity)
    yield _finding(check_library, "Mooncake's library loads.")
    if config.master_address is None:
        yield _finding(check_master, "mooncake_master exists and is executable.")
    if config.protocol == "rdma":
        yield _finding(partial(check_rdma, config.rdma_devices), "The RDMA devices exist.")
    if config.announce_address is not None:
        address = partial(announced_address, config.announce_address, ray_ip="", num_nodes=1)
        yield _finding(address, f"This node has one address that announce_address '{config.announce_address}' fits.")
    if config.ray_address is None and "RAY_ADDRESS" not in os.environ:  # then all units run here
        available = memory_limit().available_bytes
        memory = partial(check_memory, [NodeMemory("this node", available, config.num_storage_units)], config)
        yield _finding(memory, f"This node has {available // 2**20} MiB of memory available, which is enough.")


def _finding(
    check: Callable[[], object], ok_message: str, failed: Callable[[str, str | None], Finding] = Finding.error
) -> Finding:
    try:
        check()
    except ConfigError as error:
        return failed(error.message, error.hint)
    return Finding.ok(ok_message)
