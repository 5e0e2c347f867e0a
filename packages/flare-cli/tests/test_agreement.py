"""What ranks compare before they open a model: all stop, or none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_cli.agreement import Offer, RankRefuses, agree, decode_offers, encode_offer
from flare_core.errors import ConfigurationMismatch


def test_a_difference_names_the_setting_the_ranks_and_the_values():
    offers = [Offer({"--page-tokens": value}) for value in ("64", "64", "32")]
    with pytest.raises(ConfigurationMismatch, match="rank 0 has 64, rank 1 has 64, rank 2 has 32"):
        agree(offers)


def test_a_setting_that_one_rank_lacks_is_a_difference():
    with pytest.raises(ConfigurationMismatch, match="rank 1 has nothing"):
        agree([Offer({"a": "1"}), Offer({})])


def test_a_rank_that_cannot_start_stops_all_with_its_reason():
    with pytest.raises(RankRefuses, match="rank 1: no such directory"):
        agree([Offer({"a": "1"}), Offer({}, failure="no such directory")])


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=8))
def test_of_sizes_the_least_counts_on_every_rank(sizes):
    gathered = [encode_offer(Offer({"same": "x"}, {"pages": size})) for size in sizes]
    assert agree(decode_offers(gathered)) == {"pages": min(sizes)}
