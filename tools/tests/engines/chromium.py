"""A real Chromium without a window, driven by its DevTools protocol over two pipes."""

import json
import os
import select
import shutil
import signal
import subprocess
import time
from itertools import count
from pathlib import Path

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_ANSWER_S = 120.0
#: It reads commands from descriptor 3, and writes to 4.
_WITH_PIPES = 'exec "$@" 3<&{commands} 4>&{answers}'


class Browser:
    """A Chromium with one page. Use it in a ``with`` statement; its profile lies in ``folder``."""

    def __init__(self, folder):
        self._folder = Path(folder)
        self._numbers = count(1)
        self._session = {}
        self._unread = b""
        #: What the pages did wrong: exceptions, and what the browser logged, such as a request that was refused.
        self.errors = []

    def __enter__(self):
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        arguments += ["--remote-debugging-pipe", f"--user-data-dir={self._folder}/profile", "--hide-scrollbars"]
        arguments += ["--disable-background-networking", "--disable-component-update", "--window-size=1400,900"]
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        words = ["bash", "-c", _WITH_PIPES.format(commands=commands, answers=answers), "bash", PROGRAM, *arguments]
        self._process = subprocess.Popen(
            [*words, "about:blank"],
            **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL),
            env=os.environ | dict.fromkeys(("HOME", "TMPDIR", "XDG_CONFIG_HOME"), str(self._folder)),
            start_new_session=True,
            pass_fds=(commands, answers),
        )
        os.close(commands)
        os.close(answers)
        try:
            deadline = time.monotonic() + _ANSWER_S
            while not (pages := self._pages()):  # it answers before it has opened its page
                assert time.monotonic() < deadline, "Chromium opens no page"
                time.sleep(0.05)
            attached = self.send("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
            self._session = {"sessionId": attached["sessionId"]}
            for part in ("Runtime", "Log", "Page"):
                self.send(f"{part}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        os.killpg(self._process.pid, signal.SIGKILL)  # its own session: the browser and all of its processes
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def _pages(self):
        return [target for target in self.send("Target.getTargets")["targetInfos"] if target["type"] == "page"]

    def send(self, method, **parameters):
        """Sends a command of the protocol, and returns its result."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (answer := self._answer()).get("id") != number:
            if answer["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(answer["params"])
        assert "error" not in answer, answer
        return answer["result"]

    def _answer(self):
        while b"\0" not in self._unread:
            assert select.select([self._answers], [], [], _ANSWER_S)[0], "Chromium does not answer"
            read = os.read(self._answers, 1 << 20)
            assert read, "Chromium has ended"
            self._unread += read
        answer, _, self._unread = self._unread.partition(b"\0")
        return json.loads(answer)

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
