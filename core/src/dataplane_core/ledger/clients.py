"""The clients that announced themselves. They are no part of the ledger's state: they announce themselves again."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from dataplane_core.spec import ClientInfo


class ClientRegister:
    """Lists clients until their time is over. Pure, like the ledger."""

    def __init__(self) -> None:
        self._clients: dict[str, tuple[ClientInfo, float, float]] = {}  # id -> announcement, its time, its end

    def announce(self, client: ClientInfo, ttl_s: float, now: float) -> int:
        """Lists a client for ``ttl_s`` seconds, or no longer if that is 0. Returns how many are listed."""
        self._clients.pop(client.client_id, None)
        if ttl_s > 0:
            self._clients[client.client_id] = client, now, now + ttl_s
        # the others follow one another by the time of their announcement, so those whose time is over come first
        for client_id, (_, _, ends_at) in list(islice(self._clients.items(), 2)):
            if ends_at <= now:
                del self._clients[client_id]
        return len(self._clients)

    def listed(self, now: float) -> list[ClientInfo]:
        """The clients whose time is not over."""
        return [
            replace(client, heard_s=max(0.0, now - heard_at))
            for client, heard_at, ends_at in self._clients.values()
            if ends_at > now
        ]
