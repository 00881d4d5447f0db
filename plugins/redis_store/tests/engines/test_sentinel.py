"""Redis Sentinel: failovers while three processes use the store, with and without a wait for replicas."""

import contextlib
import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from doctors import findings
from redis.connection import ConnectionPool
from redis.exceptions import RedisError
from redis_servers import LARGE, SMALL, columns, wait_until

from dataplane_core.backends import Level
from dataplane_core.errors import BackendUnavailableError, LostSamplesError, OperationTimeoutError
from dataplane_redis import RedisBackend, _sentinel
from dataplane_redis._link import Link
from dataplane_redis._sentinel import Service
from dataplane_testkit.chaos.worker import STEPS


class Plane:
    """A primary with two replicas, and three sentinels that watch it as the service "plane"."""

    def __init__(self, start_server):
        self.primary = start_server()
        self.replicas = [start_server().follow(self.primary) for _ in range(2)]
        self.sentinels = [start_server(sentinel=True) for _ in range(3)]
        for sentinel in self.sentinels:
            # how often it asks and tells, in milliseconds; else as long as down-after-milliseconds, or for seconds
            periods = {"info-period": 200, "publish-period": 200, "ask-period": 200, "min-link-reconnect-period": 200}
            sentinel.admin("SENTINEL", "DEBUG", *(word for period in periods.items() for word in period))
            sentinel.admin("SENTINEL", "MONITOR", "plane", "127.0.0.1", self.primary.port, 2)
        self.end_failovers()
        self.set("failover-timeout", 6000)
        self.set("parallel-syncs", 2)

    def set(self, name, value):
        """Sets an option of all sentinels."""
        for sentinel in self.sentinels:
            sentinel.admin("SENTINEL", "SET", "plane", name, value)

    def detach_replicas(self):
        """What comes now reaches no replica. The sentinels do not attach them again soon."""
        self.set("failover-timeout", 600_000)
        for replica in self.replicas:
            replica.admin("REPLICAOF", "127.0.0.1", "1")  # nobody there

    def kill_primary(self):
        """Kills it, and only then lets the sentinels fail over: also a machine that stands still is none that died."""
        self.set("failover-timeout", 6000)
        self.primary.kill()
        self.set("down-after-milliseconds", 1000)

    @property
    def url(self):
        return f"redis+sentinel://{','.join(f'127.0.0.1:{each.port}' for each in self.sentinels)}/plane"

    def knows_all(self):
        """Whether each sentinel knows the others and both replicas."""
        states = map(state_of, self.sentinels)
        return all((state["num-other-sentinels"], state["num-slaves"]) == (2, 2) for state in states)

    def end_failovers(self):
        """No failover begins, also not after this machine stood still."""
        self.set("down-after-milliseconds", 600_000)

    def is_settled(self):
        """Whether one server that lives is the primary, the other follows it, and all sentinels say so."""
        primaries = self.new_primaries()
        if len(primaries) != 1 or primaries[0].info("replication")["connected_slaves"] != 1:
            return False
        states = map(state_of, self.sentinels)
        return all((state["flags"], state["port"]) == ("master", primaries[0].port) for state in states)

    def has_left(self, primary):
        """Whether a failover by hand made it a replica. One that took too long is given up: then another begins."""
        if state_of(self.sentinels[0])["port"] == primary.port:
            fail_over(self.sentinels[0])
        return primary.info("replication")["role"] == "slave"

    def new_primaries(self):
        """The replicas that took over. If there are two, the sentinels have not yet made the older one a replica."""
        return [server for server in self.replicas if server.info("replication")["role"] == "master"]


@pytest.fixture
def sentinels_have_time(monkeypatch):
    """To answer: none of the test's stands still."""
    monkeypatch.setattr(_sentinel, "_ANSWER_S", 20.0)


@pytest.fixture
def plane(start_server):
    made = Plane(start_server)
    wait_until(made.knows_all)
    return made


def test_a_service_is_named_and_followed(plane, connect):
    client = connect(url=plane.url, partition="p", wait_replicas=1)
    client.put_samples(["a"], "p", columns(1, LARGE, 7))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.claim_meta, "p", "train", ["x"], 3, timeout_s=300.0)
        plane.kill_primary()
        client.put_samples(["b"], "p", columns(1, LARGE, 8))
        assert client.get_samples(["a", "b"], "p", ["x"])["x"][:, 0].tolist() == [7, 8]
        wait_until(plane.is_settled)
        plane.end_failovers()
        (new,) = plane.new_primaries()
        # by hand, while the primary lives
        new.replicate_to(*(each for each in plane.replicas if each is not new))
        wait_until(lambda: plane.has_left(new))
        client.put_samples(["c"], "p", columns(1, SMALL, 9))
        assert waits.result(60).sample_ids == ["a", "b", "c"]


def state_of(sentinel):
    """What a sentinel says of the service."""
    return sentinel.admin("SENTINEL MASTER", "plane")


def fail_over(sentinel):
    with contextlib.suppress(RedisError):  # it refuses while it has no replica that is up
        return sentinel.admin("SENTINEL FAILOVER", "plane")
    return None


#: What the processes do that see a failover. A save would meet the rows that are lost.
_STEPS = frozenset(STEPS) - {"save"}


@pytest.mark.parametrize("wait_replicas", [0, 1])
def test_a_failover_that_loses_the_last_seconds_loses_no_ledger(plane, chaos, wait_replicas):
    def fail_late(client):
        plane.primary.replicate_to(*plane.replicas)
        plane.detach_replicas()
        with ThreadPoolExecutor(1) as pool:
            put = pool.submit(client.put_samples, ["last"], "own", columns(1))
            wait_until(lambda: put.done() or plane.primary.info("clients")["blocked_clients"])
            plane.kill_primary()
            put.result()
        wait_until(plane.new_primaries)
        plane.end_failovers()
        wait_until(plane.is_settled)
        assert client.list_samples("own").sample_ids == ["last"]
        with contextlib.nullcontext() if wait_replicas else pytest.raises(LostSamplesError):
            client.get_samples(["last"], "own", ["x"])

    verdict = chaos(fail_late, {"url": plane.url, "wait_replicas": wait_replicas}, steps=_STEPS)
    # rows that only the dead primary had are lost, and named; so is that others were deleted
    broken = {finding.rule for finding in verdict.findings}
    assert broken <= ({"lost", "leaked"} if not wait_replicas else set()), verdict


def test_what_a_replaced_primary_took_is_not_lost_to_the_ledger(plane, chaos):
    """A primary that stood still is replaced. It goes on, and takes writes, until the sentinels make it a replica."""

    def stand_still(client):
        plane.primary.replicate_to(*plane.replicas)
        plane.kill_primary()
        wait_until(plane.is_settled)
        (first,) = plane.new_primaries()
        with first.stopped():
            wait_until(lambda: any(state_of(each)["port"] != first.port for each in plane.sentinels))
            plane.end_failovers()  # if this machine stood still for a second, it would be made the primary again
        wait_until(lambda: first.info("replication")["role"] == "slave")
        wait_until(plane.is_settled)

    verdict = chaos(stand_still, {"url": plane.url}, schedule_s=30.0, steps=_STEPS)
    assert {finding.rule for finding in verdict.findings} <= {"lost", "leaked"}, verdict


def test_a_sentinel_that_has_not_heard_of_a_failover_is_not_believed(plane, start_server, sentinels_have_time):
    old, behind = start_server(), start_server(sentinel=True)
    behind.admin("SENTINEL", "MONITOR", "plane", "127.0.0.1", old.port, 1)
    service = Service.of(plane.url)

    def primary():
        return service.primary(time.monotonic() + 20)[1]

    assert primary() == plane.primary.port
    wait_until(lambda: any(map(fail_over, plane.sentinels)))
    wait_until(lambda: primary() != plane.primary.port)
    assert primary() in [each.port for each in plane.replicas]
    service.sentinels = [("127.0.0.1", behind.port), *service.sentinels]
    assert primary() in [each.port for each in plane.replicas]
    service.sentinels = [("127.0.0.1", behind.port)]  # all were set up anew
    assert primary() == old.port


def test_a_service_that_the_sentinels_do_not_know_is_refused_at_once(plane, connect, sentinels_have_time):
    with pytest.raises(BackendUnavailableError, match=r"do not know .*'other'.*They watch: plane") as caught:
        connect(url=plane.url.replace("/plane", "/other"))
    assert not caught.value.retryable

    assert "3 of 3 sentinels answer and watch 'plane'." in dict(findings(RedisBackend, Level.OK, url=plane.url))
    plane.sentinels[0].kill()
    assert "2 of 3 sentinels answer and watch 'plane'." in dict(findings(RedisBackend, Level.WARNING, url=plane.url))
    round_trip = connect(url=plane.url)  # any sentinel will do
    round_trip.register_partition("p", ["x"], None, ["train"])


def test_a_failover_that_lasts_too_long_is_a_retryable_error(plane, connect, told_in_time):
    client = connect(url=plane.url, partition="p")
    for server in (plane.primary, *plane.replicas):
        server.kill()
    silent = "has no primary now|waits for the engine"
    kinds = (BackendUnavailableError, OperationTimeoutError)
    assert told_in_time(lambda: client.put_samples(["a"], "p", columns(1)), kinds, silent, 3.0).retryable


def test_urls_of_services():
    service = Service.of("rediss+sentinel://u:p%40q@h1:1,h2,[::1]:3/my%20plane/2?sentinel_password=s&ssl_ca_certs=/ca")
    assert (service.name, service.sentinels) == ("my plane", [("h1", 1), ("h2", 26379), ("::1", 3)])
    assert service.server_url == "rediss://u:p%40q@localhost/2?ssl_ca_certs=%2Fca"
    assert service.options["password"] == "s"
    assert service.options["ssl_ca_certs"] == "/ca"
    assert service.label == "the Redis service 'my plane' of the sentinels at ::1:3, h1:1, h2:26379"
    assert Service.of("redis://h/0") is None


def test_a_failover_leads_no_thread_to_another_server(monkeypatch):
    """The URL of a service names no server: redis-py would take the one of this host, which may be anybody's."""
    monkeypatch.setattr(Service, "primary", lambda *_: ("primary", 7000))
    link, others = Link("redis+sentinel://127.0.0.1:1/plane"), []

    class Options(dict):
        def __ior__(self, more):
            others.append(link._pool)  # what another thread would use now
            return super().__ior__(more)

    class Pool(ConnectionPool):
        def __init__(self, **options):
            super().__init__(**options)
            self.connection_kwargs = Options(self.connection_kwargs)

    monkeypatch.setattr("dataplane_redis._link.ConnectionPool", Pool)
    assert link._pool_of(b"", math.inf).connection_kwargs["host"] == "primary"
    assert others == [None]
