"""``flare bench pool``: one rank's shards to and from a manager, beside raw sockets and the raw disk.

Each side is one process; both kinds move the same bytes over the same number of connections, in turns.
"""
