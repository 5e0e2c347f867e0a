"""Lengths of verified blocks: what may decide them."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from flare_spec.dspark.scheduling import static_length

# Few distinct values, and ones and zeros among them: ties are where an order goes wrong.
CONFIDENCE = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]) | st.floats(0.0, 1.0)
BLOCKS = st.lists(CONFIDENCE, min_size=1, max_size=6)


def test_a_threshold_cuts_before_the_first_confidence_below_it():
    assert static_length([0.9, 0.5, 0.4, 0.9], 0.5) == 2
    assert static_length([0.9, 0.5, 0.4, 0.9], 0.0) == 4
    assert static_length([0.1, 0.9], 0.5) == 0
    assert static_length([0.9, math.nan, 0.9], 0.0) == 1


@given(BLOCKS, CONFIDENCE, st.data())
def test_whether_a_token_is_verified_never_depends_on_what_lies_behind_it(block, threshold, data):
    place = data.draw(st.integers(1, len(block)))
    # Drawing token `place` another way changes the confidences after it, and those alone.
    behind = len(block) - place
    changed = block[:place] + data.draw(st.lists(CONFIDENCE, min_size=behind, max_size=behind))
    assert (static_length(block, threshold) >= place) == (static_length(changed, threshold) >= place)
