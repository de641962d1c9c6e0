"""What an engine may hold and compute at once, as vLLM's arguments say it."""

from typing import Annotated

from pydantic import Field

from inferlab import params as parameters

Count = Annotated[int, Field(ge=1)]


@parameters.section
class Limits:
    """vLLM's max_num_seqs, max_num_batched_tokens, long_prefill_token_threshold and KV blocks.

    `chunk`: most tokens of one prompt in a step while others wait or run; 0 is no such limit.
    With `chunked_prefill` off a prompt is computed in one step or not yet.
    """

    max_num_seqs: Count
    token_budget: Count
    chunked_prefill: bool
    chunk: Annotated[int, Field(ge=0)]
    blocks: Count
    block_size: Count

    def __post_init__(self) -> None:
        """Raise ValueError when the limits contradict each other."""
        if self.chunk > self.token_budget:
            raise ValueError(
                f"chunk must be at most token_budget, {self.token_budget}; got {self.chunk}"
            )
        if self.token_budget < self.max_num_seqs:
            raise ValueError(
                f"token_budget must be at least max_num_seqs, {self.max_num_seqs}, a token for "
                f"each sequence; got {self.token_budget}"
            )
        if self.chunk and not self.chunked_prefill:
            raise ValueError(f"chunk must be 0 without chunked_prefill; got {self.chunk}")

    def require(self, prompt: int, output: int) -> None:
        """Raise ValueError when a request of these lengths could never be served."""
        if not self.fits(prompt, output):
            raise ValueError(
                f"limits: a request of {prompt} and {output} tokens can never be served from "
                f"{self.blocks} blocks of {self.block_size}, or under a token_budget of "
                f"{self.token_budget}; raise them or shorten the lengths"
            )

    def blocks_of(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def fits(self, prompt: int, output: int) -> bool:
        """Whether a request can ever be served: its cache fits the pool, its prompt the budget.

        The last token is handed out and never cached. Without chunked prefill the whole request
        must fit the budget, since a preempted one computes its tokens again in one step.
        """
        in_pool = self.blocks_of(prompt + output - 1) <= self.blocks
        return in_pool and (self.chunked_prefill or prompt + output <= self.token_budget)
