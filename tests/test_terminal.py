"""Text from outside on a terminal, and how wide tables are."""

import pytest
from rich.console import Console

from voxfuse._terminal import TABLE_COLUMNS, plain, table_console, visible


@pytest.mark.parametrize("text", ["a\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "a\rb", "\x9b2J"])
def test_escape_sequences_are_spelt_out(text: str) -> None:
    assert visible(text).isprintable() and text[0] in (visible(text)[0], "\x1b", "\x9b")


def test_markup_and_line_breaks_stay_as_they_are() -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(plain("[red]é ×[/]\nnext [8]"))
    assert console.export_text() == "[red]é ×[/]\nnext [8]\n"


def test_tables_in_a_pipe_are_not_cut_to_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert table_console().width == TABLE_COLUMNS and table_console(200).width == 200
