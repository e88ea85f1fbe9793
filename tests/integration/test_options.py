"""Options of arriving requests, as the scheduler reads them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vtoken.integration.vllm import options
from vtoken.integration.vllm.options import options_of, read_options
from vtoken.request_options import NO_OPTIONS, RequestOptions


def make_request(extra_args: Any, **attributes: Any) -> Any:
    """As much of vLLM's ``Request`` as is read."""
    params = SimpleNamespace(extra_args=extra_args)
    return SimpleNamespace(request_id="r1-ab", sampling_params=params, **attributes)


@pytest.mark.parametrize("extra_args", [None, {}, {"theirs": 1}])
def test_requests_without_options(extra_args: Any) -> None:
    """Also pooling requests, which have no sampling parameters."""
    request = make_request(extra_args)
    assert read_options(request, 0)
    assert options_of(request) is NO_OPTIONS
    assert read_options(SimpleNamespace(sampling_params=None), 0)


def test_options_stay_on_the_request() -> None:
    """Read once; a request that is preempted is admitted with the same again."""
    request = make_request({"vtoken_policy": "h2o", "vtoken_protect": "0:8", "theirs": 1})
    assert read_options(request, 0)
    assert options_of(request) is options_of(request)
    assert options_of(request) == RequestOptions(policy="h2o", protect="0:8")


@pytest.mark.parametrize(
    ("extra_args", "field"),
    [
        ({"vtoken_policy": "h20"}, "vtoken_policy"),
        ({"vtoken_policy": "h2o", "vtoken_policy_args": '{"x": 1}'}, "vtoken_policy_args.x"),
        ({"vtoken_keep_ratio": 0}, "vtoken_keep_ratio"),
        ({"vtoken_nix": 0}, "vtoken_nix"),
    ],
)
def test_invalid_options_are_logged_and_not_kept(
    extra_args: Any, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason names request and field; the caller ends the request."""
    request = make_request(extra_args)
    with caplog.at_level(logging.WARNING):
        assert not read_options(request, 0)
    assert options_of(request) is NO_OPTIONS
    assert "r1-ab" in caplog.text
    assert f"{field}=" in caplog.text


def test_what_a_policy_of_another_package_raises_is_logged_with_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And not passed on, which would end the engine."""
    monkeypatch.setattr(options, "policy_for", lambda *args: 1 / 0)
    request = make_request({"vtoken_policy": "theirs"})
    with caplog.at_level(logging.ERROR):
        assert not read_options(request, 0)
    assert options_of(request) is NO_OPTIONS
    assert "r1-ab" in caplog.text
    assert "ZeroDivisionError" in caplog.text
