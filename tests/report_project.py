"""A project folder with hand-made results of a run, for the tests of the report."""

import csv
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NOTES = """\
# What the studies found

## The variants (quantize, evaluate)

Text with **weight**, `code` and <script>alert("raw")</script>.

### Deeper

| variant | perplexity |
| --- | --- |
| base | 10 |

## 33.1 Rounding (quantization_basics)

Steps are even.

## Notes without a stage

Not shown.
"""
LOADS = {  # variant: (concurrency, first token ms, next token ms, requests a second)
    "base": [(1, 200, 30, 0.5), (8, 1300, 45, 2.0), (16, 3000, 70, 2.4)],
    "int8": [(1, 130, 27, 0.6), (8, 950, 44, 2.5), (16, 2100, 63, 3.2)],
    "gptq": [(1, 380, 36, 0.4), (4, 1400, 55, 1.0), (16, 5500, 104, 1.5)],
}
PERPLEXITIES = {"base": 10.0, "int8": 10.2, "gptq": 12.0, "nf4": 13.0}


def png(width: int = 4, height: int = 3) -> bytes:
    """A white picture."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = (b"\x00" + b"\xff" * 3 * width) * height
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def write_json(file: str, content: Mapping[str, Any]) -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(json.dumps(content))


def write_table(file: str, rows: Sequence[Mapping[str, Any]]) -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    with Path(file).open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_run() -> None:
    """All that the report reads, into the current folder (params.yaml is there already)."""
    Path("docs").mkdir()
    Path("docs/studies.md").write_text(NOTES)
    for variant, perplexity in PERPLEXITIES.items():
        loss = (perplexity - 10) / 100
        values = {"token_perplexity": perplexity, "trivia_accuracy": 0.5 - loss}
        write_json(f"metrics/evaluate/{variant}.json", values | {"cloze_accuracy": 0.4})
    write_json("metrics/quantization_basics.json", {"int8_mae": 0.00912345, "values": 262144})
    Path("plots/quantization_basics").mkdir(parents=True)
    Path("plots/quantization_basics/histogram.png").write_bytes(png())
    write_table("plots/serve_benchmark/concurrency.csv", [*served_rows()])
    write_json("metrics/serve_benchmark/base.json", {"failed_requests": 0})
    formats = {
        "transformers_prefill_tokens_per_s": 400.0,
        "transformers_decode_tokens_per_s": 20.0,
    }
    variants = ("base", "nf4", "gptqmodel")  # the last one was not evaluated
    write_table(
        "plots/format_comparison/formats.csv", [{"variant": one} | formats for one in variants]
    )
    write_table("plots/end_to_end/configurations.csv", configuration_rows())
    write_table("plots/cost_report/per_million_tokens.csv", price_rows())
    manifest = {"kind": "language_model", "source": "wheel", "package": "tiny", "platform": None}
    write_json("models/base/manifest.json", manifest)


def served_rows() -> list[dict[str, Any]]:
    """The table of serve_benchmark: 64 tokens a request, bands of 2 % around the throughput."""
    return [
        {
            "variant": variant,
            "concurrency": concurrency,
            "failed_requests": 0,
            "output_tokens_per_s": 64 * rate,
            "requests_per_s": rate,
            "ttft_ms_p95": first - 10,
            "tpot_ms_p95": each - 1,
            "output_tokens_per_s_min": 64 * rate * 0.98,
            "output_tokens_per_s_max": 64 * rate * 1.02,
            "ttft_ms_p95_max": first,
            "tpot_ms_p95_max": each,
        }
        for variant, loads in LOADS.items()
        for concurrency, first, each, rate in loads
    ]


def configuration_rows() -> list[dict[str, Any]]:
    """The table of end_to_end: one client on vLLM, and on the lean runtime without and with drafts.

    A first token after 160 ms; perplexity in the runtime's own arithmetic 10.3, the base's is 10.
    """
    names = ("engine", "variant", "speculative", "decode_tokens_per_s", "failed_requests")
    rows = [
        ("vllm", "base", 0, 30.0, 0),
        ("runtime", "int8", 0, 80.0, 0),
        ("runtime", "int8", 1, 100.0, 0),
        ("runtime", "gptq", 0, 90.0, 1),
        ("runtime", "gptqmodel", 0, 90.0, 0),  # was not evaluated
    ]
    same = {"ttft_ms": 160.0, "token_perplexity": 10.3}
    return [dict(zip(names, row, strict=True)) | same for row in rows]


def price_rows() -> list[dict[str, Any]]:
    """The table of cost_report: this machine at $0.10 an hour, and two APIs."""
    names = ("this_machine_base", "house/small", "house/large")
    usd = ((0.1, 0.2, "0.1"), (0.1, 0.1, ""), (1.0, 2.0, ""))
    keys = ("usd_per_mtok_input", "usd_per_mtok_output", "usd_per_instance_hour")
    return [
        {"name": name} | dict(zip(keys, values, strict=True))
        for name, values in zip(names, usd, strict=True)
    ]
