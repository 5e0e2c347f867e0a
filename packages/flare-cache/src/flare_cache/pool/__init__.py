"""Selene: the pool of records that instances and hosts share. Its words, its manager, and what a rank needs to use it.

Nothing here imports torch; the manager runs on a storage node without it.
"""
