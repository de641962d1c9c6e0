"""Prompts of several kinds, since what a drafter is worth depends on what is asked."""

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from inferlab.errors import InferlabError

ASKED = {
    "summary": "Summarize this text in three sentences.\n\n{text}",
    "repeat": "Repeat this text word for word.\n\n{text}",
}
KINDS = ("free", *ASKED, "code")
CODE = (
    '''def read_table(path, separator=","):
    """Read a table into a list of dictionaries, one for each line."""
    rows = []
    with open(path) as file:
        names = file.readline().strip().split(separator)
        for line in file:
            values = line.strip().split(separator)
            rows.append(dict(zip(names, values)))
    return rows


def write_table(path, rows, separator=","):
    """Write a list of dictionaries as a table."""
''',
    '''class Queue:
    """First in, first out."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty queue")
        return self.items.pop(0)


class Stack:
    """Last in, first out."""

    def __init__(self):
''',
)


def make_prompts(
    tokenizer: PreTrainedTokenizerBase, windows: Tensor, count: int, length: int
) -> list[tuple[str, list[int]]]:
    """`count` prompts of each kind: (kind, token ids).

    `windows` [windows, tokens] is held-out text, of which each prompt takes `length` tokens of a
    window of its own: to go on from (free), to summarize and to repeat, asked for in the chat
    template where the tokenizer has one. Code is to be gone on from. Raises InferlabError when
    there are too few windows, or too short ones.
    """
    if len(windows) < count or windows.shape[1] < length:
        raise InferlabError(
            f"draft_models wants {count} held-out windows of at least {length} tokens; found "
            f"{len(windows)} of {windows.shape[1]} (params.yaml: draft_models.prompts)"
        )
    passages = windows[:count, :length].tolist()
    prompts = [("free", passage) for passage in passages]
    for kind, wish in ASKED.items():
        texts = [wish.format(text=tokenizer.decode(passage)) for passage in passages]
        prompts += [(kind, _asked(tokenizer, text)) for text in texts]
    code = [tokenizer(CODE[number % len(CODE)])["input_ids"] for number in range(count)]
    return prompts + [("code", ids) for ids in code]


def _asked(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    if not tokenizer.chat_template:
        return list(tokenizer(text + "\n\n")["input_ids"])
    message = [{"role": "user", "content": text}]
    filled = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(filled, add_special_tokens=False)["input_ids"])
