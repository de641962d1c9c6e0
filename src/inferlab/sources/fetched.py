"""What every source hands back."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Fetched:
    """A file or folder as its source has it, and what was learnt while fetching it."""

    path: Path
    facts: dict[str, str] = field(default_factory=dict)
