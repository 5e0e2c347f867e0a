"""Rules that SECURITY.md leans on and no linter knows: constant-time comparisons, no check by assertion."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from repository import Source, shipped

PROOFS = frozenset({"mac", "proof", "shown", "presented", "key", "nonce", "digest", "admin", "payload", "token"})
"""Last words of names that hold, where a stranger is judged, what he must know."""

JUDGES = (
    "flare_transport/handshake.py",
    "flare_transport/second_link.py",
    "flare_transport/record_listener.py",
    "flare_cli/server/keys.py",
)
"""Modules that compare what somebody shows with a secret."""

WITHOUT_ASSERTIONS = (
    "flare_transport/",
    "flare_cli/server/",
    "flare_cli/text/",
    "flare_cache/record",
    "flare_core/keys",
)
"""Where input is checked: nothing of it may vanish under ``python -O``."""


def last_word(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.rsplit("_", 1)[-1]
        case ast.Call(func=func):
            return last_word(func)
        case ast.Subscript(value=value):
            return last_word(value)
    return ""


def comparisons_in_variable_time(source: Source) -> Iterator[str]:
    """``==`` and ``!=`` on what could be a proof; ``in`` on a collection of such compares too, and is as telling."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Compare):
            continue
        if not any(isinstance(operator, ast.Eq | ast.NotEq) for operator in node.ops):
            continue
        for operand in (node.left, *node.comparators):
            if last_word(operand) in PROOFS:
                yield f"{source.at(node)} compares {ast.unparse(operand)} by =="


def assertions(source: Source) -> Iterator[str]:
    yield from (source.at(node) for node in ast.walk(source.tree) if isinstance(node, ast.Assert))


def test_proofs_are_compared_in_constant_time() -> None:
    judges = [source for source in shipped() if source.path.endswith(JUDGES)]
    assert len(judges) == len(JUDGES)
    assert [finding for source in judges for finding in comparisons_in_variable_time(source)] == []
    assert sum("hmac.compare_digest(" in source.text for source in judges) == 3


def test_nothing_that_checks_input_vanishes_under_optimisation() -> None:
    checking = [source for source in shipped() if any(part in source.path for part in WITHOUT_ASSERTIONS)]
    assert len(checking) > 40
    assert [finding for source in checking for finding in assertions(source)] == []


@pytest.mark.parametrize(
    "text", ["ok = welcome.mac == expected", "if proof(x) != shown: pass", "if keys[0] == presented: pass"]
)
def test_the_rule_sees_a_comparison_in_variable_time(text: str) -> None:
    assert list(comparisons_in_variable_time(Source("made-up.py", text, ast.parse(text))))
