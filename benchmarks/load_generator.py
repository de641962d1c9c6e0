"""The own load generator beside guidellm: the same server, the same load, turn by turn.

Figures are medians over the rounds. guidellm's TPOT is its inter token latency, since its "time per
output token" has the first token in it. Both send one prompt length and one output length in a
closed loop; the prompts differ, guidellm makes its own text.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from inferlab import params as parameters
from inferlab.errors import InferlabError
from inferlab.run import checked, progress
from inferlab.serving.engine import EngineParams, Server, serve
from inferlab.serving.load import Target, closed_loop, cut_requests
from inferlab.serving.metrics import failures, summary
from inferlab.store import load_tensors

MODEL = Path("models/base")
WINDOWS = Path("data/windows/training.safetensors")
RESULT = Path("metrics/benchmarks/load_generator.json")
ROUNDS = 6
CONCURRENCY, REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 4, 20, 128, 64
WARM_UP = -1


def main() -> None:
    """Run all rounds and write the medians, the ratios and the spread of the ratios."""
    engine = parameters.load("serve_benchmark.engine", EngineParams)
    stream = load_tensors(WINDOWS)["input_ids"].numpy()
    own, peer = [], []
    with serve({"base": MODEL}, engine) as servers:
        _own(servers["base"], stream, WARM_UP)
        for turn in progress(range(ROUNDS), "rounds"):
            own.append(_own(servers["base"], stream, turn))
            peer.append(_guidellm(servers["base"]))
    values = {"rounds": ROUNDS}
    for name in own[0]:
        ours, theirs = (np.array([one[name] for one in side]) for side in (own, peer))
        values |= {
            f"own_{name}": np.median(ours),
            f"guidellm_{name}": np.median(theirs),
            f"ratio_{name}": np.median(ours / theirs),
            f"ratio_{name}_sd": np.std(ours / theirs, ddof=1),
        }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    aside = RESULT.with_suffix(".partial")
    aside.write_text(json.dumps(checked(values, str(RESULT)), indent=2) + "\n")
    aside.rename(RESULT)
    print(RESULT.read_text())


def _own(server: Server, stream: np.ndarray, turn: int) -> dict[str, float]:
    requests = cut_requests(stream, REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS, [turn + 1])
    outcomes = asyncio.run(closed_loop(Target(server.url, server.name), requests, CONCURRENCY))
    if failed := failures(outcomes):
        raise InferlabError(f"requests failed: {dict(failed)}; there is nothing to compare")
    figures = summary(outcomes)
    return {
        "output_tokens_per_s": figures["output_tokens_per_s"],
        "ttft_ms_p50": figures["ttft_ms_p50"],
        "tpot_ms_p50": figures["tpot_ms_p50"],
    }


def _guidellm(server: Server) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        backend = f"target={server.url},model={server.name},request_format=/v1/completions"
        text = f"prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}"
        command = [
            *(str(Path(sys.executable).with_name("guidellm")), "run"),
            f"--backend=kind=openai_http,{backend}",
            f"--profile=kind=concurrent,streams={CONCURRENCY}",
            f"--constraint=kind=max_requests,count={REQUESTS}",
            f"--tokenizer=kind=huggingface_auto,model={MODEL.resolve()}",
            f"--data=kind=synthetic_text,{text}",
            f"--output=kind=json,path={report}",
            "--disable-console-interactive",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0 or not report.exists():
            raise InferlabError(f"guidellm failed: {(done.stderr or done.stdout).strip()[-500:]}")
        metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    return {
        "output_tokens_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
        "ttft_ms_p50": metrics["time_to_first_token_ms"]["successful"]["percentiles"]["p50"],
        "tpot_ms_p50": metrics["inter_token_latency_ms"]["successful"]["percentiles"]["p50"],
    }


if __name__ == "__main__":
    try:
        main()
    except InferlabError as error:
        sys.exit(f"inferlab: {error}")
