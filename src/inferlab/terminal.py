"""Text and tables for a terminal, shown as they are."""

from rich.console import Console


def console() -> Console:
    """A console that takes names for names: no markup in brackets, no emoji between colons.

    Names come from command lines, configs and files, and may hold either.
    """
    return Console(markup=False, emoji=False, highlight=False)
