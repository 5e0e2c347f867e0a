"""The key-value table that `torch.distributed`'s rendezvous needs, and its messages. Pure: requests in, replies out.

Rank zero holds one table. Clients are opaque ids; a client that waits for a key is answered when the key is set, and
gives up by CANCEL, so that the table needs no clock. Semantics follow torch.distributed.TCPStore.
"""

from collections.abc import Hashable
from typing import TypeAlias

import msgspec

__all__ = [
    "MAX_ENTRY_BYTES",
    "MAX_TABLE_BYTES",
    "MAX_WAITING",
    "AddRequest",
    "Addressed",
    "Answer",
    "CancelRequest",
    "CheckRequest",
    "CompareSetRequest",
    "CountRequest",
    "DeleteRequest",
    "GetRequest",
    "KeyValueTable",
    "Reply",
    "Request",
    "SetRequest",
    "WaitRequest",
]

MAX_TABLE_BYTES = 64 << 20
MAX_ENTRY_BYTES = 1 << 20
MAX_WAITING = 4096
_MAX_COUNTER = (1 << 63) - 1


class SetRequest(msgspec.Struct, frozen=True, tag="set", array_like=True, forbid_unknown_fields=True):
    """Set a key."""

    id: int
    key: str
    value: bytes


class GetRequest(msgspec.Struct, frozen=True, tag="get", array_like=True, forbid_unknown_fields=True):
    """Return a key's value once it is set."""

    id: int
    key: str


class AddRequest(msgspec.Struct, frozen=True, tag="add", array_like=True, forbid_unknown_fields=True):
    """Add to a counter (decimal text, 0 where unset) and return it."""

    id: int
    key: str
    amount: int


class WaitRequest(msgspec.Struct, frozen=True, tag="wait", array_like=True, forbid_unknown_fields=True):
    """Answer once every key is set."""

    id: int
    keys: list[str]


class CheckRequest(msgspec.Struct, frozen=True, tag="check", array_like=True, forbid_unknown_fields=True):
    """Return whether every key is set."""

    id: int
    keys: list[str]


class CompareSetRequest(msgspec.Struct, frozen=True, tag="compare", array_like=True, forbid_unknown_fields=True):
    """Set a key if it holds `expected` (empty: or is unset); return what it then holds, `expected` if still unset."""

    id: int
    key: str
    expected: bytes
    desired: bytes


class DeleteRequest(msgspec.Struct, frozen=True, tag="delete", array_like=True, forbid_unknown_fields=True):
    """Unset a key; return whether it was set."""

    id: int
    key: str


class CountRequest(msgspec.Struct, frozen=True, tag="count", array_like=True, forbid_unknown_fields=True):
    """Return how many keys are set."""

    id: int


class CancelRequest(msgspec.Struct, frozen=True, tag="cancel", array_like=True, forbid_unknown_fields=True):
    """Forget this client's waiting request; not answered."""

    id: int


Request: TypeAlias = (
    SetRequest
    | GetRequest
    | AddRequest
    | WaitRequest
    | CheckRequest
    | CompareSetRequest
    | DeleteRequest
    | CountRequest
    | CancelRequest
)
Answer: TypeAlias = bytes | int | bool | None


class Reply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The answer to the request of this id; `fault` is empty unless the table refused it."""

    id: int
    answer: Answer = None
    fault: str = ""


Addressed: TypeAlias = tuple[Hashable, Reply]


class KeyValueTable:
    """The table and who waits for what. `handle` and `drop` return the replies to send, with the client of each."""

    def __init__(self, max_bytes: int = MAX_TABLE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._values: dict[str, bytes] = {}
        # (client, request id) -> the request and the keys that it still misses
        self._waiting: dict[tuple[Hashable, int], tuple[GetRequest | WaitRequest, set[str]]] = {}

    def handle(self, client: Hashable, request: Request) -> list[Addressed]:
        """Take one request; returns its reply unless it waits, then the replies to others that it set free."""
        match request:
            case SetRequest(id=id_, key=key, value=value):
                return self._set_and_release(client, id_, key, value, None)
            case AddRequest(id=id_, key=key, amount=amount):
                return self._add(client, id_, key, amount)
            case CompareSetRequest(id=id_, key=key, expected=expected, desired=desired):
                held = self._values.get(key, b"")
                if held == expected:
                    return self._set_and_release(client, id_, key, desired, desired)
                return [(client, Reply(id_, self._values.get(key, expected)))]
            case GetRequest(key=key):
                return self._await(client, request, {key})
            case WaitRequest(keys=keys):
                return self._await(client, request, set(keys))
            case CheckRequest() | DeleteRequest() | CountRequest():
                return [(client, Reply(request.id, self._answer(request)))]
            case CancelRequest(id=id_):
                self._waiting.pop((client, id_), None)
                return []

    def _answer(self, request: CheckRequest | DeleteRequest | CountRequest) -> Answer:
        match request:
            case CheckRequest(keys=keys):
                return all(key in self._values for key in keys)
            case DeleteRequest(key=key):
                return self._delete(key)
            case CountRequest():
                return len(self._values)

    def drop(self, client: Hashable) -> None:
        """Forget what this client waits for; its link is gone."""
        for waiter in [waiter for waiter in self._waiting if waiter[0] == client]:
            del self._waiting[waiter]

    def _add(self, client: Hashable, id_: int, key: str, amount: int) -> list[Addressed]:
        held = self._values.get(key, b"0")
        try:
            total = int(held) + amount
        except ValueError:
            return [(client, Reply(id_, fault=f"key '{key}' does not hold a number"))]
        if abs(total) > _MAX_COUNTER:
            return [(client, Reply(id_, fault=f"counter '{key}' would leave 64 bits"))]
        return self._set_and_release(client, id_, key, str(total).encode(), total)

    def _set_and_release(self, client: Hashable, id_: int, key: str, value: bytes, answer: Answer) -> list[Addressed]:
        held = self._values.get(key)
        if _entry_bytes(key, value) > MAX_ENTRY_BYTES:
            return [(client, Reply(id_, fault=f"key and value together exceed {MAX_ENTRY_BYTES} bytes"))]
        growth = len(value) - len(held) if held is not None else _entry_bytes(key, value)
        if self._num_bytes + growth > self._max_bytes:
            return [(client, Reply(id_, fault=f"the key-value table is full ({self._max_bytes} bytes)"))]
        self._num_bytes += growth
        self._values[key] = value
        replies: list[Addressed] = [(client, Reply(id_, answer))]
        for waiter, (request, missing) in list(self._waiting.items()):
            missing.discard(key)
            if not missing:
                del self._waiting[waiter]
                replies.append((waiter[0], self._awaited(request)))
        return replies

    def _await(self, client: Hashable, request: GetRequest | WaitRequest, keys: set[str]) -> list[Addressed]:
        missing = keys - self._values.keys()
        if not missing:
            return [(client, self._awaited(request))]
        if len(self._waiting) >= MAX_WAITING:
            return [(client, Reply(request.id, fault=f"{MAX_WAITING} requests wait already"))]
        self._waiting[client, request.id] = (request, missing)
        return []

    def _awaited(self, request: GetRequest | WaitRequest) -> Reply:
        return Reply(request.id, self._values[request.key] if isinstance(request, GetRequest) else None)

    def _delete(self, key: str) -> bool:
        held = self._values.pop(key, None)
        if held is None:
            return False
        self._num_bytes -= _entry_bytes(key, held)
        return True


def _entry_bytes(key: str, value: bytes) -> int:
    return len(key.encode()) + len(value)
