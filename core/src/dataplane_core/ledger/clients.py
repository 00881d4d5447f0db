"""The clients that announced themselves. They are no part of the ledger's state: they announce themselves again."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Final

from dataplane_core.spec import ClientInfo

#: Seconds for which a client that ended is still known, and of how many.
ENDED_KEPT_S: Final = 600.0
MOST_ENDED: Final = 1000


class ClientRegister:
    """Lists clients until their time is over, and a while longer as ended. Pure, like the ledger."""

    def __init__(self) -> None:
        # id -> announcement, its time, its end; the latter are those that ended, in the order in which that was noticed
        self._clients: dict[str, tuple[ClientInfo, float, float]] = {}
        self._ended: dict[str, tuple[ClientInfo, float, float]] = {}

    def announce(self, client: ClientInfo, ttl_s: float, now: float) -> int:
        """Lists a client for ``ttl_s`` seconds, or no longer if that is 0. Returns how many are listed."""
        self._clients.pop(client.client_id, None)
        self._ended.pop(client.client_id, None)
        if ttl_s > 0:
            self._clients[client.client_id] = client, now, now + ttl_s
        else:
            self._ended[client.client_id] = replace(client, state="closed"), now, now
        # the others follow one another by the time of their announcement, so those whose time is over come first
        for client_id, (_, _, ends_at) in list(islice(self._clients.items(), 2)):
            if ends_at <= now:
                self._ended[client_id] = self._clients.pop(client_id)
        for client_id, (_, _, ends_at) in list(islice(self._ended.items(), 3)):
            if ends_at + ENDED_KEPT_S <= now or len(self._ended) > MOST_ENDED:
                del self._ended[client_id]
        return len(self._clients)

    def listed(self, now: float, ended: bool = False) -> list[ClientInfo]:
        """The clients whose time is not over, and those that ended not long ago if they are asked for."""
        known = [*self._clients.values(), *(self._ended.values() if ended else ())]
        return [
            replace(
                client,
                heard_s=max(0.0, now - heard_at),
                state=client.state if client.state == "closed" or ends_at > now else "silent",
            )
            for client, heard_at, ends_at in known
            if ends_at > now or (ended and ends_at + ENDED_KEPT_S > now)
        ]
