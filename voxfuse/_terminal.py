"""Text and tables for a terminal, a pipe or a file."""

from __future__ import annotations

import unicodedata

from rich.console import Console
from rich.markup import escape

TABLE_COLUMNS = 160  # of a table that goes to a file or pipe, where no terminal says how wide it is


def table_console(columns: int = TABLE_COLUMNS) -> Console:
    """A console on stdout: as wide as the terminal, or of so many columns where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=columns)


def plain(text: str) -> str:
    """Text from outside for rich: its markup is no markup, its control characters (escape sequences) are spelt out."""
    return escape(visible(text))


def visible(text: str) -> str:
    """Text with its control characters spelt out, all but line breaks."""
    return "".join(repr(c)[1:-1] if unicodedata.category(c) == "Cc" and c != "\n" else c for c in text)
