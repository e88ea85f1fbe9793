"""With eviction off, outputs are stock vLLM's; in mode off, so are the classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine import test_oracle, test_policies, test_prefix_sharing
from tests.engine.conftest import RunArm
from tests.engine.workloads import NOTHING_EVICTED, on_tiny_model

pytestmark = pytest.mark.engine

STOCK_CLASSES = {
    "scheduler": "vllm.v1.core.sched.scheduler.Scheduler",
    "worker": "vllm.v1.worker.cpu_worker.CPUWorker",
    "runner": "vllm.v1.worker.cpu_model_runner.CPUModelRunner",
    "attention": "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl",
}


def make_spec(mode: str = "off", *, is_tiny: bool = False, **engine: Any) -> dict[str, Any]:
    """Greedy, nothing evicted; ``off`` is stock vLLM. The tiny model compiles fast."""
    return {
        **(on_tiny_model(**engine) if is_tiny else {"engine": engine}),
        "vtoken": {"mode": mode, "policy": "none"},
        "workloads": [{**NOTHING_EVICTED, "patch": None}],
    }


def test_mode_off_is_stock_vllm(run_arm: RunArm) -> None:
    """Mode off installs nothing: scheduler, worker, runner and attention are vLLM's own."""
    assert run_arm(make_spec(dtype="float32"))["none"]["classes"] == STOCK_CLASSES


def test_other_modes_install_our_classes(run_arm: RunArm) -> None:
    """A configured mode never silently does nothing."""
    classes = run_arm(test_oracle.make_fp32_spec())["naive none"]["classes"]
    assert all(name.startswith("vtoken.") for name in classes.values()), classes


def test_policy_none_equals_stock_in_fp32(run_arm: RunArm) -> None:
    """The indirection alone changes no greedy token."""
    stock = run_arm(make_spec(dtype="float32"))["none"]
    ours = run_arm(test_oracle.make_fp32_spec())["naive none"]
    assert ours["tokens"] == stock["tokens"]
    assert ours["counters"]["evicted_tokens_total/none"] == 0


@pytest.mark.parametrize(
    "is_tiny",
    [
        pytest.param(True, id="tiny model"),
        pytest.param(False, id="embedded model", marks=pytest.mark.slow),
    ],
)
def test_policy_none_is_as_close_to_stock_as_stock_to_itself_in_bf16(
    run_arm: RunArm, is_tiny: bool
) -> None:
    """In bf16 the deviation is of the size of that between stock eager and stock compiled.

    Both are rounding noise, and vary by a tenth with the number of threads.
    """
    options = {"is_tiny": is_tiny, "dtype": "bfloat16"}
    compiled = run_arm(make_spec(**options, enforce_eager=False))["none"]
    if is_tiny:
        stock = run_arm(test_prefix_sharing.make_stock_spec())["none"]
        ours = run_arm(test_policies.make_spec())["naive none"]
    else:
        stock, ours = (run_arm(make_spec(mode, **options))["none"] for mode in ("off", "naive"))
    own = mean_logprob_difference(compiled, stock)
    assert mean_logprob_difference(ours, stock) <= 1.5 * own


def mean_logprob_difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Mean absolute difference of logprobs while the greedy continuations agree."""
    differences: list[float] = []
    for tokens_a, tokens_b, steps_a, steps_b in zip(
        a["tokens"], b["tokens"], a["logprobs"], b["logprobs"], strict=True
    ):
        agreed = next(
            (i for i, (x, y) in enumerate(zip(tokens_a, tokens_b, strict=True)) if x != y),
            len(tokens_a) - 1,
        )
        for step_a, step_b in zip(steps_a[: agreed + 1], steps_b[: agreed + 1], strict=True):
            other = {int(token): value for token, value in step_b}
            differences += [
                abs(value - other[int(token)]) for token, value in step_a if int(token) in other
            ]
    return float(np.mean(differences))
