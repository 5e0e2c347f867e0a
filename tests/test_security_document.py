"""SECURITY.md: every line names tests that show it, and they exist."""

from __future__ import annotations

import ast
import re

import pytest
from repository import ROOT

TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
REFERENCE = re.compile(r"`([\w./-]+\.py)::(\w+)`")
PACKAGES = ("core", "transport", "cache", "spec", "cli")


def path_of(written: str) -> str:
    """The path from the repository's root; those of a package leave its directory's first part out."""
    return f"packages/flare-{written}" if written.split("/")[0] in PACKAGES else written


def lines_of_sections() -> list[tuple[str, str]]:
    """Each promise and non-promise: the heading that it stands under, and its text with its references."""
    found = []
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        if heading.startswith(("What holds", "What is not promised")):
            found += [(heading, item) for item in re.split(r"^- ", body, flags=re.MULTILINE)[1:]]
    return found


LINES = lines_of_sections()


def test_the_document_has_all_attackers_and_non_promises() -> None:
    headings = [heading for heading, _ in LINES]
    for attacker in "ABCD":
        assert sum(heading.startswith(f"What holds against {attacker}") for heading in headings) >= 4
    assert headings.count("What is not promised") >= 6


@pytest.mark.parametrize(("heading", "line"), LINES, ids=[line.split("\n")[0][:50] for _, line in LINES])
def test_every_line_names_tests_that_exist(heading: str, line: str) -> None:
    references = REFERENCE.findall(line)
    assert references, f"under '{heading}': no test shows: {line}"
    for written, name in references:
        path = ROOT / path_of(written)
        assert path.is_file(), f"{written} does not exist"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tests = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in tests, f"{written} has no {name}"
        assert name.startswith("test_")


def test_every_reference_stands_in_a_line() -> None:
    assert len(REFERENCE.findall(TEXT)) == sum(len(REFERENCE.findall(line)) for _, line in LINES)
