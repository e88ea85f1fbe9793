"""What the token layer keeps on vLLM's requests from their arrival on: options and generation.

The API process has answered 400 to what is wrong; a request of an offline caller, or of a route
that the API process does not look at, is checked here for the first time.
"""

from __future__ import annotations

import logging

from vllm.v1.request import Request

from vtoken.errors import ConfigError
from vtoken.policies.registry import policy_for
from vtoken.request_options import NO_OPTIONS, RequestOptions

logger = logging.getLogger(__name__)

_ATTRIBUTE = "vtoken_options"
_GENERATION = "vtoken_generation"


def read_options(request: Request, seed: int) -> bool:
    """Parse the request's options and keep them on it, for preemption asks for them again.

    Args:
        request: just arrived.
        seed: of policies that draw random numbers.

    Returns:
        Whether they are valid. If not, the reason is logged and the request has none. Nothing is
        raised, not even what a policy of another package raises: vLLM calls this between two
        steps, where an exception ends the engine.
    """
    params = request.sampling_params
    extra_args = None if params is None else params.extra_args
    if not extra_args:
        return True
    try:
        options = RequestOptions.parse(extra_args)
        if options.policy_key is not None:
            policy_for(*options.policy_key, seed)
    except ConfigError as error:
        logger.warning("request %s ends with an error: %s", request.request_id, error)
        return False
    except Exception:
        logger.exception("request %s ends with an error", request.request_id)
        return False
    setattr(request, _ATTRIBUTE, options)
    return True


def options_of(request: Request) -> RequestOptions:
    """What :func:`read_options` found."""
    options: RequestOptions = getattr(request, _ATTRIBUTE, NO_OPTIONS)
    return options


def set_generation(request: Request, generation: int) -> None:
    """Note which policy document was in force when the request arrived."""
    setattr(request, _GENERATION, generation)


def generation_of(request: Request) -> int:
    """What :func:`set_generation` noted; preemption does not change it."""
    generation: int = getattr(request, _GENERATION, 0)
    return generation
