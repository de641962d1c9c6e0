"""BERT as a text classifier, in plain torch: open enough to prune, to shrink and to train.

Reads and writes the checkpoints of transformers' `BertForSequenceClassification`.
Source: Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inferlab.errors import InferlabError
from inferlab.models.wide import widen
from inferlab.store import Checkpoint, open_checkpoint, save_checkpoint

EPSILON = 1e-12
OUTER_NAMES = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "pooler": "pooler.dense",
}
LAYER_NAMES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "output_norm": "output.LayerNorm",
}
"""Our modules by the names that transformers gives them, below `bert.` and a layer's prefix."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a classifier."""

    vocabulary: int
    positions: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    labels: int


class Layer(nn.Module):
    """Self-attention and feed-forward, each followed by its sum with the input and a norm."""

    def __init__(self, hidden: int, heads: int, head_dim: int, intermediate: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, heads * head_dim)
        self.key = nn.Linear(hidden, heads * head_dim)
        self.value = nn.Linear(hidden, heads * head_dim)
        self.output = nn.Linear(heads * head_dim, hidden)
        self.attention_norm = nn.LayerNorm(hidden, EPSILON)
        self.up = nn.Linear(hidden, intermediate)
        self.down = nn.Linear(intermediate, hidden)
        self.output_norm = nn.LayerNorm(hidden, EPSILON)

    def forward(self, states: Tensor, blocked: Tensor, head_mask: Tensor | None = None) -> Tensor:
        """states: [documents, tokens, hidden]; blocked: 0 or −inf, [documents, 1, 1, tokens].

        head_mask [heads] scales what each head gives; a gradient at ones tells a head's weight.
        """
        mixed = self._attend(states, blocked)
        if head_mask is not None:
            mixed = mixed * head_mask.to(mixed.dtype)[:, None]
        states = self.attention_norm(states + self.output(mixed.flatten(2)))
        return self.output_norm(states + self.down(F.gelu(self.up(states))))

    def _attend(self, states: Tensor, blocked: Tensor) -> Tensor:
        """[documents, tokens, heads, head_dim]"""
        query, key, value = (
            layer(states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
        return ((scores + blocked.to(scores.dtype)).softmax(-1) @ value).transpose(1, 2)


class TextClassifier(nn.Module):
    """Embeddings, layers, the pooled first token, and one logit a label."""

    def __init__(self, shape: Shape, pad: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.pad = pad
        self.words = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.positions, shape.hidden)
        self.types = nn.Embedding(2, shape.hidden)
        self.embedding_norm = nn.LayerNorm(shape.hidden, EPSILON)
        head_dim = shape.hidden // shape.heads
        self.layers = nn.ModuleList(
            Layer(shape.hidden, shape.heads, head_dim, shape.intermediate)
            for _ in range(shape.layers)
        )
        self.pooler = nn.Linear(shape.hidden, shape.hidden)
        self.classifier = nn.Linear(shape.hidden, shape.labels)
        widen(self)

    def forward(self, tokens: Tensor, head_masks: Sequence[Tensor] | None = None) -> Tensor:
        """Logits fp32 [documents, labels] of tokens [documents, tokens]."""
        return self.head(self.run(self.embed(tokens), self.blocked(tokens), head_masks=head_masks))

    def embeddings(self) -> tuple[nn.Module, ...]:
        """The modules below the first layer."""
        return self.words, self.positions, self.types, self.embedding_norm

    def embed(self, tokens: Tensor) -> Tensor:
        """[documents, tokens, hidden]"""
        fixed = self.positions.weight[: tokens.shape[1]] + self.types.weight[0]
        return self.embedding_norm(self.words(tokens) + fixed)

    def blocked(self, tokens: Tensor) -> Tensor:
        """0 where a token may be looked at, −inf where it is padding: [documents, 1, 1, tokens]."""
        zeros = torch.zeros(tokens.shape, device=tokens.device)
        return zeros.masked_fill(tokens == self.pad, float("-inf"))[:, None, None]

    def run(
        self,
        states: Tensor,
        blocked: Tensor,
        first: int = 0,
        stop: int | None = None,
        head_masks: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """The states after the layers from `first` to before `stop` (none: all that follow)."""
        for number, layer in enumerate(self.layers[first:stop], start=first):
            states = layer(states, blocked, head_masks[number] if head_masks else None)
        return states

    def head(self, states: Tensor) -> Tensor:
        """Logits fp32 [documents, labels] of the last layer's states."""
        return self.classifier(torch.tanh(self.pooler(states[:, 0]))).float()


def new_classifier(encoder: Path, labels: int, seed: int) -> TextClassifier:
    """A pre-trained encoder with a fresh head; the pooler is kept when the checkpoint has one."""
    checkpoint = open_checkpoint(encoder)
    torch.manual_seed(seed)
    model = TextClassifier(shape_of(checkpoint, labels), checkpoint.config.get("pad_token_id", 0))
    _load(model, checkpoint, optional=("pooler", "classifier"))
    return model


def load_classifier(folder: Path) -> tuple[TextClassifier, tuple[str, ...]]:
    """A fine-tuned classifier and the names of its labels, in the order of its logits."""
    checkpoint = open_checkpoint(folder)
    names = checkpoint.config.get("id2label", {})
    if not names:
        raise InferlabError(f"{folder}/config.json has no id2label: it is no classifier")
    model = TextClassifier(
        shape_of(checkpoint, len(names)), checkpoint.config.get("pad_token_id", 0)
    )
    _load(model, checkpoint)
    return model.eval(), tuple(names[str(number)] for number in range(len(names)))


def save_classifier(
    folder: Path, model: TextClassifier, labels: Sequence[str], aside_from: Path
) -> None:
    """Write a checkpoint that transformers loads; the tokenizer comes from `aside_from`."""
    shape = model.shape
    config = {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "type_vocab_size": 2,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.intermediate,
        "hidden_act": "gelu",
        "layer_norm_eps": EPSILON,
        "pad_token_id": model.pad,
        "id2label": {str(number): name for number, name in enumerate(labels)},
        "label2id": {name: number for number, name in enumerate(labels)},
    }
    state = model.state_dict()
    tensors = {theirs: state[ours].detach().cpu() for ours, theirs in _names(model)}
    save_checkpoint(folder, config, tensors, aside_from)


def shape_of(checkpoint: Checkpoint, labels: int) -> Shape:
    """The sizes of a BERT checkpoint. Raises InferlabError for any other architecture."""
    config = checkpoint.config
    if config.get("model_type") != "bert":
        raise InferlabError(
            f"{checkpoint.folder} is a {config.get('model_type')!r} model; the classifier takes "
            "'bert' encoders (bert-base-uncased, MiniLM, …)"
        )
    return Shape(
        vocabulary=config["vocab_size"],
        positions=config["max_position_embeddings"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        intermediate=config["intermediate_size"],
        labels=labels,
    )


def _names(model: TextClassifier) -> Iterator[tuple[str, str]]:
    """Each tensor's name here and in a checkpoint of transformers."""
    for ours in model.state_dict():
        module, _, kind = ours.rpartition(".")
        if module.startswith("layers."):
            _, number, part = module.split(".")
            yield ours, f"bert.encoder.layer.{number}.{LAYER_NAMES[part]}.{kind}"
        elif module in OUTER_NAMES:
            yield ours, f"bert.{OUTER_NAMES[module]}.{kind}"
        else:
            yield ours, ours


def _load(model: TextClassifier, checkpoint: Checkpoint, optional: Sequence[str] = ()) -> None:
    """Copy a checkpoint's tensors, whose names may lack `bert.`; `optional` modules may be absent.

    Raises InferlabError when another tensor is missing.
    """
    state = model.state_dict()
    for ours, theirs in _names(model):
        name = theirs if theirs in checkpoint else theirs.removeprefix("bert.")
        name = name if name in checkpoint else _old_norm_name(name)
        if name in checkpoint:
            state[ours].copy_(checkpoint.tensor(name))
        elif ours.split(".")[0] not in optional:
            raise InferlabError(f"{checkpoint.folder} holds no tensor {theirs!r}")


def _old_norm_name(name: str) -> str:
    """bert-base-uncased still calls a norm's weight and bias gamma and beta."""
    if "LayerNorm" not in name:
        return name
    return name.replace(".weight", ".gamma").replace(".bias", ".beta")
