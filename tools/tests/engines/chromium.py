"""A real Chromium without a window, driven over its DevTools protocol."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
from itertools import count
from pathlib import Path

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_START_S = 120.0
_ANSWER_S = 60.0


class Browser:
    """A Chromium with one page. Use it in a ``with`` statement; its profile lies in ``folder``."""

    def __init__(self, folder, size="1400,900"):
        self._profile = Path(folder) / "profile"
        self._size = size
        self._numbers = count(1)
        #: What the pages did wrong: exceptions, and what the browser logged, such as a request that was refused.
        self.errors = []

    def __enter__(self):
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        arguments += ["--remote-debugging-port=0", f"--user-data-dir={self._profile}", f"--window-size={self._size}"]
        arguments += ["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]
        env = os.environ | dict.fromkeys(("HOME", "TMPDIR", "XDG_CONFIG_HOME"), str(self._profile.parent))
        self._process = subprocess.Popen(
            [PROGRAM, *arguments, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
        self._loop = asyncio.new_event_loop()
        try:
            self._loop.run_until_complete(self._connect())
            for part in ("Runtime", "Log", "Page"):
                self.send(f"{part}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._loop.run_until_complete(self._disconnect())
        self._loop.close()
        os.killpg(self._process.pid, signal.SIGKILL)  # its own session: the browser and all of its processes
        self._process.wait()

    async def _connect(self):
        self._session = aiohttp.ClientSession()
        self._socket = None
        port = self._profile / "DevToolsActivePort"
        deadline = time.monotonic() + _START_S
        while not (port.is_file() and port.read_text().count("\n") == 1):
            assert self._process.poll() is None, "Chromium has ended"
            assert time.monotonic() < deadline, "Chromium does not start"
            await asyncio.sleep(0.05)
        address = f"http://127.0.0.1:{port.read_text().split()[0]}"
        while not (targets := await self._pages(address)):  # it listens before it has opened its page
            assert time.monotonic() < deadline, "Chromium opens no page"
            await asyncio.sleep(0.05)
        (target,) = targets
        self._socket = await self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)

    async def _pages(self, address):
        async with self._session.get(f"{address}/json/list") as answer:
            return [each for each in await answer.json() if each["type"] == "page"]

    async def _disconnect(self):
        if self._socket is not None:
            await self._socket.close()
        await self._session.close()

    def send(self, method, **parameters):
        """Sends a command of the protocol, and returns its result."""
        return self._loop.run_until_complete(self._send(method, parameters))

    async def _send(self, method, parameters):
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            answer = json.loads(await self._socket.receive_str(timeout=_ANSWER_S))
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(answer["params"])
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, path, fragment=""):
        """Opens a file, and waits until it is loaded."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=f"{Path(path).resolve().as_uri()}{fragment}")
        self.wait("location.protocol == 'file:' && document.readyState == 'complete'")

    def wait(self, script):
        """Waits until an expression in the page is true."""
        deadline = time.monotonic() + _ANSWER_S
        while not self.run(script):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.01)

    def run(self, script):
        """The value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def click(self, selector, number=0):
        """Clicks the middle of an element, which is scrolled into view."""
        box = self.run(
            f"(() => {{ const each = document.querySelectorAll({json.dumps(selector)})[{number}];"
            "each.scrollIntoView({ block: 'nearest', inline: 'nearest' });"
            "const box = each.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, *keys):
        """Presses keys, one after the other: ``j``, ``Enter``, ``Escape``."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
            self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", key=key)
