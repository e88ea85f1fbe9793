"""Runs the rendered container as a process on this machine: its command, environment, mounts.

What stands in for the platform: the image's ``ENV`` comes from the Dockerfile, paths of the image
and of mounts are led into a folder, Secrets and the ConfigMap are resolved, the port is a free one.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from service.settings.environment import default_cache_dir
from tests.deploy import dockerfile
from tests.deploy.helm import Object, container, find
from tests.deploy.tools import ROOT

_BASE = ("PATH", "LANG", "LC_ALL", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


class Pod:
    """The server's container of rendered objects, as a process."""

    def __init__(self, objects: Sequence[Object], folder: Path) -> None:
        self.spec = container(objects)
        self.pod_spec = find(objects, "Deployment")["spec"]["template"]["spec"]
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "log.txt"
        self._folder = folder
        self._mount_volumes(objects)
        environment = self._environment(objects)
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                self._command(),
                cwd=folder / "home/vtoken",
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def probe(self, name: str) -> bool:
        """Ask as the kubelet would: the manifest's path and timeout; 200 to 399 is success."""
        probe = self.spec[f"{name}Probe"]
        url = self.url + probe["httpGet"]["path"]
        try:
            with urllib.request.urlopen(url, timeout=probe["timeoutSeconds"]) as answer:
                return 200 <= answer.status < 400
        except OSError:
            return False

    def wait_until_started(self) -> None:
        """Repeat the startup probe within its own budget.

        Raises:
            AssertionError: the process ended, or the kubelet would have killed it.
        """
        probe = self.spec["startupProbe"]
        for _ in range(probe["failureThreshold"]):
            if self.probe("startup"):
                return
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(probe["periodSeconds"])
        raise AssertionError(self.log.read_text()[-3000:])

    def terminate(self) -> float:
        """What happens at deletion: preStop, SIGTERM, and at most the grace period; its seconds.

        Raises:
            subprocess.TimeoutExpired: SIGKILL would have followed.
        """
        started = time.monotonic()
        grace = self.pod_spec["terminationGracePeriodSeconds"]
        command = self.spec["lifecycle"]["preStop"]["exec"]["command"]
        subprocess.run(command, check=True, timeout=grace)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=grace - (time.monotonic() - started))
        return time.monotonic() - started

    def kill(self) -> None:
        """End every process of the pod."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30)

    def _command(self) -> list[str]:
        assert self.spec["command"][0] == "vtoken-serve"
        program = Path(sys.executable).parent / "vtoken-serve"
        arguments = [*self.spec["command"][1:], *self.spec["args"]]
        return [
            str(program),
            *(re.sub(r"^--port=8000$", f"--port={self.port}", a) for a in arguments),
        ]

    def _mount_volumes(self, objects: Sequence[Object]) -> None:
        for mount in self.spec["volumeMounts"]:
            path = self._folder / mount["mountPath"].lstrip("/")
            path.mkdir(parents=True, exist_ok=True)
            volume = next(v for v in self.pod_spec["volumes"] if v["name"] == mount["name"])
            if "secret" in volume:
                data = find(objects, "Secret", volume["secret"]["secretName"])["stringData"]
                for item in volume["secret"]["items"]:
                    (path / item["path"]).write_text(data[item["key"]])

    def _environment(self, objects: Sequence[Object]) -> dict[str, str]:
        image = dockerfile.read(ROOT / "Dockerfile")["cpu"].environment()
        iomp = Path(sys.prefix) / "lib" / "libiomp5.so"
        own = {"PATH": os.environ["PATH"], "LD_PRELOAD": str(iomp) if iomp.exists() else ""}
        own["VTOKEN_CACHE_DIR"] = str(default_cache_dir())
        environment = {name: os.environ[name] for name in _BASE if name in os.environ}
        environment |= {n: self._inside(v) for n, v in image.items()} | own
        for source in self.spec["envFrom"]:
            data: Mapping[str, str] = find(objects, "ConfigMap", source["configMapRef"]["name"])[
                "data"
            ]
            environment |= {name: self._inside(value) for name, value in data.items()}
        for entry in self.spec.get("env", []):
            environment[entry["name"]] = self._inside(_value(entry, objects))
        return {**environment, "TMPDIR": str(self._folder / "tmp")}

    def _inside(self, value: str) -> str:
        return (
            f"{self._folder}{value}"
            if value.startswith(("/cache", "/home", "/tmp", "/etc"))
            else value
        )


def _value(entry: Mapping[str, Any], objects: Sequence[Object]) -> str:
    if "value" in entry:
        return str(entry["value"])
    reference = entry["valueFrom"]["secretKeyRef"]
    return str(find(objects, "Secret", reference["name"])["stringData"][reference["key"]])


def free_port() -> int:
    """A port that nobody has now, for a process that binds it only later.

    Not one of those that the system gives to whoever asks for any (Linux: from 32768 on).
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
