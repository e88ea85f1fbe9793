"""Named keys, the admin port and guarded metrics arrive where the program looks for them."""

from __future__ import annotations

import importlib.util
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from service.settings.http_process import ServiceSettings, load_service_settings
from tests.deploy.helm import CHART, Helm, container, find
from tests.deploy.matrix import KEYS, NAMED_KEYS

pytestmark = pytest.mark.k8s


def variables(objects: list[dict[str, Any]]) -> dict[str, str]:
    """The server's environment, with Secrets as ``secret/key``."""
    found = dict(find(objects, "ConfigMap", "vtoken-serve")["data"])
    for variable in container(objects).get("env", ()):
        secret = variable.get("valueFrom", {}).get("secretKeyRef")
        found[variable["name"]] = (
            f"{secret['name']}/{secret['key']}" if secret else variable["value"]
        )
    return found


def mounted_secrets(objects: list[dict[str, Any]]) -> dict[str, str]:
    """Mount path to Secret."""
    pod = find(objects, "Deployment")["spec"]["template"]["spec"]
    secrets = {v["name"]: v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
    mounts = container(objects)["volumeMounts"]
    return {m["mountPath"]: secrets[m["name"]] for m in mounts if m["name"] in secrets}


def test_secrets_of_named_keys_are_folders(helm: Helm) -> None:
    """Mounted whole and not by subPath: the kubelet renews them, and the server follows."""
    objects = helm.template(NAMED_KEYS)
    environment, mounted = variables(objects), mounted_secrets(objects)
    assert mounted[environment["VTOKEN_API_KEYS_DIR"]] == "vtoken-api-keys"
    assert mounted[environment["VTOKEN_ADMIN_KEYS_DIR"]] == "vtoken-admin-keys"
    assert environment["VLLM_API_KEY"] == "vtoken-keys/api-key"
    assert all(m["readOnly"] for m in container(objects)["volumeMounts"] if "keys" in m["name"])
    assert not any("subPath" in m for m in container(objects)["volumeMounts"])


def test_without_named_keys_nothing_is_mounted(helm4: Helm) -> None:
    """And what was there before still is."""
    objects = helm4.template(KEYS)
    assert set(mounted_secrets(objects)) == {"/etc/vtoken/admin"}
    assert not {name for name in variables(objects) if name.endswith("_DIR")}


def test_admin_port_is_the_same_everywhere(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Program, container port, Service and network policy; the API's Service does not have it."""
    objects = helm.template(NAMED_KEYS)
    for name, value in variables(objects).items():
        if name.startswith("VTOKEN_ADMIN_") and not name.endswith("_DIR"):
            monkeypatch.setenv(name, value)
    settings = load_service_settings()
    assert (settings.admin_host, settings.admin_port) == ("0.0.0.0", 8001)
    assert {"name": "admin", "containerPort": 8001} in container(objects)["ports"]
    service = find(objects, "Service", "-admin")["spec"]
    assert service["type"] == "ClusterIP"
    assert service["ports"] == [{"name": "admin", "port": 8001, "targetPort": "admin"}]
    assert [p["name"] for p in find(objects, "Service", "-serve")["spec"]["ports"]] == ["http"]
    rules = find(objects, "NetworkPolicy")["spec"]["ingress"]
    own = {
        "from": NAMED_KEYS["networkPolicy"]["adminFrom"],
        "ports": [{"port": "admin", "protocol": "TCP"}],
    }
    assert own in rules


def test_without_admin_port_there_is_no_second_service(helm4: Helm) -> None:
    """And no rule for a port that does not exist."""
    policy = {**NAMED_KEYS["networkPolicy"]}
    objects = helm4.template({"networkPolicy": policy, "tests": {"enabled": False}})
    assert [o["kind"] for o in objects].count("Service") == 1
    assert len(find(objects, "NetworkPolicy")["spec"]["ingress"]) == 1
    assert "VTOKEN_ADMIN_HOST" not in variables(objects)
    assert ServiceSettings.model_fields["admin_host"].default == "127.0.0.1"


@pytest.mark.parametrize(
    ("kind", "endpoints"), [("ServiceMonitor", "endpoints"), ("PodMonitor", "podMetricsEndpoints")]
)
def test_monitors_send_the_key_that_metrics_need(helm: Helm, kind: str, endpoints: str) -> None:
    """From the same Secret as the server's."""
    (endpoint,) = find(helm.template(NAMED_KEYS), kind)["spec"][endpoints]
    credentials = {"name": "vtoken-keys", "key": "api-key"}
    assert endpoint["authorization"] == {"type": "Bearer", "credentials": credentials}


def test_notes_lead_to_the_admin_port(helm4: Helm) -> None:
    """Through its own Service."""
    notes = helm4.notes({**KEYS, "server": {"adminPort": 8001}})
    assert "-admin 8001:8001 &" in notes
    assert "http://127.0.0.1:8001/admin/policy" in notes
    assert "NOTE: no auth.adminKeys" not in helm4.notes(NAMED_KEYS)


def test_helm_test_asks_the_admin_port(helm4: Helm) -> None:
    """The smoke test patches the policy where it can be patched."""
    pod = find(helm4.template({**KEYS, "server": {"adminPort": 8001}}), "Pod")["spec"]
    environment = {e["name"]: e.get("value") for e in pod["containers"][0]["env"]}
    assert environment["SMOKE_ADMIN_URL"].endswith("-admin:8001")


def test_helm_test_gets_through_the_network_policy(helm: Helm) -> None:
    """Whoever else may come in; and by labels that make it no pod of the Service."""
    closed = {"enabled": True, "ingressFrom": []}
    objects = helm.template({**KEYS, "server": {"adminPort": 8001}, "networkPolicy": closed})
    (rule,) = find(objects, "NetworkPolicy")["spec"]["ingress"]
    labels = find(objects, "Pod")["metadata"]["labels"]
    assert rule["from"][0]["podSelector"]["matchLabels"].items() <= labels.items()
    assert [port["port"] for port in rule["ports"]] == ["http", "admin"]
    assert not find(objects, "Service", "-serve")["spec"]["selector"].items() <= labels.items()


def test_helm_test_has_named_keys_too(helm: Helm) -> None:
    """A release with named keys alone can be tested: each Secret is mounted where it is read."""
    pod = find(helm.template(NAMED_KEYS), "Pod")["spec"]
    environment = {e["name"]: e.get("value") for e in pod["containers"][0]["env"]}
    secrets = {v["name"]: v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
    mounted = {m["mountPath"]: secrets.get(m["name"]) for m in pod["containers"][0]["volumeMounts"]}
    assert mounted[environment["SMOKE_API_KEYS_DIR"]] == "vtoken-api-keys"
    assert mounted[environment["SMOKE_ADMIN_KEYS_DIR"]] == "vtoken-admin-keys"


@pytest.fixture(scope="module")
def smoke() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smoke", CHART / "files" / "smoke.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", ""),
        ("# none\n", ""),
        ("bare\nother\n", "bare"),
        ("\n# team\nalice: s3cret\n", "s3cret"),
        ("user:password", "user:password"),
    ],
)
def test_smoke_reads_key_files_as_the_server_does(smoke: ModuleType, text: str, key: str) -> None:
    """Names are not part of the key."""
    assert smoke.first_key(text) == key


def test_smoke_takes_the_first_key_of_a_mounted_secret(smoke: ModuleType, tmp_path: Path) -> None:
    """Past the kubelet's own entries, which begin with a dot."""
    assert smoke.key_in_folder("") == ""
    assert smoke.key_in_folder(str(tmp_path)) == ""
    (tmp_path / "..data").mkdir()
    (tmp_path / "bob").write_text("second\n")
    (tmp_path / "alice").write_text("# rotated\nalice: first\n")
    assert smoke.key_in_folder(str(tmp_path)) == "first"


@pytest.mark.parametrize(("key", "sent"), [("k\n", "k"), (" k \r\n", "k"), ("\n", "")])
def test_smoke_sends_the_key_as_the_server_reads_it(
    smoke: ModuleType, monkeypatch: pytest.MonkeyPatch, key: str, sent: str
) -> None:
    """A Secret made from a file often ends with a newline, which no header can hold."""
    keys: list[str] = []
    monkeypatch.setenv("SMOKE_API_KEY", key)
    monkeypatch.setattr(sys, "argv", ["smoke.py", "http://service:80/"])
    monkeypatch.setattr(smoke, "check_chat", lambda _, given: keys.append(given))
    monkeypatch.setattr(smoke, "check_metrics", lambda _, given: keys.append(given))
    assert smoke.main() == 0
    assert keys == [sent, sent]


@pytest.mark.parametrize("key", ["two\nlines", "\u20ac"])
def test_smoke_says_that_a_key_cannot_be_sent(
    smoke: ModuleType, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """In one sentence, which does not show it."""
    monkeypatch.setattr(smoke, "CONNECTIONS", {})
    with pytest.raises(smoke.SmokeError, match="no header can hold") as caught:
        smoke.call("GET", "http://127.0.0.1:1/v1/models", key)
    assert key not in str(caught.value)


def test_smoke_stays_with_one_pod(smoke: ModuleType) -> None:
    """A Service balances connections: the policy is put back where it was changed."""
    peers = []

    class Pod(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            peers.append(self.client_address)
            self.send_response(200 if len(peers) < 3 else 404)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Pod) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/admin/policy"
        assert [smoke.call("GET", url, "k") for _ in range(2)] == ["{}", "{}"]
        with pytest.raises(smoke.SmokeError, match="answered 404"):
            smoke.call("GET", url, "k")
        smoke.CONNECTIONS.popitem()[1].close()
        server.shutdown()
    assert len(set(peers)) == 1
