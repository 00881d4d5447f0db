"""How much memory and how many cores may be used: the least of the machine's and the control groups'."""

import os

import pytest

from dataplane_core.errors import ConfigError
from dataplane_core.host_memory import MemoryLimit, check_capacity, limits, memory_limit

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path):
    """Writes files below a root, and returns what is found there. 1,000 MiB are available."""

    def make(cgroup, files):
        for name, text in {
            "proc/meminfo": f"MemTotal: {2000 << 10} kB\nMemAvailable: {1000 << 10} kB\n",
            **files,
        }.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        if cgroup is not None:
            (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
            (tmp_path / "proc/self/cgroup").write_text(cgroup)
        return memory_limit(tmp_path)

    return make


def limited(folder, limit, used, version=2):
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    return {f"sys/fs/cgroup/{folder}{name}": str(value) for name, value in zip(names, (limit, used), strict=True)}


def test_a_machine_without_control_groups(machine):
    assert machine(None, {}) == MemoryLimit(1000 * MIB, "this machine", 2000 * MIB)


def test_a_container(machine):
    assert machine("0::/\n", limited("", 500 * MIB, 200 * MIB)) == MemoryLimit(
        300 * MIB, "the container's limit", 500 * MIB
    )


def test_a_group_without_a_limit(machine):
    assert machine("0::/a\n", limited("a/", "max", 5)) == MemoryLimit(1000 * MIB, "this machine", 2000 * MIB)


def test_a_limit_of_a_group_above(machine):
    files = {**limited("", "max", 5), **limited("a/", 100 * MIB, 90 * MIB), **limited("a/b/", 800 * MIB, 0)}
    assert machine("0::/a/b\n", files).available_bytes == 10 * MIB


def test_version_1(machine):
    files = limited("memory/a/", 400 * MIB, 100 * MIB, version=1)
    assert machine("5:cpu:/x\n4:memory:/a\n", files).available_bytes == 300 * MIB


@pytest.mark.parametrize("version", [1, 2])
def test_pages_of_files_that_the_kernel_can_drop_are_available(machine, version):
    folder = "memory/" if version == 1 else ""
    stat = {1: "inactive_file 0\ntotal_inactive_file {0}\n", 2: "anon 5\ninactive_file {0}\n"}[version]
    files = limited(folder, 500 * MIB, 500 * MIB, version)
    files[f"sys/fs/cgroup/{folder}memory.stat"] = stat.format(450 * MIB)
    assert machine("4:memory:/\n" if version == 1 else "0::/\n", files).available_bytes == 450 * MIB


def test_a_group_that_uses_more_than_its_limit(machine):
    assert machine("0::/\n", limited("", MIB, 2 * MIB)).available_bytes == 0


def test_a_capacity_that_this_host_does_not_have_is_refused():
    most_bytes = memory_limit().most_bytes
    check_capacity(None)
    check_capacity(most_bytes)
    with pytest.raises(ConfigError, match=r"Expected at most the memory that this host, or its container, has in all"):
        check_capacity(most_bytes + 1)


# --- cores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        (None, {}, 8),
        ("0::/a/b\n", {"a/cpu.max": "max 100000", "a/b/cpu.max": "250000 100000"}, 2),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/\n", {"cpu.max": "1600000 100000"}, 8),
        ("3:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "400000", "cpu/a/cpu.cfs_period_us": "100000"}, 4),
        ("3:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_cores(machine, tmp_path, monkeypatch, cgroup, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    machine(cgroup, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert limits.usable_cores(tmp_path) == expected


def test_a_thread_that_is_pinned_to_a_core_has_one():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert limits.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
