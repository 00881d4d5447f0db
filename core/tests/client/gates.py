"""Middleware that holds a call back until a test lets it go on."""

import asyncio
import threading

from dataplane_testkit.faults import Faults


class Gate(Faults):
    """Holds an operation back, before or after it is carried out; a claim only if it was given samples."""

    def __init__(self, operation, *, before=True):
        super().__init__()
        self.entered, self.opened = threading.Event(), threading.Event()
        self._holding = (self.before if before else self.after)(operation, self._hold)
        self._holding.__enter__()

    def _hold(self, request, reply=None):
        if getattr(reply, "sample_ids", True):
            self.entered.set()
            assert self.opened.wait(30)
        return reply

    async def is_entered(self):
        while not self.entered.is_set():
            await asyncio.sleep(0.001)
