"""Settings on which all ranks must agree, compared once after the rendezvous; and values that become the least of all.

Pure: every rank evaluates the same gathered bytes alike, so that all of them stop, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from flare_core.errors import ConfigurationMismatch, UsageError

__all__ = ["Offer", "RankRefuses", "agree", "decode_offers", "encode_offer"]


class RankRefuses(UsageError):
    """Some rank cannot start, and all know why: what it was given cannot be used, so the group's start is a mistake."""


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank brings: ``equal`` must be the same everywhere, of ``least`` the smallest value counts.

    ``failure`` is why this rank cannot start; then nobody does.
    """

    equal: dict[str, str]
    least: dict[str, int] = {}
    failure: str = ""


def encode_offer(offer: Offer) -> bytes:
    """Bytes to gather."""
    return msgspec.msgpack.encode(offer)


def decode_offers(gathered: Sequence[bytes]) -> list[Offer]:
    """Every rank's offer, by rank. Raises ``msgspec.MsgspecError``."""
    return [msgspec.msgpack.decode(data, type=Offer) for data in gathered]


def agree(offers: Sequence[Offer]) -> Mapping[str, int]:
    """The agreed values of ``least``.

    Raises:
        RankRefuses: a rank cannot start; says which, and why.
        ConfigurationMismatch: a setting differs: names it, the ranks and the values.
    """
    failures = [f"rank {rank}: {offer.failure}" for rank, offer in enumerate(offers) if offer.failure]
    if failures:
        raise RankRefuses("; ".join(failures))
    for name in {key: None for offer in offers for key in offer.equal}:
        values = [offer.equal.get(name, "nothing") for offer in offers]
        if any(value != values[0] for value in values):
            ranks = ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
            msg = f"the ranks were started with different {name}: {ranks}; start all with the same"
            raise ConfigurationMismatch(msg)
    names = set.intersection(*(set(offer.least) for offer in offers))
    return {name: min(offer.least[name] for offer in offers) for name in sorted(names)}
