"""What a machine may lack: each is named by a ConfigError with the command that mends it."""

import logging
import sys
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pytest

from dataplane_core.backends import Level
from dataplane_core.errors import ConfigError
from dataplane_mooncake import TQMooncakeConfig, _cluster, machine
from dataplane_mooncake._cluster import Described, MooncakeInstance

MIB = 1 << 20


@pytest.fixture
def wheels(monkeypatch):
    """Stands in for the wheels that are installed: ``wheels({name: version})``."""

    def stand_in(versions):
        there = metadata.version

        def version(name):
            if name in machine.DISTRIBUTIONS and name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions.get(name) or there(name)

        monkeypatch.setattr(machine.metadata, "version", version)

    return stand_in


@pytest.mark.parametrize("name", machine.DISTRIBUTIONS)
def test_each_wheel_will_do_in_an_accepted_version_and_by_option_in_any(wheels, connect, caplog, name):
    for version in machine.ACCEPTED:
        wheels({name: version})
        machine.check_machine(TQMooncakeConfig())
    assert caplog.messages == []
    wheels({name: "0.3.11.post1"})
    refused = f"{name} 0.3.11.post1 is installed"
    with pytest.raises(ConfigError, match=refused) as error:
        connect()
    assert "any_mooncake_version: true" in error.value.hint
    machine.check_machine(TQMooncakeConfig(any_mooncake_version=True))
    ((_, level, said),) = caplog.record_tuples
    assert (level, said) == (logging.WARNING, error.value.message)
    for option, expected in ((False, Level.ERROR), (True, Level.WARNING)):
        found = machine.diagnose(TQMooncakeConfig(any_mooncake_version=option))
        assert [each.level for each in found if each.what.startswith(refused)] == [expected]


def test_two_wheels_over_each_other_are_named_and_the_one_for_cuda_is_kept(wheels, connect):
    wheels({"mooncake-transfer-engine-non-cuda": machine.ACCEPTED[-1], "mooncake-transfer-engine": "0.3.13"})
    with pytest.raises(ConfigError, match=r"2 distributions install the module mooncake") as error:
        connect()
    assert "'mooncake-transfer-engine 0.3.13'" in str(error.value)
    assert "mooncake-transfer-engine-non-cuda mooncake-transfer-engine && pip install" in str(error.value)
    assert error.value.hint.endswith(
        f"pip install dataplane-mooncake-backend mooncake-transfer-engine=={machine.ACCEPTED[-1]}"
    )


def test_no_wheel_is_said(wheels):
    wheels({})
    with pytest.raises(ConfigError, match="pip install mooncake-transfer-engine-non-cuda=="):
        machine.check_distributions()


@pytest.mark.parametrize(
    ("library", "command"),
    [
        ("libibverbs.so.1", "apt-get install libibverbs1"),
        ("libcudart.so.12", "pip uninstall -y mooncake-transfer-engine-non-cuda && pip install"),
    ],
)
def test_a_missing_library_is_named_and_the_cause_kept(tmp_path, monkeypatch, connect, library, command):
    """The loader's own words, out of a stand-in for the wheel: the real library cannot be taken from this machine."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    reason = f"{library}: cannot open shared object file: No such file or directory"
    (package / "store.py").write_text(f"raise ImportError({reason!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mooncake", "mooncake.store"):
        monkeypatch.setitem(sys.modules, name, None)  # so that what was there is restored
        del sys.modules[name]
    with pytest.raises(ConfigError, match=library) as error:
        connect()
    assert command in str(error.value)
    assert str(error.value.__cause__) == reason


def test_a_master_that_is_not_executable_is_made_so_where_this_user_may(tmp_path, monkeypatch, connect):
    path = tmp_path / "mooncake_master"
    path.touch(mode=0o644)
    monkeypatch.setattr(machine, "master_path", lambda: path)
    with pytest.raises(ConfigError, match=rf"{path} is not executable \(mode 644\)\. Run: chmod \+x {path}"):
        machine.check_master()
    machine.check_master(mend=True)
    assert path.stat().st_mode & 0o777 == 0o755
    path.chmod(0o600)
    monkeypatch.setattr(Path, "chmod", Mock(side_effect=PermissionError))  # as of another user's file
    with pytest.raises(ConfigError, match=rf"{path} is not executable \(mode 600\)\. Run: chmod \+x {path}"):
        connect()


def test_rdma_without_a_device_is_refused(connect):
    with pytest.raises(ConfigError, match=r"protocol is 'rdma', but no device is in /sys/class/infiniband") as error:
        connect(protocol="rdma")
    assert "protocol: tcp" in str(error.value)


def test_rdma_devices_are_looked_for_by_name(tmp_path, monkeypatch):
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(machine, "_DEVICES", tmp_path)
    machine.check_rdma()
    machine.check_rdma(["mlx5_0"])
    with pytest.raises(ConfigError, match=r"the devices 'mlx5_1' are not in .*; there: 'mlx5_0'"):
        machine.check_rdma(["mlx5_0", "mlx5_1"])


def test_a_node_without_the_memory_is_named_with_the_numbers(monkeypatch):
    monkeypatch.setattr(_cluster, "nodes_for_units", lambda: ["1" * 56, "2" * 56])
    instance = MooncakeInstance(TQMooncakeConfig(segment_size_bytes=1024 * MIB))
    units = [Described("life", "one", "10.0.0.1", 2048 * MIB), Described("life", "two", "10.0.0.2", 2047 * MIB)] * 2
    instance.start_actor, instance.when_started = Mock(), lambda *_: units
    with pytest.raises(ConfigError, match=r"node 10\.0\.0\.2 would need 2048 MiB, but has 2047 MiB") as error:
        instance.prepare(0.0)
    assert "2 storage units of 1024 MiB (segment_size_bytes)" in str(error.value)
    instance.stop()  # no master is started yet: there is nothing to end


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"announce_address": "eth0"}, "neither an IP address nor a network"),
        ({"rdma_devices": ["mlx5_0"]}, "protocol is 'tcp'"),
        ({"segment_size_bytes": 1}, "segment_size_bytes"),
    ],
)
def test_options_are_checked(connect, options, said):
    with pytest.raises(ConfigError, match=said):
        connect(**options)
