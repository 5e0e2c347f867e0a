"""Verification of drafted tokens on vocabulary shards: how many drafts are kept, and the token that follows them.

Loads no torch by itself; the modules in it do.
"""
