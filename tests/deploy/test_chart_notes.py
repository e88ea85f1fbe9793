"""What `helm install` prints: commands that work when they are pasted, and what will not work."""

from __future__ import annotations

import base64
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from service.auth_keys import parse_lines
from tests.deploy.helm import Helm
from tests.deploy.matrix import GPU, KEYS, NAMED_KEYS, NETWORK

pytestmark = pytest.mark.k8s

CLOSED: dict[str, Any] = {"networkPolicy": {"enabled": True}}
GATEWAYS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}]
WARNING = "WARNING: networkPolicy.ingressFrom lets only pods of namespace llm call the API"


def pasted(notes: str, variable: str, secret: dict[str, str], folder: Path) -> str:
    """What the shell has in the variable after its line, with a kubectl that knows one Secret."""
    (line,) = [line for line in notes.splitlines() if f"{variable}=$(" in line]
    values = {name: base64.b64encode(text.encode()).decode() for name, text in secret.items()}
    asked = re.findall(r"jsonpath='\{\.data\.(\S+)\}'", line)[0].replace("\\.", ".")
    answer = " ".join(values.values()) if asked == "*" else values[asked]
    kubectl = folder / "kubectl"
    kubectl.write_text(f"#!/bin/sh\nprintf %s '{answer}'\n")
    kubectl.chmod(0o755)
    done = subprocess.run(
        ["sh", "-ec", f'{line}\nprintf "<%s>" "${variable}"'],
        env={"PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout[1:-1]


@pytest.mark.parametrize(
    "text",
    [
        "bare\nother\n",
        "alice: s3cret\nbob: other\n",
        "# who may change the policy\n\n  team.a-1:   s3cret  \nother",
        "user:password\n",
        "alice: two words\r\n",
        "-not-a-name: s3cret\n",
        f"{'n' * 65}: too long for a name\n",
    ],
)
def test_admin_key_of_the_notes_is_a_key(helm4: Helm, text: str, tmp_path: Path) -> None:
    """The first that the server knows: past comments, without its name."""
    first = parse_lines(text, "admin")[0][1]
    secret = {"admin-keys": text}
    assert pasted(helm4.notes(KEYS), "ADMIN_KEY", secret, tmp_path) == first


def test_keys_of_the_notes_may_have_dots_in_their_places(helm4: Helm, tmp_path: Path) -> None:
    """And the API key is taken as it is, since it has no name."""
    place = {"existingSecret": "keys", "existingSecretKey": "key.txt"}
    notes = helm4.notes({"auth": {"apiKey": place}})
    assert pasted(notes, "API_KEY", {"key.txt": "# a: key\n"}, tmp_path) == "# a: key"


def test_notes_work_with_named_keys_alone(helm4: Helm, tmp_path: Path) -> None:
    """Any entry of the Secret is a key, and the commands that need one are there."""
    auth = {name: NAMED_KEYS["auth"][name] for name in ("namedApiKeys", "namedAdminKeys")}
    notes = helm4.notes({"auth": auth})
    secret = {"alice": "# rotated in May\nfirst\n", "bob": "second"}
    assert pasted(notes, "API_KEY", secret, tmp_path) in ("first", "second")
    assert pasted(notes, "ADMIN_KEY", secret, tmp_path) in ("first", "second")
    assert 'v1/models -H "Authorization: Bearer $API_KEY"' in notes
    assert "curl -X PATCH" in notes
    assert "no auth." not in notes


@pytest.mark.parametrize(
    ("way", "values"),
    [
        ("the Ingress", {"ingress": NETWORK["ingress"]}),
        ("the HTTPRoute", {"httpRoute": NETWORK["httpRoute"]}),
        ("the LoadBalancer", {"service": {"type": "LoadBalancer"}}),
        ("the NodePort", {"service": {"type": "NodePort"}}),
    ],
)
def test_notes_warn_of_a_gateway_that_is_shut_out(
    helm4: Helm, way: str, values: dict[str, Any]
) -> None:
    """Where the NetworkPolicy has the default peers; not where somebody named others."""
    assert f"what comes through {way} is dropped" in helm4.notes({**values, **CLOSED})
    assert WARNING in helm4.notes({**values, **CLOSED})
    assert "networkPolicy" not in helm4.notes(values)
    named = {"networkPolicy": {"enabled": True, "ingressFrom": GATEWAYS}}
    assert "networkPolicy" not in helm4.notes({**values, **named})
    nobody = {"networkPolicy": {"enabled": True, "ingressFrom": []}}
    assert "networkPolicy.ingressFrom lets nobody call the API" in helm4.notes({**values, **nobody})


@pytest.mark.parametrize("preset", ["values-h100.yaml", "values-l4.yaml"])
def test_presets_for_gpus_warn_once_they_are_led_outside(helm4: Helm, preset: str) -> None:
    """They switch the NetworkPolicy on."""
    assert "networkPolicy" not in helm4.notes({}, [preset])
    assert WARNING in helm4.notes({"ingress": NETWORK["ingress"]}, [preset])


@pytest.mark.parametrize("monitor", ["serviceMonitor", "podMonitor"])
def test_notes_warn_of_a_prometheus_that_is_shut_out(helm4: Helm, monitor: str) -> None:
    """Monitors are of no use where nobody may scrape."""
    wanted = {monitor: {"enabled": True}}
    assert "networkPolicy.scrapeFrom is empty" in helm4.notes({**wanted, **CLOSED})
    assert "networkPolicy" not in helm4.notes(wanted)
    opened = {"networkPolicy": {"enabled": True, "scrapeFrom": GATEWAYS}}
    assert "networkPolicy" not in helm4.notes({**wanted, **opened})


def test_notes_say_what_a_rolling_update_waits_for(helm4: Helm) -> None:
    """Free GPUs; a StatefulSet frees its own."""
    rolling = {**GPU, "strategy": {"type": "RollingUpdate", "maxUnavailable": "0%"}}
    assert "waits until 2 more GPUs are free" in helm4.notes(rolling)
    assert "more GPUs" not in helm4.notes({**rolling, "modelCache": {"type": "perReplica"}})
