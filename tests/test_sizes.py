"""A file holds one idea and a function fits on a screen."""

from __future__ import annotations

import ast

from repository import written

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def test_no_file_is_longer_than_one_idea() -> None:
    long = {source.path: lines for source in written() if (lines := source.text.count("\n")) > MAX_FILE_LINES}
    assert not long, f"over {MAX_FILE_LINES} lines; split by idea: {long}"


def test_no_function_is_longer_than_a_screen() -> None:
    long = []
    for source in written():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{source.at(node)} {node.name}: {lines}")
    assert not long, f"over {MAX_FUNCTION_LINES} lines: {long}"
