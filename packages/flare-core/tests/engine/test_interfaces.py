"""Which interface an address belongs to."""

from __future__ import annotations

import socket

import pytest

from flare_core.compute.interfaces import interface_of


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.3"])
def test_loopback_addresses_belong_to_the_loopback_interface(address) -> None:
    assert interface_of(address) == "lo"


def test_an_address_of_nobody_has_no_interface() -> None:
    assert interface_of("192.0.2.77") is None
    assert interface_of("2001:db8::77") is None


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_an_ipv6_address_is_found_where_the_system_has_it() -> None:
    assert interface_of("::1") in {"lo", None}
