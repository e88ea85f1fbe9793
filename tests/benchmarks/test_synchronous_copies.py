"""The plugin of the overhead benchmark is found by vLLM and makes copies synchronous."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import entry_points

import numpy as np
import torch

from loadtest.scenarios.overhead import SYNCHRONOUS_COPIES
from vtoken.copy_engine.cpu import CpuCopyEngine
from vtoken.kv_pool import KVPool
from vtoken.kv_view import SplitKV

NAME = "vtoken_synchronous_copies"


def test_folder_on_the_path_is_an_installed_plugin(monkeypatch):
    """As vLLM looks for it, and as the service names all plugins to vLLM."""
    names = {found.name for found in entry_points(group="vllm.general_plugins")}
    assert NAME not in names
    monkeypatch.syspath_prepend(str(SYNCHRONOUS_COPIES))
    (plugin,) = entry_points(group="vllm.general_plugins", name=NAME)
    assert plugin.load().__name__ == "register"


def test_registered_engine_has_copied_when_the_submission_returns(monkeypatch):
    """The result, stall and all, comes with the next poll, as without the plugin."""
    monkeypatch.syspath_prepend(str(SYNCHRONOUS_COPIES))
    monkeypatch.setattr(CpuCopyEngine, "_start", CpuCopyEngine._start)  # undone afterwards
    importlib.import_module(NAME).register()
    cache = torch.randn(3, 8, 2, 4, 16).to(torch.bfloat16)
    pool = KVPool([SplitKV.from_cache(layer) for layer in cache])
    engine = CpuCopyEngine(pool)
    src, dst = np.array([1, 2], np.int32), np.array([20, 21], np.int32)
    engine.submit(7, src, dst)
    digests = [pool.digest(torch.from_numpy(s.astype(np.int64))) for s in (src, dst)]
    assert digests[0] == digests[1]
    (result,) = engine.poll()
    assert (result.ticket, result.error) == (7, None)
    engine.close()


def test_product_knows_nothing_of_it():
    """Without the folder on the path the plugin cannot be imported."""
    code = f"import importlib.util; assert importlib.util.find_spec('{NAME}') is None"
    subprocess.run([sys.executable, "-c", code], check=True)
