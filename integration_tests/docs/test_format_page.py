"""The tables of columns in `docs/format.md` are those of the schema that writer, reader and check follow."""

from __future__ import annotations

from pathlib import Path

from dcp_manifest.index import schema

PAGE = Path(__file__).parents[2] / "docs/format.md"
TABLES = {
    "tables and tensors": (*schema.TABLES, *schema.TENSORS, *schema.OBJECTS, *schema.ALIASES, *schema.COMPUTED),
    "items": schema.ITEMS,
    "blocks": schema.BLOCKS,
    "paths": schema.PATHS,
}


def row(column: schema.Column) -> str:
    name = f"`{column.name}.text`, `{column.name}.bytes`" if column.dtype is str else f"`{column.name}`"
    return f"| {name} | {column.table} | {column.meaning} |"


def test_format_page_lists_every_column_as_the_schema_has_it():
    written = [line for line in PAGE.read_text().splitlines() if line.startswith("| `") and line.count(" | ") == 2]
    assert sorted(written) == sorted(row(column) for columns in TABLES.values() for column in columns)


def test_format_page_names_the_columns_that_are_always_stored_in_full():
    full = [
        column.name
        for column in schema.COLUMNS.values()
        if column.dtype is not str and not (column.is_narrowed and column.is_collapsed)
    ]
    text = " ".join(PAGE.read_text().split())
    assert f"The columns {', '.join(f'`{name}`' for name in full)}, `*.text` and `block_crcs` are always stored" in text
