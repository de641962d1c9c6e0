"""Question-answer pairs written by the model itself, through vLLM, in a process of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from inferlab.data.tables import Row
from inferlab.distillation.pairs import Filtered, filter_pairs
from inferlab.params import section
from inferlab.serving.offline import alone

FORM = (
    r"( [A-Za-z0-9']{1,14}){3,12}\?\nAnswer: [A-Z0-9][A-Za-z0-9]{0,14}( [A-Za-z0-9]{1,14}){0,3}\n"
)


@section
class GeneratorParams:
    """How pairs are generated: a start of a question for a topic, drawn for each.

    `guided` lets the engine choose only tokens that keep to the form: a model that misses it gives
    usable pairs then, and a better one is cut short by it.
    """

    examples: Annotated[int, Field(ge=1)]
    guided: bool
    topics: Annotated[tuple[str, ...], Field(min_length=1)]
    starts: Annotated[tuple[str, ...], Field(min_length=1)]
    temperature: Annotated[float, Field(ge=0)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    max_new_tokens: Annotated[int, Field(ge=1)]
    max_model_len: Annotated[int, Field(ge=2)]
    max_num_seqs: Annotated[int, Field(ge=1)]
    kv_cache_gib: Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class Request:
    """What the child is told: how many to generate, what it may show, what it must not give."""

    model: Path
    generated: int
    asked: int
    shown: list[Row]
    test: list[Row]
    params: GeneratorParams
    seed: int


@dataclass(frozen=True)
class Generated:
    """Filtered pairs, and what the generator says when asked the first kept and human questions."""

    filtered: Filtered
    own_answers: list[str]
    human_answers: list[str]


def generate(request: Request) -> Generated:
    """Generate, filter and ask. Raises InferlabError when nothing is usable or the child dies."""
    told = (
        "the process that generates pairs died; lower data_distillation.generator's kv_cache_gib "
        "or max_num_seqs if memory ran out"
    )
    return alone(_session, request, told=told)


def generation_prompts(request: Request) -> tuple[list[str], list[str]]:
    """Prompts, and the start of a question that each ends with.

    Examples are human pairs of the training side: plain completion keeps to their form where the
    chat template of a small model does not.
    """
    random = np.random.default_rng(request.seed)
    prompts, starts = [], []
    for number in range(request.generated):
        topic = request.params.topics[number % len(request.params.topics)]
        start = str(random.choice(request.params.starts))
        examples = shown_examples(request, random)
        prompts.append(f"{examples}Topic: {topic}\nQuestion: {start}")
        starts.append(start)
    return prompts, starts


def asking_prompts(request: Request, questions: Sequence[str]) -> list[str]:
    """Prompts that ask the generator questions in the form that it wrote them, examples first."""
    random = np.random.default_rng(request.seed)
    return [shown_examples(request, random, one) + question_prompt(one) for one in questions]


def shown_examples(request: Request, random: np.random.Generator, but: str = "") -> str:
    """Human pairs of the training side, none of them the question `but`."""
    pairs = [row for row in request.shown if row["question"] != but]
    count = min(request.params.examples, len(pairs))
    chosen = [pairs[place] for place in random.choice(len(pairs), size=count, replace=False)]
    return "".join(f"{question_prompt(row['question'])} {row['answer']}\n\n" for row in chosen)


def question_prompt(question: str) -> str:
    """How a question is put, to the generator and to the models that are trained."""
    return f"Question: {question}\nAnswer:"


def _session(request: Request) -> Generated:
    """In the child: one engine writes pairs and answers questions."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = request.params
    engine = LLM(
        str(request.model),
        seed=request.seed,
        enforce_eager=True,
        max_model_len=params.max_model_len,
        max_num_seqs=params.max_num_seqs,
        kv_cache_memory_bytes=int(params.kv_cache_gib * 2**30),
    )
    # Seeds of single requests crash this engine's CPU build when a prompt is cut into chunks.
    writing = SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        max_tokens=params.max_new_tokens,
        stop=["\n\n", "\nQuestion", "\nTopic"],
        structured_outputs=StructuredOutputsParams(regex=FORM) if params.guided else None,
    )
    prompts, starts = generation_prompts(request)
    rest = _texts(engine, prompts, writing)
    texts = [start + text for start, text in zip(starts, rest, strict=True)]
    filtered = filter_pairs(texts, request.shown, request.test)
    asked = [filtered.kept[: request.asked], request.shown[: request.asked]]
    questions = [row["question"] for rows in asked for row in rows]
    greedy = SamplingParams(temperature=0, max_tokens=params.max_new_tokens, stop=["\n"])
    answers = _texts(engine, asking_prompts(request, questions), greedy)
    return Generated(filtered, answers[: len(asked[0])], answers[len(asked[0]) :])


def _texts(engine: Any, prompts: Sequence[str], sampling: Any) -> list[str]:
    outputs = engine.generate(list(prompts), sampling, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]
