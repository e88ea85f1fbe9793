"""The error tree: one base, messages with numbers, and the way between processes."""

from __future__ import annotations

import copy
import pickle

import pytest

from vtoken import errors
from vtoken.errors import ConfigError, InvariantViolationError, VTokenError

ALL = [cls for cls in vars(errors).values() if isinstance(cls, type)]


@pytest.mark.parametrize("cls", ALL)
def test_every_error_is_a_vtoken_error(cls: type) -> None:
    """Callers can catch everything that vToken raises on purpose with one name."""
    assert issubclass(cls, VTokenError)
    assert cls.__doc__


@pytest.mark.parametrize("cls", ALL)
def test_module_docstring_names_every_error(cls: type) -> None:
    """The tree in the module docstring is complete."""
    assert cls.__name__ in str(errors.__doc__)


def test_config_error_carries_field_value_and_bound() -> None:
    """The message is built from the parts and the parts stay readable."""
    error = ConfigError("theta_f", 2, "0 <= theta_f < 1")
    assert (error.field, error.value, error.bound) == ("theta_f", 2, "0 <= theta_f < 1")
    assert str(error) == "theta_f=2 is not allowed: 0 <= theta_f < 1"


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("theta_f", 2, "0 <= theta_f < 1"),
        InvariantViolationError("I2", "3 live tokens on 2 slots"),
        errors.PlanError("token 3 is at slot 4"),
    ],
)
@pytest.mark.parametrize("send", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_errors_survive_pickling(error: VTokenError, send) -> None:  # type: ignore[no-untyped-def]
    """An error that crosses a process boundary keeps type, message and attributes."""
    received = send(error)
    assert type(received) is type(error)
    assert str(received) == str(error)
    assert vars(received) == vars(error)


def test_pickled_violation_does_not_repeat_its_prefix() -> None:
    """Two hops do not add "invariant I1 violated" twice."""
    error = InvariantViolationError("I1", "digest a became b")
    for _ in range(2):
        error = pickle.loads(pickle.dumps(error))
    assert str(error) == "invariant I1 violated: digest a became b"
