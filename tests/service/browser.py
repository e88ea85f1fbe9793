"""A headless Chromium, driven over its own DevTools protocol.

The browser comes from PATH, else out of Debian's packages, unpacked into the cache with whatever
libraries this machine lacks (see :mod:`tests.deploy.tools`); nothing is installed.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

from tests.deploy import tools
from tests.service.server_process import wait_for

PACKAGES = ("chromium", "fonts-dejavu-core")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)
_LIBRARIES = "usr/lib/x86_64-linux-gnu"


def chromium() -> tuple[Path, dict[str, str]]:
    """The binary and the variables it needs; raises :class:`tools.ToolMissingError`."""
    if found := shutil.which("chromium") or shutil.which("chromium-browser"):
        return Path(found), {}
    root = tools.debian_packages("chromium-deb", PACKAGES)
    binary = root / "usr/lib/chromium/chromium"
    if not binary.exists():  # elsewhere the package only points to another store
        raise tools.ToolMissingError("this distribution's package chromium holds no browser")
    libraries = f"{root / _LIBRARIES}:{root / _LIBRARIES / 'pulseaudio'}"
    variables = {"LD_LIBRARY_PATH": libraries, "XDG_DATA_HOME": str(root / "usr/share")}  # fonts
    if not Path("/etc/fonts/fonts.conf").exists():
        variables["FONTCONFIG_PATH"] = str(root / "etc/fonts")
    return binary, variables


class Browser:
    """One page in a browser of its own; ``close`` ends it and its profile."""

    def __init__(self, *, width: int = 1280, height: int = 900) -> None:
        binary, variables = chromium()
        self._ids = itertools.count(1)
        self.problems: list[str] = []
        """Exceptions, console errors and what the security policy blocked, in order."""
        with contextlib.ExitStack() as stack:
            profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            self._profile = stack.enter_context(profile)
            clean = {n: v for n, v in os.environ.items() if n != "LD_PRELOAD"}
            self._process = subprocess.Popen(
                [str(binary), *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
                env={**clean, **variables, "HOME": self._profile},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(self._end_process)
            address = self._page_address()
            self._socket = stack.enter_context(connect(address, max_size=None, ping_interval=None))
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
            self.resize(width, height)
            self._stack = stack.pop_all()

    def _page_address(self) -> str:
        port_file = Path(self._profile) / "DevToolsActivePort"

        def address() -> str:
            assert self._process.poll() is None, "the browser ended at once"
            try:
                port = port_file.read_text().splitlines()[0]
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=60) as answer:
                    targets = json.load(answer)
            except (OSError, IndexError):
                return ""
            pages = (t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page")
            return next(pages, "")

        return str(wait_for(address, what="the browser did not open its port"))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command; events that come in before its answer are looked at."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=300))
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self._notice(message)

    def _notice(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(details.get("exception", details).get("description", "?"))
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            entry = parameters["entry"]
            self.problems.append(f"{entry['text']} {entry.get('url', '')}".strip())

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def leave(self) -> None:
        """Go away from the page, and forget what it complained of while its server was gone."""
        self.open("about:blank")
        self.problems.clear()

    def run(self, expression: str) -> Any:
        """Value of an expression in the page; promises are awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 120) -> None:
        """Until an expression is true."""
        wait_for(lambda: self.run(f"Boolean({expression})"), seconds, expression)

    def text(self, selector: str) -> str:
        """What a reader sees of an element; empty if it is hidden."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def type(self, selector: str, text: str) -> None:
        """Replace what is in a field, with the keyboard."""
        self.run(f"{{const e=document.querySelector({json.dumps(selector)});e.focus();e.select()}}")
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        """One key, by name and Windows key code; Enter also makes a character."""
        extra = {"text": "\r"} if key == "Enter" else {}
        common = {"key": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **extra)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def click(self, selector: str) -> None:
        """Activate an element."""
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def resize(self, width: int, height: int) -> None:
        """The size of the window, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the browser."""
        self._stack.close()

    def _end_process(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=20)
