"""What vLLM is started with: its own flags, our defaults, the token layer's engine arguments."""

from __future__ import annotations

import json
import warnings
from types import ModuleType

import pytest

from service.errors import UsageError
from vtoken.errors import ConfigError


@pytest.fixture(scope="module")
def arguments() -> ModuleType:
    """The module, imported here: it imports vLLM, which takes seconds and warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from service import arguments
    return arguments


@pytest.fixture(autouse=True)
def _vllm_may_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_without_model_the_embedded_one_is_meant(arguments):
    """With defaults that suit it and a CPU, on the loopback address."""
    args, config = arguments.parse([])
    assert args.model is None
    assert config.mode == "lazy"
    assert (args.host, args.port) == ("127.0.0.1", 8000)
    assert args.served_model_name == ["smollm2-135m-instruct"]
    assert (args.dtype, args.max_model_len, args.max_num_seqs) == ("bfloat16", 8192, 16)
    assert args.kv_cache_memory_bytes == 1 << 30


def test_flags_beat_the_defaults_of_the_embedded_model(arguments):
    """Each on its own."""
    argv = ["--max-model-len", "2k", "--served-model-name", "x", "--host", "0.0.0.0"]
    args, _ = arguments.parse(argv)
    assert (args.max_model_len, args.served_model_name) == (2000, ["x"])
    assert (args.host, args.max_num_seqs) == ("0.0.0.0", 16)


@pytest.mark.parametrize("argv", [["org/model"], ["--model", "org/model"]])
def test_a_named_model_has_vllms_defaults(arguments, argv):
    """Nothing of the embedded model leaks into it."""
    args, _ = arguments.parse(argv)
    assert args.model == "org/model"
    assert args.served_model_name is None
    assert args.max_model_len is None
    assert args.host == "127.0.0.1"


def test_token_layer_is_in_the_engine_arguments(arguments):
    """Scheduler, worker, block size and the whole configuration."""
    args, config = arguments.parse(["--vtoken-theta-f", "0.5"])
    assert "vtoken" in args.scheduler_cls
    assert "vtoken" in args.worker_cls
    assert args.block_size == 16
    assert args.additional_config["vtoken"] == config.to_dict()
    assert config.theta_f == 0.5


def test_users_additional_config_is_merged(arguments):
    """Theirs beside ours; a key of ours belongs to the flags."""
    args, _ = arguments.parse(["--additional-config", '{"theirs": 1}'])
    assert args.additional_config.keys() == {"theirs", "vtoken"}
    with pytest.raises(UsageError, match="--vtoken-"):
        arguments.parse(["--additional-config", '{"vtoken": {}}'])


def test_mode_off_is_stock(arguments):
    """No engine argument of ours, and the user's own classes pass."""
    args, _ = arguments.parse(["--vtoken-mode", "off", "--scheduler-cls", "a.B"])
    assert args.scheduler_cls == "a.B"
    assert args.worker_cls == "auto"
    assert args.block_size is None
    assert not args.additional_config


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--scheduler-cls", "a.B"], "--scheduler-cls=a.B"),
        (["--worker-cls", "a.B"], "--worker-cls=a.B"),
        (["--api-server-count", "0"], "--api-server-count=0"),
        (["--api-server-count", "2", "--headless"], "--headless"),
        (["--api-server-count", "2", "--data-parallel-rank", "0"], "--data-parallel-rank"),
        (["--api-server-count", "2", "--data-parallel-external-lb"], "external-lb"),
        (["--api-server-count", "2", "--data-parallel-hybrid-lb"], "hybrid-lb"),
        (["--api-server-count", "2", "--enable-elastic-ep"], "--enable-elastic-ep"),
        (["--api-server-count", "2", "--data-parallel-backend", "ray"], "--data-parallel-backend"),
        (["--data-parallel-multi-port-external-lb"], "--data-parallel-multi-port-external-lb"),
        (["--headless"], "--headless"),
        (["--grpc"], "--grpc"),
        (["org/model", "--enable-auto-tool-choice"], "requires --tool-call-parser"),
    ],
)
def test_what_cannot_be_served_is_refused(arguments, argv, expected):
    """In one sentence that repeats the flag."""
    with pytest.raises(UsageError, match=expected):
        arguments.parse(argv)


def test_blank_key_is_refused(arguments):
    """Before the engine starts, and not served as none."""
    with pytest.raises(ConfigError, match="--api-key"):
        arguments.parse(["--api-key", "secret", " "])


def test_several_api_processes(arguments, monkeypatch):
    """One is the same as none named; adapters that come and go would reach one process only."""
    assert arguments.parse(["--api-server-count", "2"])[0].api_server_count == 2
    assert arguments.parse(["--api-server-count", "1"])[0].api_server_count is None
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    arguments.parse([])
    with pytest.raises(UsageError, match="LORA"):
        arguments.parse(["--api-server-count", "2"])


def test_config_file_gives_flags_of_both(arguments, tmp_path):
    """vLLM's --config takes ours too; the command line beats the file."""
    path = tmp_path / "serve.yaml"
    path.write_text(json.dumps({"port": 9000, "vtoken-theta-f": 0.5, "vtoken-sink-tokens": 2}))
    args, config = arguments.parse(["--config", str(path), "--vtoken-theta-f", "0.75"])
    assert args.port == 9000
    assert (config.theta_f, config.sink_tokens) == (0.75, 2)


def test_dotted_policy_arguments(arguments):
    """vLLM's form for JSON flags works for ours."""
    with pytest.raises(ConfigError, match="exactly one"):
        arguments.parse(["--vtoken-keep-ratio", "0.5", "--vtoken-budget-tokens", "64"])
    _, config = arguments.parse(["--vtoken-policy-args.a", "1"])
    assert config.policy_args == {"a": 1}
