"""Answers against the first answer to the same prompt, or against the oracle computed here without any cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from flare_qualify.client import Answer, TopLogprobs
from flare_qualify.models import cache_off_text
from flare_qualify.run_context import Context
from flare_qualify.verdict import Damage
from flare_qualify.workloads.requests import Attempt

__all__ = ["References", "count_differences"]


def count_differences(text: str, logprobs: tuple[TopLogprobs, ...], reference: Answer, *, is_whole: bool = True) -> int:
    """Output positions at which an answer differs from ``reference`` in its top log-probabilities or, if more, in text.

    Bits are compared, not nearness; where one of them has no log-probabilities, text alone. Without ``is_whole`` the
    answer may end early: then it must be a beginning.
    """
    if not is_whole:
        wrong = _num_differences(logprobs, reference.logprobs[: len(logprobs)]) if reference.logprobs else 0
        return wrong or int(not reference.text.startswith(text))
    has_both = bool(logprobs) and bool(reference.logprobs)
    by_position = _num_differences(logprobs, reference.logprobs) if has_both else 0
    return max(by_position, _num_differences(text, reference.text))


def _num_differences(one: Sequence[object], other: Sequence[object]) -> int:
    """Places at which two sequences differ; what one of them lacks differs, too."""
    return sum(1 for left, right in zip_longest(one, other) if left != right)


@dataclass(slots=True)
class References:
    """The right answers of a scenario, by a name for the prompt. Differences count as wrong tokens."""

    context: Context
    answers: dict[str, Answer] = field(default_factory=dict)

    def learn(self, name: str, answer: Answer) -> Answer:
        """Take a cold answer as the right one.

        Raises:
            ScenarioFailed: it restored something, so it is no reference.
        """
        self.context.require(
            answer.total_cached == 0, f"the reference of {name} was to be cold: {answer.cached_tokens}"
        )
        self.context.answered()
        seconds = round(answer.ttft_seconds, 4)
        self.context.history.append("cold", tokens=answer.prompt_tokens, seconds=seconds)
        self.answers[name] = answer
        return answer

    def learn_oracle(self, name: str, answer: Answer, *, model: str, prompt: list[int], world_size: int) -> Answer:
        """As :meth:`learn`, after comparing its text with the oracle's computed in this process, without any cache."""
        expected = cache_off_text(model, prompt, max_tokens=answer.completion_tokens, world_size=world_size)
        wrong = _num_differences(expected, answer.text)
        self.context.damage(Damage.WRONG_TOKENS, wrong, f"{name}: {answer.text!r} instead of {expected!r}")
        return self.learn(name, answer)

    def expect(self, name: str, text: str) -> None:
        """Take a text computed elsewhere as the right one; without log-probabilities."""
        self.answers[name] = Answer(text, 0.0, 0.0, 0, 0)

    def compare(self, name: str, answer: Answer) -> int:
        """Count the tokens that differ from the reference's."""
        self.context.answered()
        reference = self.answers[name]
        wrong = count_differences(answer.text, answer.logprobs, reference)
        detail = f"{name}: {answer.text!r} instead of {reference.text!r}, cached {answer.cached_tokens}"
        self.context.damage(Damage.WRONG_TOKENS, wrong, detail)
        self.context.history.append("checked")
        return wrong

    def compare_attempt(self, name: str, attempt: Attempt, *, what: Damage = Damage.WRONG_TOKENS) -> int:
        """As :meth:`compare`; what a broken request brought must be a beginning of the reference."""
        if attempt.answer is not None:
            return self.compare(name, attempt.answer)
        self.context.answered()
        reference = self.answers[name]
        wrong = count_differences(attempt.text, attempt.logprobs, reference, is_whole=False)
        self.context.damage(what, wrong, f"{name}: {attempt.text!r} is no beginning of {reference.text!r}")
        self.context.history.append("checked")
        return wrong
