"""What the admin routes answer, as models: they make the OpenAPI document and check nothing.

The engine's answers pass as they are, so that a field it adds is not lost on the way.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic.config import JsonDict

from service.flags import field_docs
from vtoken.config import LIVE_FIELDS, LIVE_MODES, VTokenConfig, field_hints
from vtoken.policies.registry import POLICIES

ApplyToName = Literal["running", "new"]


def patch_schema() -> dict[str, Any]:
    """JSON schema of a merge patch: each live field with its bounds; ``null`` resets it."""
    fields = document_properties()
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _or_null(schema) for name, schema in fields.items()},
    }


def document_properties() -> dict[str, dict[str, Any]]:
    """JSON schema of each live field, from its annotation, docstring and default.

    Not in it are bounds between fields, and those that only the engine's pool knows.
    """
    hints, docs = get_type_hints(VTokenConfig), field_docs()
    defaults = VTokenConfig().to_dict()
    found = {}
    for name, field in field_hints().items():
        if name in LIVE_FIELDS:
            schema = TypeAdapter(hints[name]).json_schema()
            bounds = field.range.json_schema() if field.range else {}
            for part in schema.get("anyOf", [schema]):
                part |= bounds if part["type"] in ("integer", "number") else {}
            text = inspect.cleandoc(docs[name]).replace("``", "`")
            found[name] = {**schema, "description": text, "default": defaults[name]}
    found["mode"]["enum"] = list(LIVE_MODES)
    found["policy"]["examples"] = list(POLICIES)
    found["policy_args"]["examples"] = [{}]
    return found


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, and ``null``; what describes it stays outside."""
    outside = ("description", "default")
    about: dict[str, Any] = {word: schema[word] for word in outside if word in schema}
    rule = {word: value for word, value in schema.items() if word not in outside}
    options = rule.get("anyOf", [rule])
    has_null = {"type": "null"} in options
    return {"anyOf": options if has_null else [*options, {"type": "null"}], **about}


class _Open(BaseModel):
    """May have more members than are described."""

    model_config = ConfigDict(extra="allow")


class Difference(BaseModel):
    """One field of the policy document that differs."""

    model_config = ConfigDict(
        populate_by_name=True, json_schema_extra={"examples": [{"from": 0.25, "to": 0.5}]}
    )

    before: Any = Field(alias="from", description="Value before.")
    after: Any = Field(alias="to", description="Value after.")


class Policy(_Open):
    """The policy document in force."""

    version: int = Field(description="Grows with each change; the ETag.", examples=[3])
    mode: str = Field(description="Of the token layer.", examples=["lazy"])
    document: dict[str, Any] = Field(
        description="Every setting that can change while the engine runs.",
        examples=[{"policy": "streaming_llm", "budget_tokens": 512, "theta_f": 0.25}],
        json_schema_extra={"properties": cast(JsonDict, document_properties())},
    )


class ChangedPolicy(Policy):
    """The policy document after a change."""

    changes: dict[str, Difference] = Field(description="Fields that the change changed.")
    warnings: list[str] = Field(description="What a person should know; often empty.")


class RequestPreview(_Open):
    """One running request under the document that it would follow."""

    request_id: str
    policy_version: int = Field(description="Of the document that it would follow.")
    policy: str = Field(description="That it would have.")
    num_tokens: int = Field(description="Its length.")
    live_tokens: int = Field(description="At present.")
    evicted_tokens: int = Field(description="Tokens it would lose if it were due now.")
    freed_blocks: int | None = Field(
        description="Blocks left without live token by that; null if which tokens go depends on "
        "what is only observed later."
    )
    freed_blocks_repacked: int | None = Field(
        description="At most so many once its live tokens are repacked; null in mode naive."
    )
    next_eviction: str = Field(examples=["next step", "after its prefill", "after 16 tokens"])


class PreviewTotals(BaseModel):
    """Sums over all running requests."""

    evicted_tokens: int
    freed_blocks: int | None = Field(description="null if unknown for one of them.")


class PolicyPreview(ChangedPolicy):
    """What a change would do; ``version`` is the present one, ``document`` the one it would be."""

    dry_run: Literal[True]
    requests: list[RequestPreview]
    totals: PreviewTotals


class HistoryEntry(BaseModel):
    """One change of the policy document."""

    version: int = Field(description="That began with it.", examples=[2])
    at: str = Field(description="UTC, ISO 8601.", examples=["2026-11-30T06:12:45.120Z"])
    by: str = Field(description="Name of the admin key, or start, or vtoken.", examples=["alice"])
    action: Literal["start", "patch", "rollback", "safety"]
    apply_to: ApplyToName
    note: str | None = Field(examples=["more room for the evening"])
    rolled_back_to: int | None = Field(description="Of a rollback: the version it restores.")
    changes: dict[str, Difference] = Field(description="Fields that differ from before.")


class PolicyHistory(_Open):
    """The changes that are remembered, the newest first."""

    version: int = Field(description="In force.")
    history: list[HistoryEntry]
    max_changes: int = Field(description="More are not remembered.", examples=[100])


class RollbackTarget(BaseModel):
    """Which version to go back to."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"version": 2}]})

    version: int | None = Field(
        default=None, ge=1, description="One of the history; default: the one before."
    )


class Policies(BaseModel):
    """The eviction policies that can be chosen."""

    policies: list[dict[str, Any]] = Field(
        examples=[[{"name": "h2o", "summary": "…", "paper": "…", "args_schema": {}}]]
    )


class State(_Open):
    """The pool, the running requests and the last relocations."""

    pool: dict[str, float] = Field(examples=[{"waste_ratio": 0.12, "free_blocks": 310}])
    requests: list[dict[str, Any]]
    relocations: list[dict[str, Any]]
    relocation_disabled: str | None = Field(description="The violation that stopped it.")
    skips: dict[str, float] = Field(description="Why relocation was not considered, counted.")
    engine: dict[str, int] = Field(examples=[{"running": 3, "waiting": 0, "steps": 4711}])


class ErrorDetails(_Open):
    """Why a call was refused."""

    message: str = Field(description="One sentence.")
    type: str = Field(examples=["Rejected"])
    code: int = Field(description="The HTTP status.", examples=[422])
    field: str | None = Field(default=None, examples=["theta_f"])
    value: str | None = Field(default=None, examples=["1.5"])
    bound: str | None = Field(default=None, examples=["a number with 0 <= theta_f < 1"])
    change: Literal["not_made", "sent", "open"] | None = Field(
        default=None, description="Of a 503: what became of the change."
    )


class ErrorBody(BaseModel):
    """An error answer."""

    error: ErrorDetails
