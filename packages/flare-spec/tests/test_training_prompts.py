"""Prompts, the order of training and the comparison of drafters: what needs no model."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest

from flare_core.errors import UsageError
from flare_spec.training.batches import batches_from
from flare_spec.training.comparison import gain, summarise
from flare_spec.training.passages import Passages, collect_passages, cut_prose
from flare_spec.training.prompts import make_prompts

LETTERS = [a + b for a in "ABCDEFGHIJ" for b in "klmnopqrst"]
PASSAGES = Passages(
    prose=tuple(f"Passage {name} says that {name} is what it is about. And then some." for name in LETTERS),
    code=tuple(f"def function_{name}(x):\n    y = {{x: 1}}\n    return y" for name in LETTERS),
    words=tuple(f"word{name}" for name in LETTERS),
)


def test_held_out_prompts_share_no_passage_with_training() -> None:
    made = make_prompts(PASSAGES, num_training=2000, num_held_out=50, seed=3)
    assert (len(made.training), len(made.held_out)) == (2000, 50)
    assert len({*made.training, *made.held_out}) == 2050
    held = {name for name in LETTERS for text in made.held_out if f" {name} " in text or f"_{name}(" in text}
    assert held
    assert not [text for text in made.training for name in held if f"says that {name} " in text]


def test_the_same_seed_gives_the_same_prompts_and_more_of_them_begin_alike() -> None:
    few = make_prompts(PASSAGES, num_training=50, num_held_out=10, seed=3)
    more = make_prompts(PASSAGES, num_training=80, num_held_out=10, seed=3)
    assert more.held_out == few.held_out
    assert more.training[:50] == few.training


def test_too_few_texts_are_said_to_be_too_few() -> None:
    with pytest.raises(UsageError, match="too few"):
        make_prompts(Passages((), (), ()), num_training=1, num_held_out=0, seed=0)


def test_passages_are_prose_and_functions_each_once(tmp_path: Path) -> None:
    prose = (
        "This is a paragraph with enough words in it to be taken as prose, and it goes on for a little while longer."
    )
    prose += " It ends here."
    function = (
        "def add(first, second):\n    total = first + second\n    for _ in range(3):\n        pass\n    return total\n"
    )
    (tmp_path / "one.md").write_text(f"# Title\n\n{prose}\n\n| a | b |\n")
    (tmp_path / "two.txt").write_text(prose)
    (tmp_path / "code.py").write_text(
        f"class A:\n{function.replace('def', '    def').replace(chr(10) + '  ', chr(10) + '      ')}"
    )
    (tmp_path / "broken.py").write_text("def (")
    found = collect_passages([tmp_path], include_packages=False, seed=0)
    assert found.prose == (prose,)
    assert found.code == (function.rstrip("\n"),)
    assert "paragraph" in found.words


def test_long_prose_is_cut_at_a_sentence() -> None:
    (cut,) = cut_prose("A sentence of some words that is long enough to be kept. " * 20)
    assert cut.endswith("kept.")
    assert len(cut) <= 420


def test_every_epoch_has_every_conversation_and_a_run_can_go_on_anywhere() -> None:
    lengths = [index % 7 for index in range(20)]
    steps = list(itertools.islice(batches_from(lengths, batch_size=5, seed=1, step=0), 9))
    assert sorted(itertools.chain.from_iterable(steps[:4])) == list(range(20))
    assert steps[:4] != steps[4:8]
    assert list(itertools.islice(batches_from(lengths, batch_size=5, seed=1, step=6), 3)) == steps[6:]
    assert next(batches_from([3, 4], batch_size=5, seed=0, step=0)) in ([0, 1], [1, 0])


@dataclass(frozen=True)
class Given:
    num_rounds: int
    length: float
    reached: tuple[float, ...]
    accepted: tuple[float, ...]


def test_a_steady_gain_is_certain_and_no_gain_is_not() -> None:
    base = [Given(10, 2.0 + (each % 5) / 10, (10, 8), (8, 4)) for each in range(40)]
    better = [Given(10, one.length * 1.1, (10, 8), (9, 5)) for one in base]
    steady = gain(better, base)
    assert (steady.value, steady.low, steady.high) == pytest.approx((0.1, 0.1, 0.1))
    mixed = gain([Given(10, one.length + (-1) ** at * 0.3, (10,), (8,)) for at, one in enumerate(base)], base)
    assert mixed.low < 0 < mixed.high
    summary = summarise(base)
    assert summary.conditional == pytest.approx((0.8, 0.5))
    assert summary.survival == pytest.approx((0.8, 0.4))
    assert summary.length.value == pytest.approx(2.2)
    assert summary.length.low < summary.length.value < summary.length.high
