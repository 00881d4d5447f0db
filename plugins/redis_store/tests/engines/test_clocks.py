"""Steps of the server's clock: leases end after their own time, neither sooner nor later.

The server is preloaded with a library that adds an offset from a file to what the kernel says. Needs a C compiler.
"""

import shutil
import struct
import subprocess
import time

import pytest
import torch

from dataplane_core.errors import LeaseExpiredError

_HOUR = 3600
_SHIFTED_CLOCK = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset_s;

__attribute__((constructor)) static void start(void) {
  int file = open(getenv("CLOCK_OFFSET_FILE"), O_RDONLY);
  offset_s = mmap(0, sizeof *offset_s, PROT_READ, MAP_SHARED, file, 0);
  close(file);
}

int clock_gettime(clockid_t id, struct timespec *at) {
  int failed = syscall(SYS_clock_gettime, id, at);
  if (!failed && offset_s && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += *offset_s;
  return failed;
}

int gettimeofday(struct timeval *at, void *zone) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  at->tv_sec = exact.tv_sec;
  at->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *at) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (at) *at = exact.tv_sec;
  return exact.tv_sec;
}
"""

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="not run: this machine has no C compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The library to preload."""
    folder = tmp_path_factory.mktemp("clock")
    source = folder / "clock.c"
    source.write_text(_SHIFTED_CLOCK)
    made = folder / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(made), str(source)], check=True)
    return made


@pytest.fixture
def server(start_server, monkeypatch, tmp_path, library):
    """A server whose clock `step` sets."""
    file = tmp_path / "offset"
    file.write_bytes(struct.pack("<q", 0))
    with monkeypatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("CLOCK_OFFSET_FILE", str(file))
        made = start_server()

    def step(seconds):
        before = made.admin("TIME")[0]
        with file.open("r+b") as opened:
            opened.write(struct.pack("<q", seconds))
        assert abs(made.admin("TIME")[0] - before - seconds) < 60

    made.step = step
    return made


@pytest.fixture
def pair(server, connect):
    """Two clients, and a partition with two samples."""
    one = connect(url=server.url, namespace="clock", partition="p")
    one.put_samples(["a", "b"], "p", {"x": torch.ones(2)})
    return one, connect(url=server.url, namespace="clock", bootstrap=False)


def claim(client, lease_s, **options):
    return client.claim_meta("p", "train", ["x"], 1, lease_s=lease_s, **options)


@pytest.mark.parametrize("step_s", [-_HOUR, _HOUR])
def test_a_lease_ends_after_its_time_though_the_clock_is_set(server, pair, connect, step_s):
    one, two = pair
    long, start = claim(one, 600.0), time.monotonic()
    short = claim(one, 2.0)
    server.step(step_s)
    found = claim(two, 600.0, timeout_s=30.0)
    assert found.sample_ids == short.sample_ids
    assert time.monotonic() - start > 1.0
    with pytest.raises(LeaseExpiredError):
        one.ack(short)
    three = connect(url=server.url, namespace="clock", bootstrap=False)
    assert claim(three, 600.0, blocking=False).size == 0
    one.renew(long, 600.0)
    one.ack(long)
    two.nack(found)
    claim(three, 0.5)
    assert claim(two, 600.0, timeout_s=30.0).sample_ids == found.sample_ids


def test_a_lease_ends_while_nobody_is_connected(server, pair, connect):
    one, two = pair
    claim(one, 600.0)
    two.close()
    one.close()
    server.step(_HOUR)
    again = connect(url=server.url, namespace="clock")
    assert again.claim_meta("p", "train", ["x"], 2, blocking=False).size == 2
