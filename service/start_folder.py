"""A folder for what the server's processes share by file: the log's configuration, the progress.

It must be there before vLLM is imported, in this process and in those that vLLM spawns, and goes
with the server.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from service.logs import log_config
from service.start_progress import StartProgress


@dataclass(frozen=True)
class StartFolder:
    """See the module.

    Attributes:
        progress: how far the start is.
        log_style: ``console`` or ``json``.
    """

    path: Path
    progress: StartProgress
    log_style: str

    @property
    def log_file(self) -> Path:
        """The log's configuration."""
        return self.path / "logging.json"

    def delete(self) -> None:
        """With all that is in it, as far as that goes."""
        shutil.rmtree(self.path, ignore_errors=True)

    def configure_log(self, level: str) -> None:
        """Write the log's configuration with this level."""
        config = log_config(self.log_style, level, self.progress.path)
        self.log_file.write_text(json.dumps(config))


@contextmanager
def start_folder(log_style: str, level: str) -> Iterator[StartFolder]:
    """Make the folder; it is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="vtoken-serve-", ignore_cleanup_errors=True) as name:
        path = Path(name)
        folder = StartFolder(path, StartProgress(path / "start.json"), log_style)
        folder.progress.write("starting_server", 0)
        folder.configure_log(level)
        yield folder
