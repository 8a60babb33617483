"""A headless Chromium that tests look at pages with, driven through its debugging pipe."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_DEADLINE = 300  # seconds; the machine may be busy, or stand still


class Browser:
    """One page in a browser without a network.

    Args:
        profile: an empty folder.

    Attributes:
        complaints: uncaught exceptions of scripts, and whatever the browser logs as an error.
    """

    def __init__(self, profile: Path):
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        self.complaints: list[str] = []
        self._buffer, self._count, self._session = b"", 0, None

        def place_pipes() -> None:  # the browser reads commands from 3 and answers on 4
            low, high = os.dup(to_browser), os.dup(from_browser)
            os.dup2(low, 3)
            os.dup2(high, 4)

        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        flags += ["--disable-background-networking", "--proxy-server=127.0.0.1:9", "--hide-scrollbars"]
        self._process = subprocess.Popen(
            [CHROMIUM, *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"],
            preexec_fn=place_pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        pages = self.ask("Target.getTargets")["targetInfos"]
        page = next(found for found in pages if found["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        self.ask("Emulation.setFocusEmulationEnabled", enabled=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self._session = None
        try:
            self.ask("Browser.close")  # its children end with it
            self._process.wait(timeout=_DEADLINE)
        finally:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def ask(self, method: str, **parameters: object) -> dict:
        """One command of the DevTools protocol, and its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, path: Path, width: int, height: int, is_dark: bool = False) -> None:
        """Shows a file in a window of some size."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=scheme)
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + _DEADLINE
        while self.run("location.href + document.readyState") != f"{path.resolve().as_uri()}complete":
            assert time.monotonic() < end, "the page does not load"

    def run(self, script: str) -> object:
        """The value of an expression in the page."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Presses a key and lets it go."""
        for kind in ("keyDown", "keyUp"):
            codes = {"windowsVirtualKeyCode": 9} if key == "Tab" else {}
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, **codes)

    def point(self, selector: str) -> None:
        """Moves the mouse over an element."""
        at = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{at}.scrollIntoView({{block: 'center'}})")
        box = self.run(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({at}.getClientRects()[0])")
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def photograph(self, path: Path, is_whole: bool = False) -> None:
        """Saves what the window shows, or the whole page, as PNG."""
        data = self.ask("Page.captureScreenshot", captureBeyondViewport=is_whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def _next(self) -> dict:
        """The next message from the browser."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], _DEADLINE)
            assert ready, "the browser does not answer"
            read = os.read(self._read, 1 << 16)
            assert read, "the browser has gone"
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        is_log = message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error"
        if is_log or message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(message["params"]))
        return message
