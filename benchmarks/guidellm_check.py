"""Do our load test and guidellm measure the same? Both on one service, in turn.

    python -m benchmarks.guidellm_check --guidellm .guidellm/bin/guidellm [--rounds 5] [--out FILE]

guidellm pins other versions than vLLM, so it lives in an environment of its own
(``python -m venv .guidellm && .guidellm/bin/pip install guidellm``). Both tools send the same
number of streamed completions of the same lengths from the same number of clients. Their prompts
differ: each makes its own. What guidellm calls inter-token latency is TPOT in ``vllm bench serve``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.bench import abba, wait_idle
from loadtest.client import Client
from loadtest.drive import closed_loop
from loadtest.fleet import Engine
from loadtest.latency import summarize
from loadtest.machine import describe_machine, describe_versions, load_average
from loadtest.scenarios.inputs import SYNTHETIC, make_jobs
from loadtest.server import Server
from loadtest.statistics import estimate_mean, estimate_ratio
from loadtest.workloads import Job, Lengths
from service.embedded_model import ensure_embedded_model

LENGTHS = Lengths(24, 256, 64)
CLIENTS = 4
OURS, THEIRS = "loadtest", "guidellm"
METRICS = ("output_throughput", "median_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")


def main() -> None:
    """Measure, and print or write both tools' figures and their ratios."""
    parser = argparse.ArgumentParser(description="Compare our load test with guidellm.")
    parser.add_argument("--guidellm", required=True, help="the program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="guidellm-") as folder:
        result = asyncio.run(measure(args.guidellm, args.rounds, Path(folder)))
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


async def measure(guidellm: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Both tools in turn on one service; the first runs are discarded."""
    model = str(ensure_embedded_model())
    server = Server([model, *Engine().arguments("lazy")], folder / "service.log")
    load_before = load_average()
    try:
        url = await asyncio.to_thread(server.wait_ready)
        async with Client(url) as client:
            runs: dict[str, list[Mapping[str, float]]] = {OURS: [], THEIRS: []}
            for number, name in abba((OURS, THEIRS), rounds):
                await wait_idle(client)
                if name == OURS:
                    found = await _ours(client, number + 1)
                else:
                    found = await _theirs(guidellm, url, model, number + 1, folder / "report.json")
                if number >= 0:
                    runs[name].append(found)
    finally:
        server.stop()
    return {
        "machine": {**describe_machine(), "load_before": load_before},
        "versions": {**describe_versions(), THEIRS: await _version(guidellm)},
        "config": {"clients": CLIENTS, **LENGTHS.described(), "repeats": rounds},
        **compared(runs),
    }


def compared(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Means with intervals of either tool, and ours over theirs."""
    arms = {
        name: {metric: estimate_mean([run[metric] for run in found]) for metric in METRICS}
        for name, found in runs.items()
    }
    return {
        "arms": {
            name: {
                metric: {
                    "mean": estimate.value,
                    "ci95": [estimate.low, estimate.high],
                    "samples": [run[metric] for run in runs[name]],
                }
                for metric, estimate in metrics.items()
            }
            for name, metrics in arms.items()
        },
        "comparisons": {
            metric: {"ratio": ratio.value, "ci95": [ratio.low, ratio.high]}
            for metric in METRICS
            for ratio in [
                estimate_ratio(
                    [run[metric] for run in runs[OURS]], [run[metric] for run in runs[THEIRS]]
                )
            ]
        },
    }


async def _ours(client: Client, seed: int) -> Mapping[str, float]:
    jobs = await make_jobs(SYNTHETIC, client, LENGTHS, seed)

    async def send(job: Job) -> Any:
        return await client.stream(**job.body())

    return summarize(await closed_loop(send, jobs, CLIENTS))


async def _theirs(
    guidellm: str, url: str, model: str, seed: int, report: Path
) -> Mapping[str, float]:
    data = f"prompt_tokens={LENGTHS.num_prompt_tokens},output_tokens={LENGTHS.num_output_tokens}"
    backend = "kind=openai_http,request_format=/v1/completions"
    command = [
        *(guidellm, "run", "--disable-console"),
        *("--backend", f"{backend},target={url}"),
        *("--profile", f"kind=concurrent,streams={CLIENTS}"),
        *("--data", f"kind=synthetic_text,{data}"),
        *("--tokenizer", f"kind=huggingface_auto,model={model}"),
        *("--constraint", f"kind=max_requests,count={LENGTHS.num_jobs}"),
        *("--seed", f"kind=static,value={seed}"),
        *("--output", f"kind=json,path={report}"),
    ]
    environment = {n: v for n, v in os.environ.items() if n != "LD_PRELOAD"}
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**environment, "HF_HUB_OFFLINE": "1"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, error = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"guidellm ended with {process.returncode}: {error.decode()[-2000:]}")
    return figures_of(json.loads(report.read_text()))


def figures_of(report: Mapping[str, Any]) -> Mapping[str, float]:
    """guidellm's report under our names.

    Raises:
        ValueError: not every request was answered.
    """
    (benchmark,) = report["benchmarks"]
    metrics = benchmark["metrics"]
    found = {
        name: metrics[name]["successful"]
        for name in ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency")
    }
    completed = found["request_latency"]["count"]
    if completed != LENGTHS.num_jobs:
        raise ValueError(f"guidellm completed {completed} of {LENGTHS.num_jobs} requests")
    tokens = metrics["output_token_count"]["successful"]["total_sum"]
    return {
        "output_throughput": tokens / benchmark["duration"],
        "median_ttft_ms": found["time_to_first_token_ms"]["median"],
        "mean_tpot_ms": found["inter_token_latency_ms"]["mean"],
        "mean_e2el_ms": 1e3 * found["request_latency"]["mean"],
    }


async def _version(guidellm: str) -> str:
    process = await asyncio.create_subprocess_exec(
        guidellm, "--version", stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return output.decode().split()[-1]


if __name__ == "__main__":
    main()
