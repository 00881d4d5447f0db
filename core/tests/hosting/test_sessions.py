"""A host and its clients, over a Unix socket and over TCP: who may connect, and what ends with whom."""

import contextlib
import os
import socket
import struct
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from dataplane_core.errors import (
    BackendError,
    BackendUnavailableError,
    ClientClosedError,
    InvalidRequestError,
    LostReplyError,
    OperationTimeoutError,
    UnknownPartitionError,
)
from dataplane_core.hosting import (
    LedgerHost,
    Messages,
    Request,
    Server,
    Session,
    TcpAddress,
    UnixAddress,
    failure_of,
    listen_at,
    listen_on,
    new_token,
    server,
    session as sessions,
)
from dataplane_core.hosting.messages import VERSION, Hello, Together, encode
from dataplane_core.ledger import LedgerService, commands
from dataplane_core.spec import FieldSpec
from dataplane_testkit._timing import Background, eventually, in_threads

LONG_S = 60.0
failure = failure_of("the host")
X = {"x": FieldSpec("tensor", "int64", 1)}


class Echo(Request[bytes], frozen=True):
    """Answered with itself."""

    data: bytes


class Hold(Request[None], frozen=True):
    """Keeps the host's thread until the test lets it go on."""


class TestHost(LedgerHost):
    """A ledger, and two requests of its own."""

    __test__ = False
    messages = Messages(Echo, Hold)

    def __init__(self):
        super().__init__(LedgerService())
        self.held, self.go_on = threading.Event(), threading.Event()

    def answer(self, request, client):
        if isinstance(request, Echo):
            return request.data
        if isinstance(request, Hold):
            self.held.set()
            assert self.go_on.wait(LONG_S)
            return None
        return super().answer(request, client)


@contextlib.contextmanager
def running(place):
    """A host that runs, with its server and its address."""
    host = TestHost()
    listener, token, tls, host.address = place
    host.server = Server(host, listener, token=token, tls=tls)
    thread = threading.Thread(target=host.server.run)
    thread.start()
    try:
        yield host
    finally:
        host.go_on.set()
        host.server.close()
        thread.join()


def over_tcp(ip="127.0.0.1"):
    listener, token = listen_on(ip), new_token()
    return listener, token, None, TcpAddress(ip, listener.getsockname()[1], token)


def over_tls():
    pytest.importorskip("cryptography", reason="not run: cryptography is optional; only a host behind TLS needs it")
    listener, token, _, address = over_tcp()
    tls, certificate = server.new_tls(address.ip)
    return listener, token, tls, replace(address, certificate=certificate)


@pytest.fixture(params=["unix", "tcp", "tls"])
def host(request, tmp_path):
    path = tmp_path / "s"
    ways = {"unix": lambda: (listen_at(path), b"", None, UnixAddress(path)), "tcp": over_tcp, "tls": over_tls}
    with running(ways[request.param]()) as found:
        yield found


@pytest.fixture
def session(host):
    with contextlib.closing(session_with(host)) as made:
        yield made


@pytest.fixture
def other(host):
    with contextlib.closing(session_with(host)) as made:
        yield made


def soon():
    return time.monotonic() + LONG_S


def session_with(host, address=None, **options):
    return Session(address or host.address, TestHost.messages, soon(), failure, **options)


def held_up(host, session):
    """A call that ends when the test lets the host go on."""
    call = Background(lambda: session.call("hold", soon(), Hold()))
    assert host.held.wait(LONG_S)
    return call


def ended(channel):
    """Whether the host closes a connection, and sends nothing before."""
    channel.settimeout(LONG_S)
    try:
        return channel.recv(1) == b""
    except ConnectionResetError:
        return True


def connection_to(host):
    return socket.create_connection((host.address.ip, host.address.port))


def registration(partition):
    return commands.RegisterRequest(partition, ["x"], None, ["t"], None, {}, "e")


def register(session, partition="p"):
    session.call("register", soon(), registration(partition))


def partitions(session):
    return session.call("list", soon(), commands.ListPartitionsRequest())


def claim(token):
    return commands.ClaimRequest("p", "t", ["x"], 1, all_or_nothing=True, lease_s=None, token=token)


def test_messages_of_any_size_and_from_many_threads_are_answered_to_who_asked(session):
    def ask(number):
        for size in (0, 1, 3_000_000, number):
            data = bytes([number]) * size
            assert session.call("echo", soon(), Echo(data)) == data

    in_threads(*(partial(ask, number) for number in range(4)))
    with pytest.raises(UnknownPartitionError):
        session.call("describe", soon(), commands.DescribeRequest("nothing"))


def test_of_requests_that_go_together_none_is_carried_out_after_one_that_is_refused(session):
    one, bad = commands.ListPartitionsRequest(), commands.DescribeRequest("none")
    assert session.call_all("the test's", soon(), [one, one]) == [[], []]
    with pytest.raises(UnknownPartitionError):
        session.call_all("the test's", soon(), [registration("a"), bad, registration("b")])
    assert list(partitions(session)) == ["a"]
    with pytest.raises(InvalidRequestError, match="comes alone"):
        session.call_all("the test's", soon(), [Together([])])


def test_a_request_that_was_given_up_is_not_carried_out(host, session, other):
    busy = held_up(host, other)
    for name in "pq":  # each on a connection of its own, and both are read at a time
        with pytest.raises(OperationTimeoutError):
            session.call("register", time.monotonic() + 0.05, registration(name))
    host.go_on.set()
    busy.result(LONG_S)
    assert partitions(session) == []
    with pytest.raises(OperationTimeoutError, match="Nothing was sent"):
        session.call("list", time.monotonic(), commands.ListPartitionsRequest())


def test_what_waits_is_woken_and_what_ended_keeps_nobody_waiting(host, session, other):
    woken = threading.Event()
    register(session)
    assert not other.call("claim", soon(), claim("dead"), lambda: None).answered
    assert not session.call("claim", soon(), claim("alive"), woken.set).answered
    other.close()
    eventually(lambda: len(host._clients) == 1, LONG_S)
    begin = commands.BeginPut("p", ["a"], X, [commands.Write(list(X), [8])], ttl_s=9.0)
    session.call("commit", soon(), commands.CommitPut(session.call("begin", soon(), begin)))
    assert woken.wait(LONG_S)
    assert session.call("claim", soon(), claim("alive"), woken.set).sample_ids == ["a"]
    assert not session._waiting


def test_who_waits_notices_that_the_host_has_ended():
    woken = threading.Event()
    with running(over_tcp()) as host:
        session = session_with(host)
        register(session)
        session.call("claim", soon(), claim("k"), woken.set)
    assert woken.wait(LONG_S)
    with pytest.raises(LostReplyError):
        partitions(session)


@pytest.mark.parametrize("ends", ["well", "killed"])
def test_a_host_that_settles_knows_whether_a_client_is_there(ends):
    with running(over_tcp()) as host:
        session = session_with(host)
        call = held_up(host, session)
        assert host.server.has_clients()
        if ends == "killed":  # then the other side may get a reset
            session._first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            session._first.close()
        session.close()
        assert not host.server.has_clients()
        host.go_on.set()
        with pytest.raises(ClientClosedError):
            call.result(LONG_S)


def test_whether_a_client_is_there_is_known_while_others_come_and_go():
    switch_s = sys.getswitchinterval()
    with running(over_tcp()) as host:

        def come_and_go():
            for _ in range(300):
                session_with(host).close()

        sys.setswitchinterval(1e-6)
        try:
            others = Background(come_and_go)
            while others.running:
                host.server.has_clients()
        finally:
            sys.setswitchinterval(switch_s)
        others.result(LONG_S)


def test_closing_ends_the_calls_of_other_threads(host, session):
    waiting = held_up(host, session)
    session.close()
    with pytest.raises(ClientClosedError):
        waiting.result(LONG_S)
    with pytest.raises(ClientClosedError):
        partitions(session)


def test_a_call_that_ends_after_its_session_leaves_no_connection(session):
    session.call("echo", soon(), Echo(b"a"), receive=lambda reply, fill: session.finish())
    assert not session._idle


def test_a_call_that_waits_long_watches_the_host(host, monkeypatch):
    monkeypatch.setattr("dataplane_core.hosting.session._PATIENCE_S", 0.01)

    def check():
        if host.held.is_set() and not host.go_on.is_set():  # only then: any answer may take longer than that
            raise BackendUnavailableError("the host is dead.")

    with contextlib.closing(session_with(host, watch=lambda: check)) as session:
        with pytest.raises(BackendUnavailableError, match="is dead"):
            session.call("hold", soon(), Hold())
        host.go_on.set()
        assert session.call("echo", soon(), Echo(b"a")) == b"a"


def test_use_after_a_fork_is_refused_and_leaves_the_parents_session(session):
    child = os.fork()
    if child == 0:
        try:
            partitions(session)
        except ClientClosedError:
            session.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert partitions(session) == []


def test_a_session_ends_with_its_process_although_a_fork_lives_on(host):
    session = session_with(host)
    (forked, tell), (wait, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.write(tell, b"1")
        os.read(wait, 1)  # until the test closes the other end
        os._exit(0)
    os.read(forked, 1)
    session._first.close()  # as the kernel does it for a process that is killed
    eventually(lambda: not host._clients, LONG_S)
    for descriptor in (end, forked, tell, wait):
        os.close(descriptor)
    os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of one that the interrupt took from everybody
def test_an_interrupt_at_any_instruction_of_a_call_leaves_no_socket_open(session, interrupted):
    at = 0
    while interrupted(lambda: session.call("echo", soon(), Echo(b"x")), at, sessions) is not None:
        assert all(channel.fileno() < 0 for channel in session._used), at
        at += 1
    assert at > 100


def test_pins_that_end_while_all_sockets_are_in_use_are_released_by_the_call_that_ends(host, session):
    busy = held_up(host, session)
    session.release(1)
    assert session._unreleased
    host.go_on.set()
    busy.result(LONG_S)
    assert not session._unreleased


# --- strangers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [bytes(range(64)), b"GET / HTTP/1.1\r\n\r\n", encode(Hello(VERSION))])
def test_who_does_not_know_the_token_is_not_served(garbage):
    with running(over_tcp()) as host, connection_to(host) as channel:
        channel.sendall(garbage)
        assert ended(channel)


def test_a_host_that_does_not_know_the_token_is_not_believed():
    with running(over_tcp()) as host:
        host.server._token = host.server._token[: sessions.HALF_BYTES] + os.urandom(sessions.HALF_BYTES)
        with pytest.raises(LostReplyError, match="does not know the token"):
            session_with(host)


@pytest.mark.parametrize("certificate", ["", "another"])
def test_who_does_not_know_the_certificate_gets_no_answer(certificate):
    with running(over_tls()) as host:
        _, other = server.new_tls(host.address.ip)
        with pytest.raises(BackendUnavailableError):
            session_with(host, address=replace(host.address, certificate=certificate and other))


@pytest.mark.parametrize("place", [over_tcp, over_tls])
def test_who_says_nothing_is_dropped_in_time(monkeypatch, place):
    monkeypatch.setattr(server, "_GREETING_S", 0.0)
    with running(place()) as host, connection_to(host) as channel:
        assert ended(channel)


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="this machine has no IPv6")
def test_an_ipv6_address_is_reached():
    with running(over_tcp("::1")) as host, contextlib.closing(session_with(host)) as session:
        assert partitions(session) == []


def test_what_is_no_request_ends_only_its_connection(session):
    channel = session._take("the test's", soon())
    channel.sendall(bytes([2, 0, 0, 0, 250, 250]))
    assert ended(channel)
    channel.close()
    assert partitions(session) == []


def test_a_session_with_a_key_of_another_host_is_refused(session):
    session.welcome.key = "of another"
    with pytest.raises(LostReplyError):
        partitions(session)


def test_a_client_that_reads_slowly_and_sends_by_halves_gets_all_and_keeps_nobody_waiting(session, other):
    channel = session._take("the test's", soon())
    message = TestHost.messages.encode_request(Echo(bytes(16_000_000)))  # more than the sockets hold
    channel.sendall(message + message[:1000])
    assert other.call("echo", soon(), Echo(b"quick")) == b"quick"
    left = int.from_bytes(channel.recv(4), "little")
    assert left > 16_000_000
    while left:
        left -= len(channel.recv(left))
    channel.close()


def test_a_socket_whose_queue_is_full_is_waited_for(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as waiting:
        listener.bind(str(path))
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                channel = waiting.enter_context(socket.socket(socket.AF_UNIX))
                channel.setblocking(False)
                channel.connect(str(path))
        with pytest.raises(OperationTimeoutError):
            Session(UnixAddress(path), Messages(), time.monotonic() + 0.1, failure)


def test_what_listens_and_speaks_something_else_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak():
            channel, _ = listener.accept()
            with channel:
                channel.recv(1000)
                channel.sendall(encode({"no": "welcome"}))

        speaking = Background(speak)
        with pytest.raises(BackendError, match="cannot read"):
            Session(TcpAddress("127.0.0.1", listener.getsockname()[1], b""), Messages(), soon(), failure)
        speaking.result(LONG_S)
