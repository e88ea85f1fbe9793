"""Errors of vToken: one tree, imported by everything and importing nothing.

VTokenError
├── ConfigError            a setting is outside its bounds, names field, value and bound
├── UnsupportedError       the model, platform or vLLM version cannot be served with vToken
├── TokenTableError        a caller broke the contract of the token table
├── PlanError              a relocation plan was built from or applied to a wrong state
├── PolicyError            an eviction policy returned something it may not return
├── CopyError              the copy engine could not carry out a relocation
└── InvariantViolationError   I1–I4 (paper §3.5) do not hold; carries the numbers
"""


class VTokenError(Exception):
    """Base of every error that vToken raises on purpose."""


class ConfigError(VTokenError):
    """A setting is unknown or outside its bounds.

    Attributes:
        field: name of the offending setting, as users write it.
        value: the value that was given.
        bound: the rule that it breaks, in words (``"0 < theta_f <= 1"``).
    """

    def __init__(self, field: str, value: object, bound: str) -> None:
        self.field = field
        self.value = value
        self.bound = bound
        super().__init__(f"{field}={value!r} is not allowed: {bound}")

    def __reduce__(self) -> tuple[type, tuple[str, object, str]]:
        """Keep the three parts when the error crosses a process boundary."""
        return (type(self), (self.field, self.value, self.bound))


class UnsupportedError(VTokenError):
    """What was asked for cannot be served with vToken; the message gives the reason."""


class TokenTableError(VTokenError):
    """A call would break the token table; the table is unchanged."""


class PlanError(VTokenError):
    """A relocation plan does not fit the state it is applied to; nothing was changed."""


class PolicyError(VTokenError):
    """A policy returned too few, repeated, dead or protected tokens."""


class CopyError(VTokenError):
    """The copy engine refused or failed a batch of moves."""


class InvariantViolationError(VTokenError):
    """One of the invariants I1–I4 does not hold.

    Attributes:
        invariant: ``"I1"`` … ``"I4"``.
    """

    def __init__(self, invariant: str, message: str) -> None:
        self.invariant = invariant
        super().__init__(f"invariant {invariant} violated: {message}")

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Keep both arguments when the error crosses a process boundary."""
        prefix = f"invariant {self.invariant} violated: "
        return (type(self), (self.invariant, str(self).removeprefix(prefix)))
