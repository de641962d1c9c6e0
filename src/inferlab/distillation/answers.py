"""A language model whose last blocks learn to answer questions, and how well it then answers.

The blocks below the trained ones run once for each text: what they give is kept, and every training
run and score starts from there.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inferlab.data.tables import Row
from inferlab.data.trivia import normalised
from inferlab.distillation.generation import question_prompt
from inferlab.distillation.training import TrainingParams, device, minimise
from inferlab.errors import InferlabError

BATCH = 32


@dataclass(frozen=True)
class Texts:
    """Questions with answers. tokens: [rows, length], padded on the right; states likewise.

    `starts` and `ends` [rows] bound the answer's tokens; the newline that closes it stands at
    `ends`. states: bf16 [rows, length, hidden], below the first trained block.
    """

    tokens: Tensor
    starts: Tensor
    ends: Tensor
    states: Tensor

    def take(self, rows: Sequence[int]) -> "Texts":
        """Some of the texts, by their numbers."""
        chosen = torch.tensor(rows)
        parts = (self.tokens, self.starts, self.ends, self.states)
        return Texts(*(part[chosen] for part in parts))


class Learner:
    """A causal model with its last `trained` blocks and final norm in fp32, free to change."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, trained: int
    ) -> None:
        """Raises InferlabError for another architecture, or when no block is left below."""
        blocks = getattr(model.base_model, "layers", None)
        if blocks is None or not hasattr(model.base_model, "norm"):
            raise InferlabError(
                f"{type(model).__name__} keeps its blocks elsewhere; the study takes models of the "
                "Llama family (Llama, Mistral, Qwen, SmolLM)"
            )
        if not 0 < trained < len(blocks):
            raise InferlabError(
                f"data_distillation.trained_blocks must be from 1 to {len(blocks) - 1} for this "
                f"model; got {trained} (params.yaml: data_distillation.trained_blocks)"
            )
        self._model, self._tokenizer = model.requires_grad_(False).to(device()), tokenizer
        self._blocks, self._norm = blocks, model.base_model.norm
        self._lower = nn.ModuleList(blocks[:-trained])
        self._upper = nn.ModuleList(blocks[-trained:])
        self._trained = nn.ModuleList([*self._upper, self._norm]).float().requires_grad_(True)
        self._start = {name: value.clone() for name, value in self._trained.state_dict().items()}

    def encode(self, rows: Sequence[Row]) -> Texts:
        """The texts of `question` and `answer` of each row, with their states."""
        prompts = [self._ids(question_prompt(row["question"])) for row in rows]
        answers = [self._ids(f" {row['answer']}") for row in rows]
        newline = self._ids("\n")[:1]
        whole = [p + a + newline for p, a in zip(prompts, answers, strict=True)]
        tokens = torch.zeros(len(whole), max(map(len, whole)), dtype=torch.long)
        for row, ids in enumerate(whole):
            tokens[row, : len(ids)] = torch.tensor(ids)
        starts = torch.tensor([len(ids) for ids in prompts])
        ends = starts + torch.tensor([len(ids) for ids in answers])
        states = torch.zeros(*tokens.shape, self._model.config.hidden_size, dtype=torch.bfloat16)
        for part, length in _by_length(ends):
            with torch.inference_mode():
                inputs = tokens[part, :length].to(device())
                found = self._run(self._lower, nn.Identity(), input_ids=inputs)
            states[part, :length] = found.bfloat16().cpu()
        return Texts(tokens, starts, ends, states)

    def train(self, texts: Texts, settings: TrainingParams, seed: int) -> None:
        """Forget what was learnt before, and learn the answers of `texts`, closing newlines too."""
        self.reset()

        def loss(rows: Tensor) -> Tensor:
            logits, targets, _ = self._answers(texts, rows, texts.ends[rows] + 1)
            return F.cross_entropy(logits, targets)

        minimise(self._trained, loss, len(texts.tokens), settings, seed)

    def reset(self) -> None:
        """Back to the weights that the model came with."""
        self._trained.load_state_dict(self._start)

    @torch.no_grad()
    def nats(self, texts: Texts) -> Tensor:
        """−log p of each answer, without its newline: fp64 [rows]."""
        found = torch.zeros(len(texts.tokens), dtype=torch.float64)
        for part, _ in _by_length(texts.ends):
            with torch.autocast(device().type, dtype=torch.bfloat16):
                logits, targets, owners = self._answers(texts, part, texts.ends[part])
            losses = F.cross_entropy(logits, targets, reduction="none").double().cpu()
            found.index_add_(0, part[owners], losses)
        return found

    @torch.no_grad()
    def answer(self, questions: Sequence[str], new_tokens: int) -> list[str]:
        """What greedy decoding says, for each question: the first line that is not empty."""
        self._restore()
        self._tokenizer.padding_side = "left"
        self._tokenizer.pad_token = self._tokenizer.pad_token or self._tokenizer.eos_token
        prompts = [question_prompt(question) for question in questions]
        batch = self._tokenizer(prompts, return_tensors="pt", padding=True).to(device())
        with torch.autocast(device().type, dtype=torch.bfloat16):
            output = self._model.generate(
                **batch, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
            )
        new = output[:, batch["input_ids"].shape[1] :]
        texts = self._tokenizer.batch_decode(new, skip_special_tokens=True)
        return [text.strip().split("\n")[0].strip() for text in texts]

    def _answers(self, texts: Texts, rows: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits fp32 [answer tokens, vocabulary], targets and places in `rows` [answer tokens]."""
        length = int(ends.max())
        inputs = texts.states[rows, :length].float().to(device())
        states = self._run(self._upper, self._norm, inputs_embeds=inputs)
        places = torch.arange(length)
        inside = (places >= texts.starts[rows, None]) & (places < ends[:, None])
        owners, columns = inside.nonzero(as_tuple=True)
        logits = self._model.get_output_embeddings()(states[owners, columns - 1])
        return logits.float(), texts.tokens[rows][owners, columns].to(device()), owners

    def _run(self, blocks: nn.ModuleList, norm: nn.Module, **inputs: Tensor) -> Tensor:
        """The model's body with these blocks only; right padding is never looked at."""
        body = self._model.base_model
        body.layers, body.norm = blocks, norm
        return body(**inputs, use_cache=False)[0]

    def _restore(self) -> None:
        self._model.base_model.layers, self._model.base_model.norm = self._blocks, self._norm

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def exact_match(said: str, answer: str) -> float:
    """1 when both are the same but for case, punctuation, articles and spelt numbers."""
    return float(normalised(said) == normalised(answer))


def token_f1(said: str, answer: str) -> float:
    """F1 of the words in common, counted (Rajpurkar et al. 2016, SQuAD)."""
    own, right = normalised(said).split(), normalised(answer).split()
    common = sum((Counter(own) & Counter(right)).values())
    return 2 * common / (len(own) + len(right)) if common else 0.0


def _by_length(ends: Tensor) -> list[tuple[Tensor, int]]:
    """Rows of like length together: their numbers, and the longest one's tokens."""
    return [(part, int(ends[part].max()) + 1) for part in ends.argsort().split(BATCH)]
