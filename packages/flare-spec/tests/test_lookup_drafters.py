"""Drafters that look texts up: what they propose is what a plain search finds, and depends on nothing else."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_core.errors import UsageError
from flare_core.sampling import SamplingParams
from flare_spec.config import parse_speculative_config
from flare_spec.drafters import make_drafter
from flare_spec.lookup import LookupDrafter
from flare_spec.suffix import SuffixDrafter

PARAMS = SamplingParams(max_tokens=1)
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype="<u4")


def plain_lookup(tokens: list[int], *, longest: int, shortest: int, max_tokens: int) -> list[int]:
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return tokens[end : end + max_tokens]
    return []


def plain_suffix(text: list[int], *, longest: int, max_tokens: int, least: float) -> list[int]:
    """What followed the longest earlier occurrence of the text's end most often, as the counts in a tree say."""
    for length in range(min(longest, len(text)), 0, -1):
        places = [end for end in range(length, len(text)) if text[end - length : end] == text[-length:]]
        if places:
            break
    else:
        return []
    drafts: list[int] = []
    chance = 1.0
    while len(drafts) < min(max_tokens, length):
        followers = Counter(text[end] for end in places if end < len(text))
        if not followers:
            break
        best = min(followers, key=lambda token: (-followers[token], token))
        chance *= followers[best] / len(places)
        if chance < least:
            break
        drafts.append(best)
        places = [end + 1 for end in places if end < len(text) and text[end] == best]
    return drafts


@given(TEXTS, TEXTS, st.integers(1, 6), st.integers(1, 4), st.integers(1, 8))
def test_lookup_finds_the_last_occurrence_of_the_longest_run(prompt, output, longest, shortest, max_tokens) -> None:
    drafter = LookupDrafter(5, longest=max(longest, shortest), shortest=shortest)
    drafter.start(3, ids(prompt), PARAMS)
    for token in output:
        drafter.extend(3, [token])
    expected = plain_lookup(prompt + output, longest=max(longest, shortest), shortest=shortest, max_tokens=max_tokens)
    assert list(drafter.propose([3], [max_tokens])[0]) == expected


@given(TEXTS, TEXTS, st.integers(1, 8), st.floats(0.05, 1.0))
def test_suffix_decoding_follows_the_counts(prompt, output, max_tokens, least) -> None:
    drafter = SuffixDrafter(5, longest=6, max_requests=0, drafts_per_match=1.0, least_chance=least)
    drafter.start(0, ids(prompt), PARAMS)
    drafter.extend(0, output)
    expected = plain_suffix(prompt + output, longest=6, max_tokens=max_tokens, least=least)
    assert list(drafter.propose([0], [max_tokens])[0]) == expected


def test_suffix_decoding_remembers_what_earlier_requests_said() -> None:
    drafter = SuffixDrafter(5, longest=8, max_requests=2, drafts_per_match=2.0, least_chance=0.1)
    for output in ([1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12]):
        drafter.start(0, ids([0]), PARAMS)
        drafter.extend(0, output)
    drafter.start(0, ids([6, 7]), PARAMS)
    assert list(drafter.propose([0], [8])[0]) == [8, 9]
    drafter.start(1, ids([2, 3]), PARAMS)
    assert list(drafter.propose([1], [8])[0]) == []  # only the last two outputs are remembered


def test_by_default_nothing_of_one_request_is_drafted_for_another() -> None:
    drafter = make_drafter(parse_speculative_config('{"method": "suffix"}'), target=None)
    drafter.start(0, ids([1, 2]), PARAMS)
    drafter.extend(0, [3, 4, 5])
    drafter.start(0, ids([1, 2, 3]), PARAMS)
    drafter.start(1, ids([2, 3]), PARAMS)
    assert [list(drafts) for drafts in drafter.propose([0, 1], [4, 4])] == [[], []]


def test_slots_do_not_see_each_other() -> None:
    drafter = make_drafter(parse_speculative_config('{"method": "ngram"}'), target=None)
    drafter.start(0, ids([1, 2, 3, 1, 2]), PARAMS)
    drafter.start(1, ids([1, 2]), PARAMS)
    assert list(drafter.propose([0], [2])[0]) == [3, 1]
    assert list(drafter.propose([1], [2])[0]) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "truncated|malformed|Input data"),
        ('{"method": "dream"}', "method"),
        ('{"method": "ngram", "num_tokens": 3}', "num_tokens"),
        ('{"method": "dflash"}', '"dflash" needs "model"'),
        ('{"method": "ngram", "model": "x"}', "drafts without a model"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens is 0"),
        ('{"method": "ngram", "num_speculative_tokens": 99}', "from 1 to 31"),
        ('{"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}', "prompt_lookup_max is 2"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": 2}', "suffix_decoding_min_token_prob"),
        ("[]", "object"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_name(text, named) -> None:
    with pytest.raises(UsageError, match=named):
        parse_speculative_config(text)


def test_equal_configurations_are_spelled_alike() -> None:
    one = parse_speculative_config('{"method": "ngram", "num_speculative_tokens": 4}')
    other = parse_speculative_config('{"num_speculative_tokens":4,"method":"ngram"}')
    assert str(one) == str(other)
    assert parse_speculative_config(str(one)) == one
