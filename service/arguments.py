"""vLLM's parsed arguments with ours applied: what the server is started with.

Importing this module imports vLLM, which takes seconds and reads the environment: see
``service.settings.vllm_environment``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from vllm import envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from service.errors import UsageError
from service.flags import add_flags, flag_values
from service.settings.token_layer import load_config
from service.settings.vllm_variables import vllm_api_keys
from vtoken.config import VTokenConfig

EMBEDDED_DEFAULTS: Mapping[str, Any] = {
    "served_model_name": ["smollm2-135m-instruct"],
    "dtype": "bfloat16",
    "max_model_len": 8192,
    "kv_cache_memory_bytes": 1 << 30,
    "max_num_seqs": 16,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "tool_strict_level": "parameter",  # so small a model keeps to no schema by itself
}
"""Defaults for the embedded model on a CPU; a flag or a ``--config`` file beats each."""

_ONE_PORT = "vtoken-serve serves its engines on one port: /metrics and /admin would miss the others"
_ONE_FRONT = "not together with --api-server-count above 1"
_OURS_ALONE = "vToken brings its own; use --vtoken-mode off to choose another"


def parse(argv: Sequence[str]) -> tuple[Namespace, VTokenConfig]:
    """Parse every flag after ``vtoken-serve serve``.

    Returns:
        vLLM's namespace, whose ``model`` is ``None`` where the embedded model is meant, and the
        configuration of the token layer, whose engine arguments are in the namespace.

    Raises:
        UsageError: flags that cannot go together.
        ConfigError: a setting of ours is out of bounds, or a key of vLLM's is blank.
        SystemExit: vLLM's own parser refused a flag (code 2) or printed help.
    """
    parser = _make_parser()
    args = parser.parse_args(list(argv))
    args.model = args.model_tag or _given(parser, args, "model")
    if args.model is None:
        parser.set_defaults(**EMBEDDED_DEFAULTS)
        args = parser.parse_args(list(argv))
        args.model = None
    config = load_config(flag_values(args))
    _refuse_unservable(args, config)
    _apply_engine_args(parser, args, config)
    _validate(args)
    if args.api_server_count == 1:
        args.api_server_count = None
    return args, config


def _make_parser() -> FlexibleArgumentParser:
    parser = FlexibleArgumentParser(
        prog="vtoken-serve serve", usage="vtoken-serve serve [MODEL] [options]"
    )
    add_flags(parser)
    parser = make_arg_parser(parser)
    parser.set_defaults(host="127.0.0.1")
    return parser


def _given(parser: FlexibleArgumentParser, args: Namespace, name: str) -> Any:
    """The value of an argument, or ``None`` if it is only the default."""
    value = getattr(args, name)
    return None if value == parser.get_default(name) else value


def _refuse_unservable(args: Namespace, config: VTokenConfig) -> None:
    if args.headless or args.grpc or args.grpc_port is not None:
        raise UsageError(f"--headless, --grpc and --grpc-port are not served: {_ONE_PORT}")
    if args.data_parallel_multi_port_external_lb:
        raise UsageError(f"--data-parallel-multi-port-external-lb: {_ONE_PORT}")
    vllm_api_keys(args.api_key)
    if args.api_server_count not in (None, 1):
        _refuse_with_several(args)


def _refuse_with_several(args: Namespace) -> None:
    """What several API processes cannot be together with."""
    if args.api_server_count < 1:
        raise UsageError(f"--api-server-count={args.api_server_count}: at least 1")
    for name in (
        "data_parallel_external_lb",
        "data_parallel_hybrid_lb",
        "data_parallel_rank",
        "data_parallel_start_rank",
        "enable_elastic_ep",
        "enable_fault_tolerance",
    ):
        value = getattr(args, name, None)
        if value is not None and value is not False:  # a rank may be 0
            raise UsageError(f"--{name.replace('_', '-')}: {_ONE_FRONT}")
    if args.data_parallel_backend == "ray":
        raise UsageError(f"--data-parallel-backend=ray: {_ONE_FRONT}")
    if envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        raise UsageError(f"VLLM_ALLOW_RUNTIME_LORA_UPDATING: {_ONE_FRONT}, as in vLLM")


def _apply_engine_args(
    parser: FlexibleArgumentParser, args: Namespace, config: VTokenConfig
) -> None:
    """Put the token layer's engine arguments into ``args``; mutates it."""
    from vtoken.integration.vllm.plugin import engine_args

    for name, value in engine_args(config).items():
        theirs = _given(parser, args, name)
        if name == "additional_config":
            args.additional_config = _merged(theirs, value)
        elif theirs is None:
            setattr(args, name, value)
        elif name in ("scheduler_cls", "worker_cls"):
            raise UsageError(f"--{name.replace('_', '-')}={theirs}: {_OURS_ALONE}")


def _merged(theirs: Mapping[str, Any] | None, ours: Mapping[str, Any]) -> dict[str, Any]:
    if clash := sorted((theirs or {}).keys() & ours.keys()):
        raise UsageError(f"--additional-config has the key {clash[0]!r}: use --vtoken-* flags")
    return {**(theirs or {}), **ours}


def _validate(args: Namespace) -> None:
    try:
        validate_parsed_serve_args(args)
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(str(error).removeprefix("Error: ")) from error
