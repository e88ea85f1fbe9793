"""Runs a real helm on the chart and gives plain objects back."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.tools import ROOT

CHART = ROOT / "deploy" / "helm" / "vtoken-serve"
PRESETS = ("values-cpu.yaml", "values-h100.yaml", "values-l4.yaml")
RELEASE, NAMESPACE = "demo", "llm"

Object = dict[str, Any]


class HelmError(Exception):
    """helm refused; the message is what it printed."""


@dataclass(frozen=True)
class Helm:
    """One helm binary."""

    binary: Path

    def run(self, *arguments: str, stdin: str = "") -> str:
        """Standard output of helm.

        Raises:
            HelmError: it failed.
        """
        command = [str(self.binary), *arguments]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode != 0:
            raise HelmError(done.stderr + done.stdout)
        return done.stdout

    def lint(self, values: Mapping[str, Any], presets: Sequence[str] = ()) -> None:
        """``helm lint --strict``; raises :class:`HelmError`."""
        self.run("lint", "--strict", str(CHART), *_files(presets), stdin=json.dumps(values))

    def template(
        self, values: Mapping[str, Any] | None = None, presets: Sequence[str] = ()
    ) -> list[Object]:
        """The rendered objects; raises :class:`HelmError`."""
        command = ("template", RELEASE, str(CHART), "--namespace", NAMESPACE)
        text = self.run(*command, *_files(presets), stdin=json.dumps(values or {}))
        return [document for document in yaml.safe_load_all(text) if document]

    def notes(self, values: Mapping[str, Any], presets: Sequence[str] = ()) -> str:
        """What ``helm install`` would print; raises :class:`HelmError`."""
        command = ("install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--dry-run=client")
        return self.run(*command, *_files(presets), stdin=json.dumps(values)).split("NOTES:\n")[1]


def find(objects: Sequence[Object], kind: str, suffix: str = "") -> Object:
    """The one object of a kind (and name ending)."""
    found = [o for o in objects if o["kind"] == kind and o["metadata"]["name"].endswith(suffix)]
    assert len(found) == 1, f"{len(found)} objects of kind {kind}"
    return found[0]


def container(objects: Sequence[Object]) -> Object:
    """The server's container."""
    workload = next(o for o in objects if o["kind"] in ("Deployment", "StatefulSet"))
    first: Object = workload["spec"]["template"]["spec"]["containers"][0]
    return first


def kinds(objects: Sequence[Object]) -> set[str]:
    """The kinds rendered."""
    return {o["kind"] for o in objects}


def _files(presets: Sequence[str]) -> list[str]:
    names = [*(str(CHART / preset) for preset in presets), "-"]
    return [part for name in names for part in ("--values", name)]
