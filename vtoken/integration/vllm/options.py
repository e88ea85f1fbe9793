"""The options of single requests on vLLM's side: read when a request arrives, kept on it.

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


def read_options(request: Request, seed: int) -> bool:
    """Parse the request's options and keep them on it, for preemption asks for them again.

    Args:
        request: just arrived.
        seed: of policies that draw random numbers.

    Returns:
        Whether they are valid. If not, the reason is logged and the request has none.
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
    setattr(request, _ATTRIBUTE, options)
    return True


def options_of(request: Request) -> RequestOptions:
    """What :func:`read_options` found."""
    options: RequestOptions = getattr(request, _ATTRIBUTE, NO_OPTIONS)
    return options
