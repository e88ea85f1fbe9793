"""A small stand-in for the Kubernetes API: enough for helm to install, upgrade and roll back.

It keeps objects in memory, answers discovery for the kinds that the chart renders, and knows the
patches that helm sends: merge, strategic merge, server-side apply. Like the real API it refuses a
change of immutable fields. There are no controllers: nothing runs and nothing becomes ready.
"""

from __future__ import annotations

import copy
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

from tests.deploy.kube_protobuf import read_secret

Json = dict[str, Any]

KINDS: dict[str, dict[str, str]] = {
    "v1": {
        **{"configmaps": "ConfigMap", "secrets": "Secret", "services": "Service"},
        **{"serviceaccounts": "ServiceAccount", "pods": "Pod"},
        "persistentvolumeclaims": "PersistentVolumeClaim",
    },
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy", "ingresses": "Ingress"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "monitoring.coreos.com/v1": {
        **{"servicemonitors": "ServiceMonitor", "podmonitors": "PodMonitor"},
        "prometheusrules": "PrometheusRule",
    },
}
IMMUTABLE = (
    ("Deployment", "selector"),
    ("StatefulSet", "selector"),
    ("StatefulSet", "serviceName"),
    ("StatefulSet", "volumeClaimTemplates"),
    ("PersistentVolumeClaim", "accessModes"),
)
_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))"
    r"/namespaces/(?P<namespace>[^/]+)/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?"
)


class KubeStub:
    """Objects by (kind, namespace, name)."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Json] = {}
        self.url = ""
        self._version = 0

    @contextmanager
    def serving(self) -> Iterator[KubeStub]:
        """Answer on a free port of the loopback address."""
        handler = type("Handler", (_Handler,), {"stub": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    def live(self) -> list[Json]:
        """All objects but helm's own records."""
        return [o for o in self.objects.values() if o.get("type") != "helm.sh/release.v1"]

    def put(self, key: tuple[str, str, str], document: Json) -> Json:
        """Store an object; raises :class:`ValueError` for a change of an immutable field."""
        old = self.objects.get(key)
        for kind, name in IMMUTABLE:
            if old and key[0] == kind and old["spec"].get(name) != document["spec"].get(name):
                raise ValueError(f"{kind}.spec.{name}: field is immutable")
        self._version += 1
        metadata = document["metadata"]
        metadata.setdefault("namespace", key[1])
        metadata.setdefault("uid", f"uid-{self._version}")
        metadata["resourceVersion"] = str(self._version)
        self.objects[key] = document
        return document


class _Handler(BaseHTTPRequestHandler):
    stub: KubeStub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urllib.parse.urlparse(self.path)
        found = _PATH.fullmatch(url.path)
        if found is None:
            self._answer(*_discovery(url.path))
        elif found["name"]:
            document = self.stub.objects.get(self._key(found))
            self._answer(*((200, document) if document else _not_found(found)))
        else:
            self._answer(200, self._list(found, urllib.parse.parse_qs(url.query)))

    def do_POST(self) -> None:
        found = self._match()
        document = self._body()
        key = (_kind(found), found["namespace"], document["metadata"]["name"])
        if key in self.stub.objects:
            self._answer(409, _status(409, "AlreadyExists", f"{key} exists"))
        else:
            self._store(key, document, 201)

    def do_PUT(self) -> None:
        self._store(self._key(self._match()), self._body(), 200)

    def do_PATCH(self) -> None:
        found = self._match()
        key = self._key(found)
        old, patch = self.stub.objects.get(key), self._body()
        if "apply-patch" in self.headers["Content-Type"]:
            document = patch if old is None else {**patch, "metadata": _kept(old, patch)}
            self._store(key, document, 200 if old else 201)
        elif old is None:
            self._answer(*_not_found(found))
        else:
            self._store(key, merge(copy.deepcopy(old), patch), 200)

    def do_DELETE(self) -> None:
        found = self._match()
        self._body()
        document = self.stub.objects.pop(self._key(found), None)
        self._answer(*((200, document) if document else _not_found(found)))

    def log_message(self, *_: object) -> None:
        """Keep the test's output quiet."""

    def _match(self) -> re.Match[str]:
        found = _PATH.fullmatch(urllib.parse.urlparse(self.path).path)
        assert found is not None, self.path
        return found

    def _key(self, found: re.Match[str]) -> tuple[str, str, str]:
        return _kind(found), found["namespace"], found["name"]

    def _list(self, found: re.Match[str], query: dict[str, list[str]]) -> Json:
        kind = _kind(found)
        wanted = [part for q in query.get("labelSelector", []) for part in q.split(",")]
        items = [
            o
            for (k, namespace, _), o in self.stub.objects.items()
            if (k, namespace) == (kind, found["namespace"]) and _has_labels(o, wanted)
        ]
        return {"kind": f"{kind}List", "apiVersion": _api(found), "metadata": {}, "items": items}

    def _store(self, key: tuple[str, str, str], document: Json, status: int) -> None:
        try:
            self._answer(status, self.stub.put(key, document))
        except ValueError as error:
            self._answer(422, _status(422, "Invalid", str(error)))

    def _body(self) -> Any:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "protobuf" in (self.headers["Content-Type"] or ""):
            return read_secret(body) if self.command != "DELETE" else None
        return yaml.safe_load(body)

    def _answer(self, status: int, document: Json) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def merge(old: Any, patch: Any) -> Any:
    """Apply a merge patch, or a strategic one: its lists are merged by the key it names."""
    if not isinstance(patch, dict) or not isinstance(old, dict):
        return patch
    orders = {k.split("/")[1]: v for k, v in patch.items() if k.startswith("$setElementOrder/")}
    for name, value in patch.items():
        if name.startswith("$"):
            continue
        if value is None:
            old.pop(name, None)
        elif name in orders and orders[name] and isinstance(orders[name][0], dict):
            old[name] = _merge_list(old.get(name, []), value, orders[name])
        else:
            old[name] = merge(old.get(name, {}), value) if isinstance(value, dict) else value
    return old


def _merge_list(old: list[Json], patch: list[Json], order: list[Json]) -> list[Json]:
    (key,) = order[0]
    items = {item[key]: item for item in old}
    for change in patch:
        if change.get("$patch") == "delete":
            items.pop(change[key], None)
        else:
            items[change[key]] = merge(items.get(change[key], {}), change)
    return [items[entry[key]] for entry in order]


def _kept(old: Json, patch: Json) -> Json:
    return {**patch["metadata"], "uid": old["metadata"]["uid"]}


def _kind(found: re.Match[str]) -> str:
    return KINDS[_api(found)][found["plural"]]


def _api(found: re.Match[str]) -> str:
    return found["core"] or found["group"]


def _has_labels(document: Json, wanted: list[str]) -> bool:
    labels = document["metadata"].get("labels", {})
    return all(labels.get(part.split("=")[0]) == part.split("=")[-1] for part in wanted)


def _not_found(found: re.Match[str]) -> tuple[int, Json]:
    return 404, _status(404, "NotFound", f'{found["plural"]} "{found["name"]}" not found')


def _status(code: int, reason: str, message: str) -> Json:
    head = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return {**head, "code": code, "reason": reason, "message": message}


def _discovery(path: str) -> tuple[int, Json]:
    if path == "/version":
        return 200, {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return 200, {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [_group(api) for api in KINDS if "/" in api]
        return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    api = path.removeprefix("/apis/").removeprefix("/api/")
    if api in KINDS:
        verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
        resources = [
            {"name": plural, "singularName": "", "namespaced": True, "kind": kind, "verbs": verbs}
            for plural, kind in KINDS[api].items()
        ]
        head = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api}
        return 200, {**head, "resources": resources}
    return 404, _status(404, "NotFound", path)


def _group(api: str) -> Json:
    name, version = api.split("/")
    entry = {"groupVersion": api, "version": version}
    return {"name": name, "versions": [entry], "preferredVersion": entry}
