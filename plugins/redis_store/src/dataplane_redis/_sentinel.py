"""A service of Redis Sentinel: its URL, and which server is its primary now.

redis-py's `Sentinel` asks one sentinel and judges its answer. Which one to believe is decided here: redis-py's own
choice follows a sentinel that missed a failover, has no deadline for all of them together, and takes one that refuses
the user, or does not know the service, for one that is down.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

from dataplane_redis._protocol import is_untrusted

#: The schemes of a service, and those of its servers.
SENTINEL_SCHEMES: Final = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
#: Seconds that a sentinel may take to answer, before the next one is asked.
_ANSWER_S: Final = 1.0
_PORT: Final = 26379


class NoPrimaryError(Exception):
    """No sentinel names a primary that is up. A failover may be under way."""


class UnknownServiceError(Exception):
    """All sentinels answered, and none of them has the service."""


@dataclass(slots=True)
class Service:
    """A service that sentinels watch. Thread-safe."""

    name: str
    sentinels: list[tuple[str, int]]  # host and port; the one that answered last comes first
    server_url: str  # for redis-py: how to connect to a server of the service; its host and port mean nothing
    options: dict[str, Any] = field(default_factory=dict)  # of connections to sentinels
    epoch: int = 0  # of the newest failover that a sentinel told of

    @classmethod
    def of(cls, url: str) -> Service | None:
        """The service of a URL, ``redis+sentinel://[user:password@]host:port,host:port/service[/db]``. None for another
        kind of URL. Raises `ValueError` if it names no service, or a port is not a number."""
        scheme = SENTINEL_SCHEMES.get(url.partition("://")[0])
        if scheme is None:
            return None
        parts = urlsplit(url)
        user, at, places = parts.netloc.rpartition("@")
        name, _, db = parts.path.removeprefix("/").partition("/")
        sentinels = [_place_of(each) for each in places.split(",")]
        if not name or (db and not db.isdecimal()):
            raise ValueError("expected /service or /service/db after the sentinels")
        query = parse_qsl(parts.query, keep_blank_values=True)
        own = {key.removeprefix("sentinel_"): value for key, value in query if key.startswith("sentinel_")}
        if own.keys() - {"username", "password"}:
            raise ValueError("expected sentinel_username or sentinel_password")
        rest = [(key, value) for key, value in query if not key.startswith("sentinel_")]
        asked = f"?{urlencode(rest)}" if rest else ""
        server_url = f"{scheme}://{user}{at}localhost/{db or 0}{asked}"
        options: dict[str, Any] = dict(own)
        if scheme == "rediss":
            of_server = ConnectionPool.from_url(server_url).connection_kwargs
            options |= {"ssl": True} | {key: value for key, value in of_server.items() if key.startswith("ssl_")}
        return cls(unquote(name), sentinels, server_url, options)

    @property
    def label(self) -> str:
        """What messages call it."""
        places = ", ".join(f"{host}:{port}" for host, port in sorted(self.sentinels))
        return f"the Redis service '{self.name}' of the sentinels at {places}"

    def primary(self, deadline: float) -> tuple[str, int]:
        """Host and port of the server that is the primary now. Skips sentinels that missed a failover of which another
        one told: they name an old primary.

        Raises:
            NoPrimaryError: No sentinel names one.
            UnknownServiceError: They do not know the service.
            RedisError: A sentinel refuses the user, or we refuse the certificates of all sentinels.
        """
        reasons: list[str] = []
        untrusted: list[Exception] = []
        known: set[str] = set()
        behind: list[tuple[int, tuple[str, int], dict[str, Any]]] = []
        for place in list(self.sentinels):
            left_s = min(_ANSWER_S, deadline - time.monotonic())
            if left_s <= 0:
                break
            name, found = f"{place[0]}:{place[1]}", self._ask(place, left_s)
            if isinstance(found, Exception):
                reasons.append(f"{name}: {found}")
                if is_untrusted(found):
                    untrusted.append(found)
                continue
            known |= found.keys()
            state = found.get(self.name)
            if state is None:
                reasons.append(f"{name} does not watch it")
            elif not state["is_up"]:
                reasons.append(f"{name} says that its primary is down")
            elif state["config-epoch"] < self.epoch:
                reasons.append(f"{name} has not heard of the last failover")
                behind.append((state["config-epoch"], place, state))
            else:
                return self._chosen(place, state)
        if len(behind) == len(self.sentinels):  # they were set up anew
            return self._chosen(*max(behind, key=lambda each: each[0])[1:])
        if len(reasons) == len(self.sentinels) and all(each.endswith("does not watch it") for each in reasons):
            raise UnknownServiceError(", ".join(sorted(known)) or "none")
        if len(untrusted) == len(self.sentinels):
            raise untrusted[0]
        raise NoPrimaryError("; ".join(reasons) or "no sentinel was asked in time")

    def _chosen(self, place: tuple[str, int], state: dict[str, Any]) -> tuple[str, int]:
        self.epoch = state["config-epoch"]
        self.sentinels = [place, *(each for each in self.sentinels if each != place)]
        return str(state["ip"]), int(state["port"])

    def num_answering(self, deadline: float) -> int:
        """How many sentinels answer and know the service. Raises as `primary` if one refuses the user."""
        found = [self._ask(each, min(_ANSWER_S, max(0.01, deadline - time.monotonic()))) for each in self.sentinels]
        return sum(not isinstance(each, Exception) and self.name in each for each in found)

    def _ask(self, place: tuple[str, int], timeout_s: float) -> dict[str, Any] | Exception:
        """The services of a sentinel with their states, or why it does not answer."""
        times = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "retry": Retry(NoBackoff(), 0)}
        make: Any = Sentinel  # redis-py's class has no types
        asked = make([place], sentinel_kwargs={**self.options, **times})
        try:
            states: dict[str, Any] = asked.sentinels[0].sentinel_masters()
            return {name: state | {"is_up": asked.check_master_state(state, name)} for name, state in states.items()}
        except (AuthenticationError, NoPermissionError):
            raise
        except (RedisError, OSError) as error:
            return error
        finally:
            asked.sentinels[0].close()


def _place_of(text: str) -> tuple[str, int]:
    """``host``, ``host:port`` or ``[address]:port``."""
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.path:
        raise ValueError("expected host:port of each sentinel")
    return parts.hostname, parts.port or _PORT
