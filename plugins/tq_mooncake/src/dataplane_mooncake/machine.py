"""Checks that this machine can run Mooncake. A failed check names the command that repairs it.

Each ``check_*`` function raises `ConfigError` if its check fails. Connecting runs all of them. They need neither Ray
nor a running instance, and importing this module does not load Mooncake.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata, util
from itertools import chain
from pathlib import Path
from typing import Any, Final

from dataplane_core.backends import Finding
from dataplane_core.errors import ConfigError, preview
from dataplane_core.host_memory import memory_limit
from dataplane_mooncake.config import TQMooncakeConfig
from dataplane_tq_simple.addresses import announced_address

_logger = logging.getLogger(__name__)

#: The wheels that install the module ``mooncake``, and what each is built for. This package depends on none of them.
DISTRIBUTIONS: Final[Mapping[str, str]] = {
    "mooncake-transfer-engine-non-cuda": "no CUDA",
    "mooncake-transfer-engine": "CUDA 12",
    "mooncake-transfer-engine-cuda13": "CUDA 13",
}
#: The versions with which the kit passes, oldest first. This package relies on more than Mooncake documents.
ACCEPTED: Final = ("0.3.13", "0.3.13.post1")
_PLAIN, *_FOR_CUDA = DISTRIBUTIONS
_INSTALL: Final = f"pip install {_PLAIN}=={ACCEPTED[-1]}"
#: The package that is this one and the wheel without CUDA.
_WITH_WHEEL: Final = "dataplane-mooncake"

_DEVICES: Final = Path("/sys/class/infiniband")
_MIB: Final = 1024 * 1024


def installed() -> dict[str, str]:
    """Names and versions of the installed wheels. There should be exactly one."""
    found = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def check_distributions() -> None:
    """Checks that exactly one of the three wheels is installed: several overwrite each other's files."""
    found = installed()
    if not found:
        raise ConfigError(
            "no Mooncake is installed.",
            hint=f"Install one: {_INSTALL} (it needs no CUDA, and works on hosts with GPUs too). If other libraries "
            f"need one for CUDA: {' or '.join(_FOR_CUDA)}, in this version.",
        )
    if len(found) > 1:
        names = [name for name in (_WITH_WHEEL, *found) if name in found or any(metadata.distributions(name=name))]
        (kept, *_) = [name for name in found if name != _PLAIN]  # other libraries may need this one
        raise ConfigError(
            f"{len(found)} distributions install the module mooncake over each other: "
            f"{preview(f'{name} {version}' for name, version in found.items())}. Expected one.",
            hint=f"Remove them all and install one: pip uninstall -y {' '.join(names)} && pip install "
            f"dataplane-mooncake-backend {kept}=={ACCEPTED[-1]}",
        )


def check_version() -> None:
    """Checks that the installed wheel is of an accepted version."""
    for name, version in installed().items():
        if version not in ACCEPTED:
            raise ConfigError(
                f"{name} {version} is installed, with which the conformance tests of this package did not pass or did "
                f"not run. Expected {' or '.join(ACCEPTED)}.",
                hint=f"Run: pip install {name}=={ACCEPTED[-1]}. If that cannot be: docs/operating.md says what was "
                "tried; any_mooncake_version: true makes this a warning. Then run: dataplane conformance tq_mooncake "
                "--options '{any_mooncake_version: true}'",
            )


def check_library() -> Any:
    """Checks that Mooncake's library loads, and returns it."""
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        reason = str(error)
        if "libibverbs" in reason:
            hint = "Install it, for TCP too: apt-get install libibverbs1 (Debian, Ubuntu), dnf install libibverbs."
        elif "libcuda" in reason or "libcudart" in reason:
            hint = (
                "The installed Mooncake is built for a CUDA that this machine lacks. Install the one without: "
                f"pip uninstall -y {' '.join(installed())} && {_INSTALL}"
            )
        else:
            hint = _reinstall()
        raise ConfigError(f"Mooncake's library does not load: {reason}.", hint=hint) from error


def master_path() -> Path:
    """The path of the installed ``mooncake_master``. It comes with the wheel, and need not be on the PATH."""
    spec = util.find_spec("mooncake")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "mooncake_master"
        if path.is_file():
            return path
    raise ConfigError("the installed Mooncake has no mooncake_master.", hint=_reinstall())


def _reinstall() -> str:
    return f"Reinstall it: pip install --force-reinstall --no-deps {next(iter(installed()), _PLAIN)}=={ACCEPTED[-1]}"


def check_master(*, mend: bool = False) -> None:
    """Checks that ``mooncake_master`` exists and is executable, or makes it so: some installers drop that bit."""
    path = master_path()
    if mend and not os.access(path, os.X_OK):
        with contextlib.suppress(OSError):  # of another user, or on a file system that is read-only
            path.chmod(path.stat().st_mode | 0o111)
    if not os.access(path, os.X_OK):
        raise ConfigError(
            f"{path} is not executable (mode {path.stat().st_mode & 0o777:o}).", hint=f"Run: chmod +x {path}"
        )


def check_rdma(devices: Sequence[str] = ()) -> None:
    """Checks that this machine has these RDMA devices, or any. Else Mooncake would report success and use TCP."""
    there = sorted(each.name for each in _DEVICES.iterdir()) if _DEVICES.is_dir() else []
    missing = [name for name in devices if name not in there]
    if missing or not there:
        wanted = f"the devices {preview(missing)} are not" if missing else "no device is"
        raise ConfigError(
            f"protocol is 'rdma', but {wanted} in {_DEVICES}; there: {preview(there) or 'none'}.",
            hint="Load the device's driver and pass it to the container, correct rdma_devices, or set protocol: tcp.",
        )


def check_machine(config: TQMooncakeConfig) -> None:
    """Checks what every process that loads Mooncake needs: one wheel, its library, and for ``rdma`` the devices."""
    check_distributions()
    try:
        check_version()
    except ConfigError as error:
        if not config.any_mooncake_version:
            raise
        _logger.warning("%s", error.message)
    check_library()
    if config.protocol == "rdma":
        check_rdma(config.rdma_devices)


def check_memory(node: str, available_bytes: int, num_units: int, config: TQMooncakeConfig) -> None:
    """Checks that a node with so many storage units has the memory for their segments."""
    needed_bytes = num_units * config.segment_size_bytes
    if needed_bytes > available_bytes:
        raise ConfigError(
            f"{node} would need {needed_bytes // _MIB} MiB, but has {available_bytes // _MIB} MiB available: "
            f"{num_units} storage units of {config.segment_size_bytes // _MIB} MiB (segment_size_bytes).",
            hint="Lower segment_size_bytes or num_storage_units, or add nodes.",
        )


def diagnose(config: TQMooncakeConfig) -> Iterator[Finding]:
    """What ``dataplane doctor`` finds on this node, before Ray: Mooncake's files, devices, address, memory."""
    yield _finding(check_distributions, f"Mooncake is installed once: {' '.join(chain(*installed().items()))}.")
    severity = Finding.warning if config.any_mooncake_version else Finding.error
    yield _finding(check_version, "This version of Mooncake is accepted.", severity)
    yield _finding(check_library, "Mooncake's library loads.")
    yield _finding(check_master, "mooncake_master exists and is executable.")
    if config.protocol == "rdma":
        yield _finding(partial(check_rdma, config.rdma_devices), "The RDMA devices exist.")
    if config.announce_address is not None:
        address = partial(announced_address, config.announce_address, ray_ip="", num_nodes=1)
        yield _finding(address, f"This node has one address that announce_address '{config.announce_address}' fits.")
    if config.ray_address is None and "RAY_ADDRESS" not in os.environ:  # then all units run here
        available = memory_limit().available_bytes
        memory = partial(check_memory, "this node", available, config.num_storage_units, config)
        yield _finding(memory, f"This node has {available // 2**20} MiB of memory available, which is enough.")


def _finding(
    check: Callable[[], object], ok_message: str, failed: Callable[[str, str | None], Finding] = Finding.error
) -> Finding:
    try:
        check()
    except ConfigError as error:
        return failed(error.message, error.hint)
    return Finding.ok(ok_message)
