"""Strict checks of rendered objects: unknown fields are refused.

Built-in kinds are checked against the schemas that the package kubernetes-validate carries for each
minor version, custom resources against the reduced CRDs in ``crds/``.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator, Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

CRDS = Path(__file__).parent / "crds"


def validate(document: dict[str, Any], schemas: Path, version: str) -> None:
    """Check one object.

    Args:
        document: a Kubernetes object.
        schemas: the unpacked package kubernetes-validate.
        version: minor version, as ``1.28``.

    Raises:
        jsonschema.ValidationError: the first fault.
        FileNotFoundError: the kind does not exist in that version.
    """
    kind, api = document["kind"].lower(), document["apiVersion"]
    crd = CRDS / f"{kind}-{api.split('/')[-1]}.json"
    if crd.exists():
        _crd_validator(crd).validate(document)
    else:
        group = re.sub(r"^([^./]*)(?:[.][^/]*)?/", r"\1-", api)
        folder = schemas / "kubernetes_validate" / "kubernetes-json-schema"
        _validator(folder / f"v{version}.0-local-strict", f"{kind}-{group}.json").validate(document)


@cache
def _crd_validator(path: Path) -> Draft7Validator:
    return Draft7Validator(json.loads(path.read_text()))


@cache
def _validator(folder: Path, name: str) -> Draft202012Validator:
    schema = json.loads((folder / name).read_text())
    return Draft202012Validator(schema, registry=_definitions(folder))


@cache
def _definitions(folder: Path) -> Registry:
    contents = json.loads((folder / "_definitions.json").read_text())
    resource = Resource.from_contents(contents, default_specification=DRAFT202012)
    return Registry().with_resources([("_definitions.json", resource)])
