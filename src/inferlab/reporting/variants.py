"""`inferlab variants`: one row a variant, from the metrics of the last run."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from inferlab.errors import InferlabError
from inferlab.store import read_json
from inferlab.terminal import console

HEADINGS = (
    "variant",
    "MB",
    "bits",
    "perpl.",
    "trivia",
    "cloze",
    "tok/s",
    "tok/s max",
    "TTFT ms",
    "$/M in, out",
)


def variants(
    metrics: Annotated[Path, typer.Option(help="The metrics folder of a run.")] = Path("metrics"),
    markdown: Annotated[bool, typer.Option(help="Print a Markdown table.")] = False,
) -> None:
    """Size, quality, speed and cost of every variant of the last run; ± is one standard error.

    bits: of a weight of the linear layers, as stored. tok/s: output tokens a second for one client,
    and for the most clients (how many). TTFT: for one client. $/M: US dollars a million tokens on
    this machine at its price in params.yaml, input and output.
    """
    rows = variant_rows(metrics)
    if markdown:
        for cells in (HEADINGS, ["---"] * len(HEADINGS), *rows):
            print(f"| {' | '.join(cells)} |")
        return
    table = Table(*HEADINGS, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for cells in rows:
        table.add_row(*cells)
    console().print(table)


def variant_rows(metrics: Path) -> list[list[str]]:
    """The cells of the table, best perplexity first; `-` for what was not served.

    Raises InferlabError when no variant has been evaluated.
    """
    files = sorted((metrics / "evaluate").glob("*.json"))
    if not files:
        raise InferlabError(f"{metrics}/evaluate has no metrics; run the pipeline: make repro")
    quality = {file.stem: read_json(file) for file in files}
    costs = _read(metrics / "cost_report.json")
    order = sorted(quality, key=lambda name: quality[name]["token_perplexity"])
    return [
        _quality_cells(name, quality[name])
        + _serving_cells(_read(metrics / "serve_benchmark" / f"{name}.json"))
        + [_cost_cell(name, costs)]
        for name in order
    ]


def _quality_cells(name: str, found: dict[str, Any]) -> list[str]:
    accuracies = [
        f"{found[f'{task}_accuracy']:.2f}±{found[f'{task}_accuracy_se']:.2f}"
        for task in ("trivia", "cloze")
    ]
    size, bits = f"{found['model_bytes'] / 1e6:.0f}", f"{found['bits_per_weight']:.2f}"
    label = name if found["packed"] else f"{name} (simulated)"
    return [label, size, bits, f"{found['token_perplexity']:.2f}", *accuracies]


def _serving_cells(found: dict[str, Any]) -> list[str]:
    rates = {
        int(key.removeprefix("output_tokens_per_s_c")): value
        for key, value in found.items()
        if key.startswith("output_tokens_per_s_c") and not key.endswith("_spread")
    }
    if not rates:
        return ["-", "-", "-"]
    fewest, most = min(rates), max(rates)
    ttft = found[f"ttft_ms_p50_c{fewest}"]
    return [f"{rates[fewest]:.0f}", f"{rates[most]:.0f} ({most})", f"{ttft:.0f}"]


def _cost_cell(name: str, costs: dict[str, Any]) -> str:
    keys = [f"usd_per_mtok_{side}_this_machine_{name}" for side in ("input", "output")]
    return ", ".join(f"{costs[key]:.2f}" for key in keys) if keys[0] in costs else "-"


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
