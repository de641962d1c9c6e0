"""A headless Chromium, driven through its debugging pipe: no package and no port is needed."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60


def find_chromium() -> str | None:
    """The program's path, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. `events` holds what the browser has reported: method and parameters."""

    def __init__(self, program: str) -> None:
        self.events: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)
        # Its children may still write into the profile when the browser itself is gone.
        self._profile = tempfile.TemporaryDirectory(
            prefix="inferlab-chromium-", ignore_cleanup_errors=True
        )
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        arguments = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--disable-background-networking", "--hide-scrollbars"),
            *(f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe", "about:blank"),
        ]
        # The browser reads commands from descriptor 3 and writes answers to 4.
        shell = f'exec 3<&{commands} 4>&{answers}; exec "$0" "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, program, *arguments],
            pass_fds=(commands, answers),
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._buffer = b""
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        found = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command of the DevTools protocol and wait for its answer."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def open(self, file: Path, width: int, height: int, scheme: str) -> None:
        """Show a file in a window of that size, with the colour scheme light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=file.resolve().as_uri())
        deadline = time.monotonic() + SECONDS
        while self.evaluate("document.readyState") != "complete":
            assert time.monotonic() < deadline, "the page did not finish loading"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key; what a key does by itself needs its code as well."""
        code = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code)

    def screenshot(self, file: Path, whole: bool = False) -> None:
        """Save what the window shows, or the whole page, as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
