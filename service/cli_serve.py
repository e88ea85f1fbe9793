"""``vtoken-serve serve``: checks what is ours, and serves."""

from __future__ import annotations

import os

from service.flags import describe_flags, parse_early, use_flags
from service.settings.http_process import load_service_settings
from service.settings.token_layer import load_config
from service.settings.unknown import unknown_settings
from service.settings.vllm_variables import log_environment, log_level, vllm_environment
from service.signals import exit_on_signals
from service.start_folder import start_folder

_HELP = """\
usage: vtoken-serve serve [MODEL] [--vtoken-* flags] [flags of vllm serve]

Serves MODEL through vLLM's OpenAI-compatible API with token-level KV-cache eviction. MODEL is a
Hugging Face name or a folder; without it, the embedded SmolLM2-135M-Instruct is served. Listens
on 127.0.0.1:8000 unless --host and --port say otherwise.

{flags}

Flags of vLLM (all are accepted):
  vtoken-serve serve --help=all            every flag
  vtoken-serve serve --help=ModelConfig    one section
  vtoken-serve serve --help=max-model-len  one flag

Admin routes are closed unless VTOKEN_ADMIN_KEY or VTOKEN_ADMIN_KEY_FILE is set. A flag beats a
variable, a variable beats the settings file, that beats the default; what is in force, and from
where, says vtoken-serve config check with the same arguments.
"""


def main(argv: list[str]) -> int:
    """Serve until stopped, or print the help; returns the exit code.

    Raises:
        UsageError, ConfigError: what is ours is wrong, which is said before vLLM is imported.
        VTokenError, SystemExit: as :func:`service.serve.run`.
    """
    if {"-h", "--help"} & set(argv):
        print(_HELP.format(flags=describe_flags()), end="")
        return 0
    use_flags(argv)
    refused = unknown_settings()
    if refused:
        raise refused[0]
    load_config(parse_early(argv))
    settings = load_service_settings()
    settings.admin_keys()
    settings.api_keys()
    if settings.admin_port:  # a taken port is known before the engine starts
        from service import admin_port

        admin_port.bind(settings.admin_host, settings.admin_port).close()
    os.environ.update(vllm_environment())
    with start_folder(settings.log_format, log_level()) as folder:
        exit_on_signals(folder.delete)
        os.environ.update(log_environment(folder.log_file, settings.log_format))
        from service import serve  # imports vLLM, which reads the environment

        return serve.run(argv, folder)
