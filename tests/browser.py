"""A headless Chromium over its DevTools pipe, for tests of pages: no driver and no package beside the browser."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kimivl_lab.report.chromium import find_chromium, headless

START_S, ANSWER_S = 60, 30

# Chromium reads its commands from the descriptor 3 and writes its answers to 4.
_START = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3]]
os.dup2(pipes[0], 3), os.dup2(pipes[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One Chromium with one tab.

    `problems` holds what a page did wrong since `open`: an error or a warning in the console, an exception, a request
    that failed. `requests` holds every address that it asked for.
    """

    def __init__(self, program: str, profile: Path) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        program_of = [*headless(program, profile), "--remote-debugging-pipe", "about:blank"]
        start = [sys.executable, "-S", "-c", _START, str(commands), str(answers), *program_of]
        self._process = subprocess.Popen(
            start, pass_fds=(commands, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(commands), os.close(answers)
        os.set_blocking(self._answers, False)
        self._text, self._number = b"", 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._loaded: set[str] = set()  # the loads that are done, by Chromium's name for each
        self._session = None
        (tab,) = [one for one in self.call("Target.getTargets", limit=START_S)["targetInfos"] if one["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=tab["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def call(self, method: str, limit: float = ANSWER_S, **parameters) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        number = self._number
        answer = self._wait(lambda one: one.get("id") == number, limit, method)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path: Path, fragment: str = "", width: int = 1280, height: int = 720) -> None:
        """Loads a file, as a double click on it does, in a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        for url in ("about:blank", path.resolve().as_uri() + fragment):  # a new fragment alone would load nothing
            self.problems, self.requests = [], []
            load = self.call("Page.navigate", url=url)["loaderId"]
            if load not in self._loaded:
                self._wait(lambda one, load=load: load in self._loaded, ANSWER_S, f"loading {url}")

    def value(self, expression: str):
        """What a JavaScript expression gives in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        """One key, such as "ArrowRight"; `text` is what it writes."""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def close(self) -> None:
        os.close(self._commands)  # Chromium ends when its pipe does
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)

    def _wait(self, wanted, limit: float, words: str) -> dict:
        end = time.monotonic() + limit
        while True:
            while b"\0" not in self._text:
                assert time.monotonic() < end, f"no answer in {limit} s: {words}"
                assert self._process.poll() is None, f"Chromium left with {self._process.returncode}: {words}"
                try:
                    self._text += os.read(self._answers, 1 << 20)
                except BlockingIOError:
                    time.sleep(0.01)
            line, _, self._text = self._text.partition(b"\0")
            message = json.loads(line)
            self._note(message.get("method"), message.get("params", {}))
            if wanted(message):
                return message

    def _note(self, method: str | None, event: dict) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(event["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(event["args"])[:500])
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.problems.append(event["entry"]["text"])
        elif method == "Network.loadingFailed":
            self.problems.append(event["errorText"])
        elif method == "Network.requestWillBeSent" and not event["request"]["url"].startswith("data:"):
            self.requests.append(event["request"]["url"])
        elif method == "Page.lifecycleEvent" and event["name"] == "load":
            self._loaded.add(event["loaderId"])


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """A browser for the whole run; the test is skipped where there is no Chromium."""
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium: install it with the machine's package manager, such as `apt-get install chromium`")
    if sys.platform == "win32":
        pytest.skip("the DevTools pipe needs the file descriptors of Linux or macOS")
    one = Browser(program, tmp_path_factory.mktemp("chromium"))
    yield one
    one.close()
