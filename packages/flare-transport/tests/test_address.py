"""Addresses as a user writes them."""

import pytest

from flare_transport import Address, AddressError, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:7000", "10.0.0.1", 7000),
        ("node-0.example:1", "node-0.example", 1),
        ("[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
        ("[::1]:80", "::1", 80),
    ],
)
def test_an_address_is_read_and_shown_as_written(text, host, port):
    assert parse_address(text) == Address(host, port)
    assert str(parse_address(text)) == text


@pytest.mark.parametrize("text", ["", "10.0.0.1", ":7000", "::1:7000", "[]:1", "fe80::1"])
def test_what_has_no_host_and_port_is_refused_with_the_form(text):
    with pytest.raises(AddressError, match="give host:port"):
        parse_address(text)


@pytest.mark.parametrize("port", ["", "0", "65536", "-1", "http", "٣"])
def test_a_port_out_of_range_is_named(port):
    with pytest.raises(AddressError, match=f"'{port}' is not a number from 1 to 65535"):
        parse_address(f"host:{port}")
