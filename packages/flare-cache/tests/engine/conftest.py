"""A server that speaks S3, and buckets of it."""

from __future__ import annotations

import hashlib
import urllib.request

import pytest
from moto.server import ThreadedMotoServer
from obstore.store import S3Store


@pytest.fixture(scope="session")
def s3_endpoint():
    """A server that speaks S3, in this process."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def open_bucket(s3_endpoint, request):
    """Opens obstore's store of a bucket of this test, once for each manager."""
    bucket = f"pool-{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]}"
    urllib.request.urlopen(urllib.request.Request(f"{s3_endpoint}/{bucket}", method="PUT"), timeout=10).close()
    return lambda name=bucket: S3Store(
        name,
        prefix="a/prefix",
        endpoint=s3_endpoint,
        access_key_id="test",
        secret_access_key="test",
        region="us-east-1",
        client_options={"allow_http": True},
    )
