"""`inferlab studies`: one row a stage, with what it does, its key figure and its time.

A key figure is a text with keys of the stage's metrics in braces; a stage with a file for each
variant has `<variant>_<key>`, and `timing_<key>` is of metrics/timing.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from inferlab.errors import InferlabError
from inferlab.reporting.results import read_metrics
from inferlab.terminal import console
from inferlab.yaml_files import read_mapping

HEADINGS = ("stage", "study", "does", "key figure", "seconds")
FIGURES = {
    "prepare": "{training_tokens:,.0f} tokens of training text, {heldout_tokens:,.0f} held out",
    "calibrate": "largest column of an input {absmax_over_median_max:,.0f} times the median one",
    "quantize": "output error over round-to-nearest: GPTQ {gptq_output_error_vs_rtn:.2f}",
    "evaluate": "perplexity {base_token_perplexity:.2f}, INT8 {int8_token_perplexity:.2f}, "
    "GPTQ {gptq_token_perplexity:.2f}",
    "quantization_basics": "mean error {int8_mae:.4f} in INT8, {int4_mae:.3f} in INT4",
    "channel_scales": "a scale a tensor: {tensor_over_channel_median:.1f} times the squared error",
    "outliers": "rank correlation with INT8's cost: weights {rank_correlation_nats:.2f}, inputs "
    "{rank_correlation_inputs_nats:.2f}",
    "gptq_layer": "output error {output_error_over_rtn:.2f} of round-to-nearest's",
    "quantize_sweep": "perplexity at 2 bits: {ratio_gptq_symmetric_narrowest:.1f} times bf16's "
    "with GPTQ, {ratio_rtn_symmetric_narrowest:,.0f} times without",
    "format_comparison": "perplexity over bf16's: INT8 {ratio_int8:.3f}, GPTQ {ratio_gptq:.2f}, "
    "NF4 {ratio_nf4:.2f}",
    "teacher": "accuracy {accuracy:.3f}",
    "distill": "accuracy {combined_t1_accuracy_mean:.3f} with the teacher, {ce_accuracy_mean:.3f} "
    "with labels only, teacher {teacher_accuracy:.3f}",
    "data_distillation": "answer perplexity {untrained_answer_perplexity:.1f}, after synthetic "
    "{synthetic_answer_perplexity:.1f}, after human {human_answer_perplexity:.1f}",
    "magnitude_pruning": "accuracy {accuracy_0:.3f}, half pruned {accuracy_50:.3f}, 90 % "
    "{accuracy_90:.3f}",
    "head_pruning": "half of the heads gone: {accuracy_50:.3f} ranked, {accuracy_random_50:.3f} "
    "random, of {accuracy_0:.3f}",
    "semi_structured": "perplexity at 2:4 {token_perplexity_2_4_sparsegpt:.0f}, anywhere "
    "{token_perplexity_unstructured_sparsegpt:.0f}, dense {token_perplexity_dense:.0f}",
    "kv_memory": "Llama-3-8B: {bytes_per_token_llama_3_8b:,.0f} bytes a token",
    "kv_quantization": "KL of an INT8 cache: {kl_nats_int8_tensor:.4f} nats with a scale a tensor, "
    "{kl_nats_int8_token_head:.4f} a token and head",
    "sliding_window": "perplexity with 256 tokens {token_perplexity_w256:.1f}, and anchors "
    "{token_perplexity_w256_anchored:.1f}, all {token_perplexity_full:.1f}",
    "attention_variants": "cosine to MHA after pooling: GQA {cosine_gqa:.2f}, MQA {cosine_mqa:.2f}",
    "token_eviction": "perplexity with a quarter of the cache: H2O {token_perplexity_h2o:.1f}, "
    "random {token_perplexity_random:.1f}, all {token_perplexity_full:.1f}",
    "flash_attention": "{peak_mib_tiled_4096:.1f} MiB in tiles at 4,096 tokens, "
    "{peak_mib_standard_4096:,.0f} without",
    "speculative_sampling": "{speedup_80:.1f} to {speedup_95:.1f} times at 80 to 95 % agreement",
    "draft": "acceptance {acceptance:.2f}, before distilling {acceptance_before:.2f}",
    "draft_models": "speed-up: lookup {speedup_lookup:.2f}, INT8 {speedup_int8:.2f}, draft "
    "{speedup_draft:.2f}",
    "step_cost": "{base_ms:.0f} ms a step and {token_us:.0f} µs a token",
    "continuous_batching": "{capacity_ratio_to_best_static:.1f} times the best static batch's "
    "capacity",
    "simulator_validation": "off by {throughput_error_pct:.1f} % in throughput, "
    "{ttft_error_pct:.1f} % in TTFT, {tpot_error_pct:.1f} % in TPOT",
    "chunked_prefill": "P99.9 of ITL {itl_ms_p999_whole:,.0f} ms with whole prompts, "
    "{itl_ms_p999_512:,.0f} with chunks of 512",
    "scheduling": "mean latency: first come {mean_s_fifo:.1f} s, shortest first "
    "{mean_s_shortest_oracle:.1f} s",
    "serve_benchmark": "tokens a second for 32 clients: bf16 {base_output_tokens_per_s_c32:.0f}, "
    "INT8 {int8_output_tokens_per_s_c32:.0f}",
    "engine_comparison": "TensorRT-LLM over vLLM: {throughput_advantage_128_batch_64:.2f} and "
    "{throughput_advantage_2048_batch_64:.2f} in throughput, batch 64",
    "cascade": "accuracy {cascade_accuracy:.3f} at {cost_vs_teacher:.2f} of the cost, teacher "
    "{teacher_accuracy:.3f}",
    "autoscaling": "dollars a day: fixed {usd_per_day_fixed:,.0f}, reactive "
    "{usd_per_day_reactive:,.0f}, predictive {usd_per_day_predictive:,.0f}",
    "cost_report": "dollars a million output tokens: {usd_per_mtok_output_this_machine_int8:.2f} "
    "here, {usd_per_mtok_output_a100:.2f} on an A100",
    "operator_fusion": "softmax and dropout: {peak_mib_softmax_dropout_unfused:.0f} MiB, compiled "
    "{peak_mib_softmax_dropout_compiled:.0f}",
    "memory_efficient": "{anonymous_mib_runtime:.0f} MiB of private memory, "
    "{anonymous_mib_all:.0f} with every saving",
    "end_to_end": "throughput over transformers': vLLM INT8 {throughput_ratio_vllm_int8:.1f}, lean "
    "runtime INT8 {throughput_ratio_runtime_int8:.1f}",
    "monitoring": "{alerts_fired:.0f} alerts, {alerts_missed:.0f} missed, "
    "{alerts_unexpected:.0f} unexpected; promtool agrees: {promtool_agrees:.0f}",
    "report": "{recommended_machines:.0f} machines, {recommended_usd_per_day:.2f} dollars a day",
}
"""What a stage's metrics say in a few words."""


def studies(
    folder: Annotated[Path, typer.Option(help="The folder of a project that has run.")] = Path(),
    markdown: Annotated[bool, typer.Option(help="Print a Markdown table.")] = False,
) -> None:
    """Every stage in running order: what it does, its key figure and seconds, of the last run."""
    rows = study_rows(folder)
    if markdown:
        for cells in (HEADINGS, ["---"] * len(HEADINGS), *rows):
            print(f"| {' | '.join(cells)} |")
        return
    table = Table(*HEADINGS, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for cells in rows:
        table.add_row(*cells)
    console().print(table)


def study_rows(folder: Path) -> list[list[str]]:
    """The cells of the table, a row a stage of dvc.yaml; `-` for what has not run.

    Raises InferlabError when the folder has no dvc.yaml, or one that is no YAML.
    """
    graph = folder / "dvc.yaml"
    if not graph.is_file():
        raise InferlabError(f"{graph} is missing; name a project's folder with --folder")
    stages = read_mapping(graph).get("stages") or {}
    return [
        [stage, *_number_and_text(description(entry)), *_measured(folder / "metrics", stage)]
        for stage, entry in stages.items()
    ]


def description(entry: dict[str, Any]) -> str:
    """The `desc` of an entry of dvc.yaml, empty without; of one with `foreach` it is in `do`."""
    return str(entry.get("do", entry).get("desc", ""))


def _number_and_text(description: str) -> tuple[str, str]:
    number, dash, text = description.partition(" - ")
    if dash and number.replace(".", "").isdigit():
        return number, text.rstrip(".")
    return "", description.rstrip(".")


def _measured(metrics: Path, stage: str) -> tuple[str, str]:
    timing = read_metrics(metrics / "timing", stage)
    values: dict[str, float] = {}
    for key, found in read_metrics(metrics, stage).items():
        prefix = "" if key == stage else f"{key}_"
        values |= {f"{prefix}{name}": value for name, value in found.items()}
    for found in timing.values():
        values |= {f"timing_{name}": value for name, value in found.items()}
    seconds = sum(found["seconds"] for found in timing.values())
    count = f" for {len(timing)}" if len(timing) > 1 else ""
    return _figure(stage, values), f"{seconds:.0f}{count}" if timing else "-"


def _figure(stage: str, values: dict[str, float]) -> str:
    """The key figure; `-` when a metric that it wants is missing, as with other parameters."""
    try:
        return FIGURES[stage].format_map(values)
    except KeyError:
        return "-"
