"""``flare bench cache``: how fast records are stored and restored through the sharded transport, beside raw reads.

Runs a real group of ranks on this host: rendezvous, TLS links, record links, peer services, staged transports and
record directories are the ones that ``flare run`` uses. Only the pages are plain memory, and no model takes part.
"""
