"""What a server may answer, without one."""

import socket
import time

import pytest
import redis
from redis._parsers.base import BaseParser

from dataplane_redis._protocol import ArrayReader, to_error


@pytest.mark.parametrize(
    "refusal",
    [
        "LOADING Redis is loading the dataset in memory",
        "BUSY Redis is busy running a script.",
        "MISCONF Errors writing to the AOF file: No space left on device",
        "NOREPLICAS Not enough good replicas to write.",
        "READONLY You can't write against a read only replica.",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "CLUSTERDOWN The cluster is down",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    ],
)
def test_a_command_that_was_refused_before_it_began_was_not_done(refusal):
    for error in (BaseParser.parse_error(refusal), redis.ResponseError(refusal)):
        assert to_error("put_samples('p')", "the server", error).outcome == "not_done"


@pytest.mark.parametrize("reply", [b"\r\n", b"+OK\r\n", b"*x\r\n", b"*1\r\n:7\r\n"])
def test_what_is_no_array_of_strings_is_refused_at_once(reply):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(reply)
        with pytest.raises(redis.InvalidResponse):
            ArrayReader(ours, 100, time.monotonic() + 5.0).read()
