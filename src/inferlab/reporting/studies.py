"""The studies that the report shows: one line a study, in the order of the page.

A study has the name of its stage: it shows `metrics/<stage>.json` (or every file of the folder
`metrics/<stage>/`), the pictures in `plots/<stage>/` and the section of docs/studies.md whose
heading names the stage in brackets. One without metrics is named on the page and left out.
"""

GROUPS: dict[str, dict[str, str]] = {
    "Variants and formats": {
        "evaluate": "The variants: quality and size",
        "quantization_basics": "33.1 Linear quantization and its error",
        "channel_scales": "33.2 Who shares a scale",
        "outliers": "33.3 Outliers, and what to leave in 16 bits",
        "gptq_layer": "33.4 GPTQ on one layer, step by step",
        "quantize_sweep": "Perplexity against bits",
        "format_comparison": "33.5 All formats in one table",
    },
    "Distillation and pruning": {
        "teacher": "The teacher",
        "distill": "33.6 Does a teacher help a small student?",
        "data_distillation": "33.7 Can the model write its own training data?",
        "magnitude_pruning": "33.8 Iterative magnitude pruning",
        "head_pruning": "33.9 Pruning attention heads",
        "semi_structured": "33.10 2:4 against zeros anywhere",
    },
    "KV cache and attention": {
        "kv_memory": "33.11 What a KV cache takes",
        "kv_quantization": "33.12 An INT8 KV cache",
        "sliding_window": "33.13 Sliding windows and anchors",
        "attention_variants": "33.14 Sharing keys and values among heads",
        "token_eviction": "33.15 Which tokens a cache may forget",
        "flash_attention": "33.26 Attention in tiles",
    },
    "Speculative decoding": {
        "speculative_sampling": "33.16 Acceptance and rejection",
        "draft": "The draft model",
        "draft_models": "33.17 Drafters for a real target",
    },
    "Batching and scheduling": {
        "step_cost": "What a step of the engine costs",
        "continuous_batching": "33.18 Continuous batching",
        "simulator_validation": "The simulator beside the engine",
        "chunked_prefill": "33.19 Prefill in chunks",
        "scheduling": "33.20 Whose turn it is",
    },
    "Serving, cost and production": {
        "serve_benchmark": "33.21 Serving under load",
        "engine_comparison": "33.22 vLLM against TensorRT-LLM",
        "cascade": "33.23 A small model first",
        "autoscaling": "33.24 Following a day's load",
        "cost_report": "33.25 What a million tokens costs",
        "operator_fusion": "33.27 Fused operators",
        "memory_efficient": "33.28 One runtime, every saving",
        "end_to_end": "33.29 Whole configurations side by side",
        "monitoring": "33.30 Watched in production",
    },
}

STUDIES = {stage: title for group in GROUPS.values() for stage, title in group.items()}
"""Every study's title, by stage."""

CAPTIONS = {
    "attention_variants/variants": "Time of decoding and prefill by length for each way of "
    "sharing heads, and how alike the outputs are",
    "autoscaling/day": "One day: the load, and the instances that each policy keeps ready, by the "
    "minute",
    "autoscaling/front": "Missed requests against cost for every setting, and each policy's "
    "Pareto front",
    "cascade/cascade": "Accuracy against cost over the threshold, and how honest the student's "
    "probabilities are",
    "cascade/pair": "The simulated pair: accuracy against US dollars under each assumption",
    "chunked_prefill/chunks": "What a chunk costs the long prompt and spares the others, by the "
    "size of the chunk and the share of long prompts",
    "continuous_batching/rates": "Throughput and latencies against the rate of arrivals, "
    "continuous and static batches, with 95 % intervals",
    "draft/draft": "Acceptance and perplexity of the draft by training step, and which blocks "
    "each measure would keep",
    "draft_models/break_even": "Best speed-up by acceptance and cost of the draft, with the "
    "measured runs as points",
    "engine_comparison/engines": "TensorRT-LLM over vLLM by batch, first tokens of a burst by "
    "length, and decoding on this machine",
    "end_to_end/radar": "Whole configurations by time to first token, speed of one client, "
    "throughput, cores in use, memory and perplexity, together and one at a time",
    "head_pruning/heads": "Importance of every head by layer, accuracy after removal, and which "
    "layers lose most",
    "kv_quantization/heads": "Errors of keys and values head by head, and the divergence that "
    "each INT8 cache causes",
    "magnitude_pruning/pruning": "Accuracy, bytes by format and latency by kernel against the "
    "share of weights that are zero",
    "memory_efficient/features": "Peak memory, decoding speed and perplexity with each feature, "
    "and the largest batch on a GPU",
    "monitoring/timeline": "Latency, queue, tokens, use, errors, cost and alerts by second, from "
    "normal load through overload, errors and an outage to recovery",
    "operator_fusion/fusion": "Time, memory and kernels of fused and separate operators",
    "scheduling/policies": "Latency and fairness of each policy against load",
    "simulator_validation/errors": "Simulated over measured figures for each configuration, with "
    "the engine's own spread",
    "sliding_window/windows": "Perplexity by window, divergence along the text, and cache bytes "
    "against divergence",
    "speculative_sampling/sampling": "Speed-up against draft length, where speculation pays, and "
    "the p-values of both rules",
    "step_cost/steps": "Predicted against measured time of every step of the engine",
    "token_eviction/eviction": "Perplexity and accuracy by cache budget for each rule, and which "
    "tokens the heads hold in the end",
    "channel_scales/prediction": "Ratio of the errors of one scale a tensor and one a channel: "
    "predicted from the scales against measured, a point a layer",
    "channel_scales/scales": "One layer's channels, their scales and errors; and how far scales "
    "spread in every layer",
    "cost_report/daily_cost": "US dollars a day against requests a day, machines in stairs and "
    "APIs as straight lines",
    "cost_report/per_million_tokens": "US dollars per million input and output tokens, machines "
    "and APIs",
    "distill/temperatures": "Accuracy against temperature, and what each arm gains over labels "
    "alone",
    "data_distillation/amounts": "Answer perplexity and four-way accuracy against the number of "
    "training pairs",
    "flash_attention/flash": "Peak memory and time of attention against length, and time over "
    "tile sizes",
    "format_comparison/pareto": "Perplexity over the 16-bit model's against bytes, with intervals "
    "and the front",
    "gptq_layer/columns": "Output error as columns are quantized: the running sum, and each "
    "column's share",
    "kv_memory/memory": "Bytes of KV caches by model, batch and length, and what fits on a GPU",
    "outliers/curve": "Predicted and measured rise of the loss against size, by rule",
    "outliers/layers": "Signs of outliers and the cost of INT8 by block, a line a kind of layer",
    "outliers/smoothing": "Three figures of each layer before and after smoothing; below the line "
    "is better",
    "quantization_basics/histogram": "Histograms of rounding errors in INT8 and INT4, beside the "
    "density that theory expects",
    "quantize_sweep/bits": "Perplexity over the 16-bit model's against bits a weight, by method",
    "semi_structured/errors": "Output error of each group of layers, by pattern and score",
    "serve_benchmark/concurrency": "Throughput and latency against the number of clients, by "
    "variant, with the band over rounds",
    "serve_benchmark/input_tokens": "Throughput and latency against the length of the prompt, by "
    "variant",
    "serve_benchmark/output_tokens": "Throughput and latency against the length of the answer, by "
    "variant",
}
"""What a picture shows, by `<stage>/<name>`: its caption, and its text for those who do not see."""


def caption(stage: str, name: str) -> str:
    """The caption of a picture; one that nobody has described says which study it belongs to."""
    plain = name.replace("_", " ")
    return CAPTIONS.get(f"{stage}/{name}", f"{plain.capitalize()}, of the study “{STUDIES[stage]}”")
