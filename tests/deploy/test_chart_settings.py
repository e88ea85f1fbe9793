"""The chart's settings are the program's, one to one, with the same bounds and defaults."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
import yaml

from service.settings.http_process import ServiceSettings, load_service_settings
from service.settings.token_layer import load_config
from tests.deploy.helm import CHART, Helm, HelmError, container, find
from vtoken.config import VTokenConfig, field_hints
from vtoken.errors import ConfigError

pytestmark = pytest.mark.k8s

FROM_SECRETS = {
    *("admin_key", "admin_key_file", "admin_keys_dir"),
    *("api_key", "api_key_file", "api_keys_dir"),
}
FIXED = {"admin_host"}
"""The chart sets it: a pod's admin port is reached through its Service."""
CHANGED: dict[str, Any] = {
    "mode": "naive",
    "policy": "random",
    "policy_args": {"a": [1, 0.5, "x"]},
    "keep_ratio": 0.125,
    "sink_tokens": 8,
    "recent_tokens": 64,
    "evict_interval_tokens": 32,
    "evict_during_prefill": True,
    "evict_free_ratio": 0.25,
    "theta_f": 0.00001,
    "theta_f_mode": "adaptive",
    "theta_f_min": 0.00002,
    "theta_f_max": 0.75,
    "low_watermark_ratio": 1,
    "headroom_blocks": 1_000_000,
    "max_source_blocks": 16,
    "relocate_shared": True,
    "relocate_into_cached": True,
    "max_blocks_per_request": 64,
    "check_interval_steps": 4,
    "score_layers": (0, 2),
    "score_interval_steps": 2,
    "score_window_tokens": 32,
    "verify": "sampled",
    "record_evictions": True,
    "seed": 4294967295,
}
OUT_OF_BOUNDS: dict[str, list[Any]] = {
    "mode": ["on"],
    "keep_ratio": [0, 1.5],
    "budget_tokens": [1, 2.5, 100_000_001],
    "sink_tokens": [-1, 4097],
    "recent_tokens": [0, 1_000_001],
    "evict_interval_tokens": [0, 1_000_001],
    "evict_during_prefill": ["maybe"],
    "evict_free_ratio": [-0.1, 1.1],
    "theta_f": [-0.1, 1],
    "theta_f_mode": ["auto"],
    "theta_f_min": [-0.1, 1],
    "theta_f_max": [-0.1, 1],
    "low_watermark_ratio": [-0.1, 1.1],
    "headroom_blocks": [-1, 1_000_001],
    "max_source_blocks": [1, 65_537],
    "relocate_shared": ["maybe"],
    "relocate_into_cached": ["maybe"],
    "max_blocks_per_request": [1, 1.5, 1_000_001],
    "check_interval_steps": [0, 1_000_001],
    "score_layers": [[-1], []],
    "score_interval_steps": [0, 1_000_001],
    "score_window_tokens": [0, 1025],
    "verify": ["always"],
    "record_evictions": ["maybe"],
    "seed": [-1, 4294967296],
}


def camel(field: str) -> str:
    """``thetaF`` for ``theta_f``."""
    return re.sub(r"_(\w)", lambda match: match[1].upper(), field)


def chart_values() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))


def rendered_environment(helm: Helm, values: dict[str, Any]) -> dict[str, str]:
    data = find(helm.template(values), "ConfigMap", "vtoken-serve")["data"]
    return {name: value for name, value in data.items() if name.startswith("VTOKEN_")}


def test_every_field_of_the_token_layer_is_a_value() -> None:
    """No setting is missing in the chart, and none is made up.

    A new field goes into values.yaml, values.schema.json, and the two lists above.
    """
    fields = {camel(field.name) for field in dataclasses.fields(VTokenConfig)}
    assert set(chart_values()["vtoken"]) == fields
    server = {
        camel(name) for name in ServiceSettings.model_fields if name not in FROM_SECRETS | FIXED
    }
    assert set(chart_values()["server"]) == server


def test_chart_defaults_are_the_programs(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program under the rendered environment has its own defaults."""
    for name, value in rendered_environment(helm, {}).items():
        monkeypatch.setenv(name, value)
    assert load_config({}) == VTokenConfig()
    assert load_service_settings() == ServiceSettings.model_construct()


def test_changed_values_arrive_exactly(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, JSON, tiny fractions and large whole numbers survive the way through helm."""
    values = {"vtoken": {camel(name): value for name, value in CHANGED.items()}}
    for name, value in rendered_environment(helm, values).items():
        monkeypatch.setenv(name, value)
    assert load_config({}) == VTokenConfig(**CHANGED, budget_tokens=None)
    assert set(CHANGED) | {"budget_tokens"} == {f.name for f in dataclasses.fields(VTokenConfig)}


def test_chart_has_every_bound_of_a_number() -> None:
    """And no other: what the fields' annotations say, word for word."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    stated = schema["properties"]["vtoken"]["properties"]
    words = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    for name, hint in field_hints().items():
        bounds = {word: stated[camel(name)][word] for word in words if word in stated[camel(name)]}
        assert bounds == (hint.range.json_schema() if hint.range else {}), name


@pytest.mark.parametrize("field", OUT_OF_BOUNDS)
def test_chart_refuses_what_the_program_refuses(helm4: Helm, field: str) -> None:
    """The schema's bounds are the dataclass's."""
    for value in OUT_OF_BOUNDS[field]:
        with pytest.raises(HelmError, match=camel(field)):
            helm4.template({"vtoken": {camel(field): value}})
        if value != "maybe":
            with pytest.raises(ConfigError, match=field):
                VTokenConfig.from_dict({field: value})


def test_vllm_flags_are_exact(helm: Helm) -> None:
    """Typed values become flags without exponents; what is not set is left out."""
    vllm = {
        "model": "org/model",
        "servedModelName": ["a", "b"],
        "maxModelLen": 131072,
        "dtype": "bfloat16",
        "kvCacheMemoryBytes": 68719476736,
        "gpuMemoryUtilization": 0.95,
        "maxNumSeqs": 1024,
        "blockSize": 16,
        "enforceEager": False,
        "extraArgs": ["--seed=7"],
    }
    assert container(helm.template({"vllm": vllm}))["args"] == [
        "org/model",
        "--host=0.0.0.0",
        "--port=8000",
        "--max-model-len=131072",
        "--dtype=bfloat16",
        "--kv-cache-memory-bytes=68719476736",
        "--gpu-memory-utilization=0.95",
        "--max-num-seqs=1024",
        "--block-size=16",
        "--served-model-name",
        "a",
        "b",
        "--seed=7",
    ]
    bare = ["--host=0.0.0.0", "--port=8000", "--enforce-eager"]
    assert container(helm.template())["args"] == bare


def test_no_key_is_there_twice() -> None:
    """Two edits of one file cannot leave a key twice, of which the parsers take the last."""

    def refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        assert len(names) == len(set(names)), names
        return dict(pairs)

    json.loads((CHART / "values.schema.json").read_text(), object_pairs_hook=refuse_twice)
    for path in sorted(CHART.glob("values*.yaml")):
        nodes = [yaml.compose(path.read_text(encoding="utf-8"))]
        while nodes:
            node = nodes.pop()
            if isinstance(node, yaml.MappingNode):
                refuse_twice([(key.value, None) for key, _ in node.value])
                nodes += [value for _, value in node.value]
