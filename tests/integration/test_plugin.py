"""What vLLM meets of us in each of its processes."""

from __future__ import annotations

import logging

import pytest
import vllm
from vllm.v1.engine.core import EngineCore

from vtoken.config import VTokenConfig
from vtoken.errors import UnsupportedError
from vtoken.integration.vllm.plugin import engine_args, register

METHODS = ("vtoken_call", "vtoken_pulse")


@pytest.fixture
def bare_core(monkeypatch: pytest.MonkeyPatch) -> type[EngineCore]:
    """EngineCore as no plugin has seen it."""
    for name in METHODS:
        monkeypatch.setattr(EngineCore, name, None, raising=False)
        monkeypatch.delattr(EngineCore, name)
    return EngineCore


def test_registering_adds_two_methods(bare_core: type[EngineCore]) -> None:
    """Control and pulse, as often as vLLM likes."""
    register()
    register()
    assert all(hasattr(bare_core, name) for name in METHODS)


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0"])
def test_unknown_vllm_is_left_as_it_is(
    bare_core: type[EngineCore],
    version: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It serves without us, which a line in its log says: whoever started it may not mean us."""
    monkeypatch.setattr(vllm, "__version__", version)
    with caplog.at_level(logging.WARNING):
        register()
    assert not any(hasattr(bare_core, name) for name in METHODS)
    assert version in caplog.text


@pytest.mark.parametrize("mode", ["off", "naive", "lazy"])
def test_our_server_is_refused_on_an_unknown_vllm(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every mode: without the pulse it would never be ready."""
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(UnsupportedError, match=r"0\.32\.x, found 0\.33\.0"):
        engine_args(VTokenConfig.from_dict({"mode": mode}))


def test_off_asks_nothing_of_the_engine() -> None:
    """Stock vLLM, by construction."""
    assert engine_args(VTokenConfig.from_dict({"mode": "off"})) == {}
