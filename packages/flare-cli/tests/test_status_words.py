"""What ``flare status`` says of a tier that takes or gives nothing."""

from flare_cli.snapshot import CacheSnapshot, ClusterSnapshot, TierSnapshot
from flare_cli.status import print_snapshot


def test_a_tier_that_is_not_stored_to_or_read_says_why(capsys):
    tier = TierSnapshot(
        tier="disk",
        num_records=1,
        charged_bytes=4096,
        limit_bytes=8192,
        stores_stopped="paused, as rank 1 had no place: ENOSPC: [no] space",
        reads_stopped="rank 1 failed to read 3 times",
    )
    print_snapshot(ClusterSnapshot(state="ready", model="m", cache=CacheSnapshot(tiers=(tier,))))
    printed = " ".join(capsys.readouterr().out.split())
    assert "disk: no stores, paused, as rank 1 had no place: ENOSPC: [no] space" in printed
    assert "disk: no reads, rank 1 failed to read 3 times" in printed


def test_a_tier_that_works_says_nothing_of_it(capsys):
    tier = TierSnapshot(tier="disk", num_records=1, charged_bytes=4096, limit_bytes=8192)
    print_snapshot(ClusterSnapshot(state="ready", model="m", cache=CacheSnapshot(tiers=(tier,))))
    assert "no stores" not in capsys.readouterr().out
