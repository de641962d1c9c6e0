"""`inferlab generate`: streamed text, its speed, rounded weights, and faults in one line."""

import re
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_models import make_model, quantized, random_tokens
from test_cli import run as run_command
from transformers import AutoModelForCausalLM, AutoTokenizer

from inferlab import cli
from inferlab.errors import InferlabError
from inferlab.models.runtime import text
from inferlab.models.runtime.decoding import Sampling, generate
from inferlab.models.runtime.linear import Dense, Int4, Int8
from inferlab.models.runtime.loading import load_llama
from inferlab.models.runtime.rounding import rounded
from inferlab.models.runtime.text import Timing, open_tokenizer, prompt_tokens, stream, token_bytes
from inferlab.profiling import bandwidth

PROMPT = "The river rises in the hills"
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(autouse=True)
def small_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth is read off a small block, which is fast and wrong."""
    monkeypatch.setattr(bandwidth.read_bandwidth, "__defaults__", (2**20,))


def run(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[str, str]:
    """Standard output and standard error of a command that succeeds."""
    monkeypatch.setattr(sys, "argv", ["inferlab", "generate", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    captured = capsys.readouterr()
    return captured.out, captured.err


def continued(folder: Path, text: str, count: int) -> str:
    """What transformers goes on with, greedily, in bf16."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    prompt = tokenizer(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        whole = model.generate(prompt, max_new_tokens=count, do_sample=False)
    return tokenizer.decode(whole[0, prompt.shape[1] :], skip_special_tokens=True)


def test_greedy_text_is_that_of_transformers(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, speed = run([str(tiny_llama), PROMPT, "--max-tokens", "8"], monkeypatch, capsys)
    assert output.rstrip("\n") == continued(tiny_llama, PROMPT, 8).rstrip("\n�")
    pattern = (
        r"prompt: 6 tokens, [\d,]+ tokens/s; new: 8 tokens, [\d,.]+ tokens/s, each reading \d+ MB: "
        r"[\d.]+ of [\d.,]+ GB/s, \d+ % of the memory bandwidth\n"
    )
    count = len(AutoTokenizer.from_pretrained(tiny_llama)(PROMPT).input_ids)
    assert re.fullmatch(pattern.replace("6 tokens", f"{count} tokens", 1), speed)


def test_the_prompt_may_come_through_a_pipe(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given, _ = run([str(tiny_llama), PROMPT, "--max-tokens", "5"], monkeypatch, capsys)
    monkeypatch.setattr(sys, "stdin", StringIO(PROMPT))
    piped, _ = run([str(tiny_llama), "--max-tokens", "5"], monkeypatch, capsys)
    assert piped == given


def test_draws_repeat_by_seed(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tiny_llama), PROMPT, "--max-tokens", "12", "--temperature", "1.5", "--seed"]
    first, again, other = (
        run([*arguments, seed], monkeypatch, capsys)[0] for seed in ("1", "1", "2")
    )
    assert first == again != other


@pytest.mark.parametrize(
    "options",
    [
        ["--weights", "int8"],
        ["--weights", "int4"],
        ["--cache", "int8"],
        ["--window", "8", "--anchors", "2", "--threads", "1"],
    ],
)
def test_every_option_decodes(
    options: list[str],
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output, speed = run(
        [str(tiny_llama), PROMPT, "--max-tokens", "4", *options], monkeypatch, capsys
    )
    assert output.endswith("\n") and "new: 4 tokens" in speed


def test_one_token_has_no_rate_of_decoding(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, speed = run([str(tiny_llama), PROMPT, "--max-tokens", "1"], monkeypatch, capsys)
    assert speed.endswith("; new: 1 token\n")


def test_pieces_join_to_the_text(tiny_llama: Path) -> None:
    tokenizer = open_tokenizer(tiny_llama)
    model = load_llama(tiny_llama)
    prompt = prompt_tokens(tokenizer, PROMPT, chat=False)
    timing = Timing(len(prompt))
    cache = model.new_cache(1, len(prompt) + 40)
    sampling = Sampling(1.0, seed=3)
    pieces = list(stream(model, tokenizer, prompt, 40, sampling, cache, timing))
    steps = list(generate(model, [prompt], 40, sampling))
    whole = tokenizer.decode([step[0] for step in steps], skip_special_tokens=True)
    assert len(pieces) > 5 and whole.startswith("".join(pieces))
    assert timing.new_tokens == len(steps)
    assert timing.prefill_rate > 0 and timing.decode_rate > 0


def test_bytes_wait_until_they_are_a_character(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer has no token for ß or the euro sign: two and three bytes, one token each."""
    tokenizer, model = open_tokenizer(tiny_llama), load_llama(tiny_llama)
    tokens = tokenizer("Maß 5 €", add_special_tokens=False).input_ids
    monkeypatch.setattr(text, "generate", lambda *_: ([token] for token in tokens))
    timing = Timing(1)
    pieces = list(stream(model, tokenizer, [5], 20, Sampling(), model.new_cache(1, 2), timing))
    assert "".join(pieces) == "Maß 5 €" and not any("�" in piece for piece in pieces)
    assert len(pieces) < timing.new_tokens == len(tokens)


def test_chat_puts_the_text_into_the_template(tiny_llama: Path) -> None:
    tokenizer = open_tokenizer(tiny_llama)
    with pytest.raises(InferlabError, match="has no chat template; leave --chat out"):
        prompt_tokens(tokenizer, PROMPT, chat=True)
    tokenizer.chat_template = TEMPLATE
    tokens = prompt_tokens(tokenizer, f" {PROMPT}\n", chat=True)
    assert tokenizer.decode(tokens) == f"[user]{PROMPT}[assistant]"


@pytest.mark.parametrize(("weights", "kind"), [("int8", Int8), ("int4", Int4)])
def test_rounded_weights_are_within_half_a_step(weights: str, kind: type, tmp_path: Path) -> None:
    """INT8: 1/254 of a row's largest; INT4: a thirtieth of its group's range. The head is INT8."""
    model = load_llama(make_model(tmp_path / "model", attention_bias=True), "fp32")
    found = rounded(model, weights)
    for given, layer in zip(model.layers, found.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            pairs = zip(getattr(given, name).parts, getattr(layer, name).parts, strict=True)
            for before, after in pairs:
                assert isinstance(after, kind) and after.bias is before.bias
                size = after.group_size if weights == "int4" else before.ins
                groups = before.weight.unflatten(1, (-1, size))
                low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
                step = (high - low) / 15 if weights == "int4" else groups.abs().amax(-1) / 127
                error = (after.dense - before.weight).unflatten(1, groups.shape[1:]).abs()
                # Scales are kept in 16 bits, which moves the ends of the grid a little.
                assert (error <= 0.57 * step[..., None]).all()
    assert isinstance(found.head, Int8)
    tokens = random_tokens(1, 8)
    exact, near = (one.forward(tokens, one.new_cache(1, 8)) for one in (model, found))
    assert 0 < float((exact - near).std() / exact.std()) < (0.02 if weights == "int8" else 0.3)


def test_stored_weights_stay_and_rounded_ones_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    model = load_llama(folder, "fp32")
    assert rounded(model, "stored") is model and isinstance(model.head, Dense)
    with pytest.raises(InferlabError, match="unknown weights 'int3'; known: int4, int8, stored"):
        rounded(model, "int3")
    packed = load_llama(quantized(folder, tmp_path / "int8", "int8"), "fp32")
    with pytest.raises(InferlabError, match="stored in INT8 already, so they cannot be rounded"):
        rounded(packed, "int4")


def test_bytes_of_a_token_by_hand(tmp_path: Path) -> None:
    """Layers of 32 x (32 + 16 + 16 + 32 + 48 + 48 + 48), a head of 96 x 32, three tokens kept."""
    model = load_llama(make_model(tmp_path / "model"), "fp32")
    cache = model.new_cache(1, 9)
    model.forward(random_tokens(1, 3), cache)
    weights = 4 * (2 * 32 * (32 + 16 + 16 + 32 + 3 * 48) + 96 * 32)
    assert token_bytes(model, cache) == weights + 3 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("x --max-tokens 0", "--max-tokens must be at least 1; got 0"),
        ("x --window -1", "--window, --anchors and --threads must be at least 0"),
        ("x --anchors 4", "--anchors are part of a window; give --window as well"),
        ("x --window 4 --anchors 4", "window 4 must be larger than its anchors 4"),
        ("x --temperature -1", "temperature must be 0 or above; got -1.0"),
        ("x --top-p 0", "top_p must be above 0 and at most 1; got 0.0"),
        ("x --weights int3", "unknown weights 'int3'; known: int4, int8, stored; did you mean int"),
        ("x --cache fp8", "unknown dtype of the cache 'fp8'; known: bf16, fp32, int8"),
        ("x --chat", "the tokenizer has no chat template; leave --chat out"),
        ("x --max-tokens 600", "positions do not fit the model's context of 512"),
        ("--max-tokens 5", "the prompt is empty; give some text, or pipe it in"),
    ],
)
def test_faults_are_one_line(
    options: str,
    message: str,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO(" \n"))
    line, output = run_command(f"generate {tiny_llama} {options}", monkeypatch, capsys)
    assert isinstance(line, str) and line.startswith("inferlab: ") and message in line
    assert "\n" not in line and output == ""


def test_folders_without_a_model_or_tokenizer_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: Any
    found, _ = run_command(f"generate {tmp_path} x", monkeypatch, capsys)
    assert f"{tmp_path} is no checkpoint: it has no config.json" in found
    make_model(tmp_path / "model")
    found, _ = run_command(f"generate {tmp_path / 'model'} x", monkeypatch, capsys)
    assert "has no tokenizer that can be loaded" in found and "\n" not in found
