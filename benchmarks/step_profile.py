"""Where a decode step's time goes: a sampling profile of each arm of :mod:`benchmarks.step_time`.

    python -m benchmarks.step_profile [--context 1500] [--seconds 25] [--out FILE]

Needs py-spy (``pip install py-spy``), which samples the engine's process from outside, native
calls included. The batch and the arms are those of ``scripts/bench_step_time``; one arm runs at a
time. Figures are shares of the samples of the thread that runs the engine's steps, so another load
on the machine hardly touches them.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from benchmarks.step_time import ARMS, NUM_REQUESTS, Arm

SAMPLES_PER_SECOND = 250
MAX_BURSTS = 400
ATTENTION = "attention"
KV_UPDATE = "write of new K/V"
SCHEDULER = "token layer in the scheduler"
WORKER = "token layer in the worker"
REST = "model and the rest of vLLM"
PARTS = (ATTENTION, KV_UPDATE, SCHEDULER, WORKER, REST)

_FRAME = re.compile(r"(?P<name>.*) \((?P<file>[^()]*?)(:\d+)?\)")
_BACKENDS = ("cpu_attn.py", "attention_cpu.py")


def main() -> None:
    """Profile all arms and print or write the shares."""
    parser = argparse.ArgumentParser(description="Shares of a decode step, per mode.")
    parser.add_argument("--context", type=int, default=1500)
    parser.add_argument("--seconds", type=int, default=25)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if (py_spy := shutil.which("py-spy")) is None:
        sys.exit("step_profile: py-spy was not found on PATH: pip install py-spy")
    arms = {name: profile(py_spy, name, args.context, args.seconds) for name in ARMS}
    text = json.dumps(
        {"requests": NUM_REQUESTS, "context_tokens": args.context, "arms": arms}, indent=1
    )
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def profile(py_spy: str, name: str, context: int, seconds: int) -> dict[str, object]:
    """Sample one arm while its batch decodes."""
    arm = Arm(name, context, MAX_BURSTS)
    arm.wait_ready()
    arm.burst()
    with tempfile.NamedTemporaryFile(suffix=".txt") as stacks:
        command = [py_spy, "record", "--pid", str(arm.pid), "--format", "raw"]
        command += ["--rate", str(SAMPLES_PER_SECOND), "--duration", str(seconds)]
        with subprocess.Popen(
            [*command, "--output", stacks.name], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as sampler:
            num_bursts = 1
            while sampler.poll() is None and num_bursts < MAX_BURSTS:
                arm.burst()
                num_bursts += 1
            _, error = sampler.communicate()
        if sampler.returncode:
            sys.exit(f"step_profile: py-spy failed: {error.decode().strip()}")
        found = shares(Path(stacks.name).read_text().splitlines())
    arm.finish()
    return found


def shares(stacks: Iterable[str]) -> dict[str, object]:
    """Share of each part, and of our dearest functions with all that they call.

    Args:
        stacks: lines ``outermost;…;innermost COUNT``, each frame ``NAME (FILE:LINE)``.

    Returns:
        ``samples``; ``parts``, which add up to 1; ``functions`` of ``vtoken``, dearest first.
    """
    parts: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    total = 0
    for line in stacks:
        text, _, count = line.rpartition(" ")
        frames = [match for frame in text.split(";") if (match := _FRAME.fullmatch(frame))]
        if not any(_call(f) == ("step", "llm_engine.py") for f in frames):
            continue  # another thread, or the benchmark between bursts
        total += int(count)
        parts[_part(frames)] += int(count)
        ours = {f"{f['name']} ({f['file']})" for f in frames if _is_ours(f["file"])}
        for function in ours:
            functions[function] += int(count)
    if not total:
        raise ValueError("no sample has a frame of the engine's step")
    return {
        "samples": total,
        "parts": {part: round(parts[part] / total, 4) for part in PARTS},
        "functions": {name: round(n / total, 4) for name, n in functions.most_common(25)},
    }


def _part(frames: list[re.Match[str]]) -> str:
    """What a sample was spent on."""
    calls = {_call(f) for f in frames}
    if any(("do_kv_cache_update", file) in calls for file in _BACKENDS):
        return KV_UPDATE
    if any(("forward", file) in calls for file in _BACKENDS):
        return ATTENTION
    # Our adapters call on into vLLM, and numpy or torch works for both: the innermost frame of
    # either says whose work it is.
    for frame in reversed(frames):
        if _is_ours(frame["file"]):
            return WORKER if any(name == "execute_model" for name, _ in calls) else SCHEDULER
        if frame["file"].startswith("vllm/"):
            break
    return REST


def _call(frame: re.Match[str]) -> tuple[str, str]:
    """Function without class, and file without folder."""
    return frame["name"].rpartition(".")[2], frame["file"].rpartition("/")[2]


def _is_ours(file: str) -> bool:
    return file.startswith("vtoken/")


if __name__ == "__main__":
    main()
