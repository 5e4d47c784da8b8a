"""Tables for a terminal and for a log."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def table_of(rows: list[dict[str, Any]], title: str) -> Table:
    """Returns a table with a column for every key of the rows."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=title, title_justify="left")
    for column in columns:
        is_text = any(isinstance(row.get(column), str) for row in rows)
        table.add_column(column, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    return table


def _cell(value: Any) -> str:
    """Returns a value as text: four significant digits, and commas between thousands."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
