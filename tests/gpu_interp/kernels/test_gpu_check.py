"""The GPU check's own checks pass with the kernels that it runs on a GPU."""

import pytest
import torch

from benchmarks.gpu_check.attention import check_attention, triton_kernel
from benchmarks.gpu_check.copies import check_bytes
from benchmarks.gpu_check.machine import SMALL, Machine
from benchmarks.gpu_check.scores import check_scores
from vtoken.copy_engine.triton_kernels import move_by_kernel
from vtoken.gpu_scores.triton_kernels import mass_by_kernel

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def seconds(work):
    """Not measured: under the interpreter times mean nothing."""
    work()
    return 1.0


MACHINE = Machine(torch.device("cpu"), SMALL, seconds)


def test_copy_check_passes_with_the_kernel():
    """Six layouts, three dtypes, both page sizes."""
    (row,) = check_bytes(MACHINE, move_by_kernel)
    assert row.ok, row.note


def test_score_check_passes_with_the_kernel():
    """Against the torch twin, and repeatable."""
    rows = list(check_scores(MACHINE, mass_by_kernel))
    assert [row.ok for row in rows] == [True, True, None]


def test_attention_check_passes_with_vllms_kernel():
    """Pages of one token and of 16 give the same bits."""
    row, *_ = check_attention(MACHINE, {"TRITON_ATTN": triton_kernel})
    assert row.ok, row
    assert row.note == "equal bits with page 16"
