"""Chat prompts of many kinds, made of passages and words, and those of them that are held out of training.

Knows what is asked; not the model, its chat template or tokens. What is held out shares no passage with training.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from flare_core.errors import UsageError
from flare_spec.training.passages import Passages

__all__ = ["PromptSet", "make_prompts"]

_HELD_OUT_SHARE: Final = 0.05
_MAX_MISSES: Final = 200


@dataclass(frozen=True, slots=True)
class PromptSet:
    """User messages; no text is in both and none is there twice."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]


def make_prompts(passages: Passages, *, num_training: int, num_held_out: int, seed: int) -> PromptSet:
    """Prompts of ``passages``, a twentieth of which is used for the held-out ones alone.

    Raises:
        UsageError: too few passages for so many different prompts.
    """
    apart = [_split(texts) for texts in (passages.prose, passages.code, passages.words)]
    if not all(each for pair in apart for each in pair):
        raise UsageError(
            f"{len(passages.prose)} paragraphs, {len(passages.code)} functions and {len(passages.words)} words are too "
            f"few to make prompts of; name directories with more texts, or allow installed packages"
        )
    held = Passages(*(tuple(pair[0]) for pair in apart))
    learned = Passages(*(tuple(pair[1]) for pair in apart))
    seen: set[str] = set()
    held_out = _distinct(held, num_held_out, random.Random(seed + 1), seen)
    return PromptSet(_distinct(learned, num_training, random.Random(seed), seen), held_out)


def _split(texts: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    count = max(1, round(_HELD_OUT_SHARE * len(texts))) if texts else 0
    return texts[:count], texts[count:]


def _distinct(passages: Passages, count: int, chance: random.Random, seen: set[str]) -> tuple[str, ...]:
    made: list[str] = []
    misses = 0
    while len(made) < count:
        prompt = _prompt(passages, chance)
        if prompt in seen:
            misses += 1
            if misses > _MAX_MISSES + count:
                raise UsageError(f"only {len(made)} of {count} different prompts can be made; ask for fewer")
            continue
        seen.add(prompt)
        made.append(prompt)
    return tuple(made)


_ABOUT_PROSE: Final = (
    "Explain this in simple words: {text}",
    "Explain what this means.\n\n{text}",
    "Continue this text:\n\n{start}",
    "Write the next two sentences: {start}",
    "Summarize the following text.\n\n{text}",
    "Summarize in one sentence: {text}",
    "Rewrite this text for a child: {text}",
    "List the main points of this text:\n\n{text}",
    "What question does this text answer? {text}",
    "Give this text a title: {text}",
    "Rewrite the following in a friendly tone.\n\n{text}",
    "Write a short FAQ about this: {text}",
    "Which words in this text are hard to understand, and what do they mean?\n\n{text}",
)
_ABOUT_CODE: Final = (
    "Explain this code:\n\n{text}",
    "What does this function do?\n\n```python\n{text}\n```",
    "Write a function like this one, with another name:\n\n{text}",
    "Add comments to this code.\n\n```python\n{text}\n```",
    "Write a test for this function:\n\n{text}",
    "Write a Python function that begins with:\n\n{head}",
    "Complete this code:\n\n```python\n{half}",
    "Write a docstring for this function.\n\n{text}",
)
_ABOUT_WORDS: Final = (
    "Tell me a story about {one} and {two}.",
    "Write a short story that begins with the word {one}.",
    "Write a poem about {one}.",
    "What is {one}?",
    "What does the word {one} mean? Give three example sentences.",
    "List ten words that have to do with {one}.",
    "List five facts about {one} and {two}.",
    "What is the difference between {one} and {two}?",
    "Write an email to a colleague about {one}.",
    "Give me five tips for {one}.",
    "How would you explain {one} to a beginner?",
    "Write a dialogue between two friends about {one}.",
    "Write a Python function named {one}_{two} and explain it.",
    "Make a table with the columns {one}, {two} and {three}.",
    "Write a recipe that has something to do with {one}.",
    "Why is {one} important?",
    "Write a JSON object with the keys {one}, {two} and {three} and example values.",
    "Make a plan for a week of learning about {one}.",
)
_REPETITIVE: Final = (
    "Count from {low} to {high}.",
    "Count backwards from {high} to {low}.",
    "Write the multiplication table of {low}.",
    "Repeat this sentence five times: {sentence}",
    "Repeat the word {one} {low} times.",
    "Copy this text exactly:\n\n{text}",
    "List the numbers from {low} to {high}, each followed by the word {one}.",
    "Write the days of the week, and after each the word {one}.",
    "List the months of the year with one sentence about {one} for each.",
    "Write the alphabet, one letter a line, with a word for each that fits {one}.",
    "Write a song about {one} in which every verse has the same refrain.",
    "What is {low} plus {high}? Explain each step.",
)

_KINDS: Final[Sequence[tuple[float, Sequence[str]]]] = (
    (0.34, _ABOUT_PROSE),
    (0.2, _ABOUT_CODE),
    (0.3, _ABOUT_WORDS),
    (0.16, _REPETITIVE),
)


def _prompt(passages: Passages, chance: random.Random) -> str:
    (templates,) = chance.choices([each for _, each in _KINDS], [share for share, _ in _KINDS])
    template = chance.choice(templates)
    text = chance.choice(passages.code if templates is _ABOUT_CODE else passages.prose)
    low = chance.randint(2, 40)
    fields: dict[str, Callable[[], str]] = {
        "text": lambda: text,
        "start": lambda: text[: text.rfind(" ", 0, 2 * len(text) // 3)],
        "half": lambda: "\n".join(text.splitlines()[: 1 + len(text.splitlines()) // 2]),
        "head": lambda: "\n".join(text.splitlines()[:2]),
        "sentence": lambda: text.split(". ")[0][:120],
        "low": lambda: str(low),
        "high": lambda: str(low + 5 + low % 23),
    }
    words = iter(chance.sample(passages.words, min(3, len(passages.words))) * 3)
    for name in _names(template):
        value = fields[name]() if name in fields else next(words)
        template = template.replace("{" + name + "}", value)
    return template


def _names(template: str) -> Iterator[str]:
    """Names of a template's fields; the texts that are put in may have braces of their own, so no format string."""
    for part in template.split("{")[1:]:
        yield part.split("}")[0]
