"""The log's two formats, and its configuration for Python's ``dictConfig``."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from service import request_ids
from service.logs import ConsoleFormatter, JsonFormatter, log_config
from service.request_ids import RequestRecord
from service.settings.vllm_variables import log_environment, log_level
from service.start_folder import start_folder


def make_record(message: str = "hello %s", *args: object, **extra: object) -> logging.LogRecord:
    record = logging.LogRecord("service.x", logging.INFO, "f.py", 7, message, args or None, None)
    record.__dict__.update(extra)
    return record


@pytest.fixture
def request_record() -> Iterator[RequestRecord]:
    """As if this test ran inside of a request."""
    record = RequestRecord("req-1", "POST", "/v1/completions", trace_id="ab" * 16)
    token = request_ids.current.set(record)
    yield record
    request_ids.current.reset(token)


def test_json_line_has_who_when_and_what() -> None:
    """One line of valid JSON, times in UTC."""
    text = JsonFormatter().format(make_record("hello\n%s", "wörld"))
    assert "\n" not in text
    line = json.loads(text)
    assert line["time"].endswith("+00:00")
    assert {n: line[n] for n in ("level", "logger", "message")} == {
        "level": "INFO",
        "logger": "service.x",
        "message": "hello\nwörld",
    }
    assert line["pid"] > 0
    assert "request_id" not in line


def test_line_of_a_request_names_it(request_record: RequestRecord) -> None:
    """Whoever logs, in either format."""
    line = json.loads(JsonFormatter().format(make_record("x")))
    assert (line["request_id"], line["trace_id"]) == ("req-1", "ab" * 16)
    text = ConsoleFormatter().format(make_record("x"))
    assert text.endswith(f"x request_id=req-1 trace_id={'ab' * 16}")


def test_fields_of_the_call_go_first() -> None:
    """The access line's numbers; in the console without what its message says already."""
    record = make_record("POST /v1 200", request_id="r", method="POST", status=200, output_tokens=5)
    line = json.loads(JsonFormatter().format(record))
    assert (line["request_id"], line["status"], line["output_tokens"]) == ("r", 200, 5)
    assert ConsoleFormatter().format(record).endswith("POST /v1 200 request_id=r output_tokens=5")


def test_exceptions_stay_inside_of_the_line() -> None:
    """As a member, in JSON; with the prefix on every line, in the console."""
    try:
        raise ValueError("broken")
    except ValueError:
        record = make_record("failed")
        record.exc_info = sys.exc_info()
    line = json.loads(JsonFormatter().format(record))
    assert "ValueError: broken" in line["exception"]
    lines = ConsoleFormatter().format(record).splitlines()
    assert len(lines) > 2
    assert all(one.startswith("(MainProcess pid=") for one in lines)


@pytest.mark.parametrize("style", ["console", "json"])
def test_configuration_is_valid_and_writes_to_standard_output(
    style: str,
) -> None:
    """In a process of its own, as vLLM's processes read it."""
    with start_folder(style, "INFO") as folder:
        code = (
            "import json, logging, logging.config\n"
            f"logging.config.dictConfig(json.load(open({str(folder.log_file)!r})))\n"
            "logging.getLogger('vllm.x').info('from vllm')\n"
            "logging.getLogger('service').debug('not this')\n"
            "logging.getLogger('other').info('nor this')\n"
            "logging.getLogger('other').warning('from a library')\n"
            "logging.getLogger('vllm').info('Model loading took %s GiB', 1)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        state = folder.progress.read()
    assert "from vllm" in done.stdout
    assert "from a library" in done.stdout
    assert "this" not in done.stdout
    assert state == {"phase": "weights_loaded", "percent": 80}
    if style == "json":
        levels = [json.loads(line)["level"] for line in done.stdout.splitlines()]
        assert levels == ["INFO", "WARNING", "INFO"]
    assert not folder.path.exists()


def test_level_can_be_changed_before_it_is_used() -> None:
    """As ``--log-level`` does."""
    with start_folder("json", "INFO") as folder:
        folder.configure_log("DEBUG")
        config = json.loads(folder.log_file.read_text())
    assert config["loggers"]["vllm"]["level"] == "DEBUG"
    assert config == log_config("json", "DEBUG", folder.progress.path)


def test_own_configuration_of_the_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of theirs, or none at all."""
    path = Path("/x/logging.json")
    assert log_environment(path, "console") == {"VLLM_LOGGING_CONFIG_PATH": "/x/logging.json"}
    assert log_environment(path, "json")["TQDM_DISABLE"] == "1"
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "0")
    assert log_environment(path, "json") == {}
    monkeypatch.delenv("VLLM_CONFIGURE_LOGGING")
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", "/theirs.json")
    assert log_environment(path, "json") == {}
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    assert log_level() == "DEBUG"
