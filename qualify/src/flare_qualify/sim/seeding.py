"""What is found on disks that a run did not leave there: records of an earlier life, and directories that diverge.

Files are written with the real codec; some are whole on every rank, some lack on one, differ, are cut or are rubbish.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from flare_cache.digest import ROW_INDEX
from flare_cache.jobs import RecordIdentity, record_file_name
from flare_cache.record import encode_header, file_layout
from flare_core.keys import chain_keys, next_key, root_key, token_array
from flare_qualify.sim.disk import SimDisk
from flare_qualify.sim.records import format_digest

if TYPE_CHECKING:
    from flare_qualify.sim.world import World

__all__ = ["diverge", "seed_records", "wipe"]


def _page(entries: bytes, page_bytes: int) -> bytes:
    return entries + bytes(page_bytes - len(entries))


def _put(disk: SimDisk, name: str, data: bytes) -> None:
    inode = disk.new_inode()
    inode.data = bytearray(data)
    inode.version = 1
    inode.sync()
    disk.set_name(name, inode)
    disk.sync_names()


def _record_bytes(world: World, identity: RecordIdentity, token_ids: bytes, rank: int) -> bytes:
    """The file of one rank, whole."""
    settings, oracle = world.settings, world.checks.oracle
    geometry = settings.identity.geometries[rank]
    oracle.learn_record(identity, token_ids)
    sections = oracle.sections(identity, rank)
    row = oracle.row(identity, rank)
    if sections is None or row is None:
        raise ValueError("a seeded record whose prefix is not known")
    pages = [_page(section, geometry.page_bytes) for section in sections]
    digests = [format_digest(identity.store_id, rank, index=index, payload=page) for index, page in enumerate(pages)]
    if identity.has_row:
        pages.append(_page(row, geometry.row_stride))
        digests.append(format_digest(identity.store_id, rank, index=ROW_INDEX, payload=pages[-1]))
    header = encode_header(
        identity,
        token_ids,
        set_fingerprint=settings.identity.fingerprint(),
        geometry=geometry,
        digests=b"".join(digests),
    )
    return header + b"".join(pages)


def _chain(world: World, document: bytes, store_rng: Random) -> list[tuple[RecordIdentity, bytes]]:
    """Records of a document's prefix, parents first."""
    options, oracle = world.options, world.checks.oracle
    size = options.page_tokens
    root = root_key(world.settings.identity.fingerprint(), b"")
    tokens = token_array([int.from_bytes(document[at : at + 4], "little") for at in range(0, len(document), 4)])
    keys = chain_keys(root, tokens, size)
    oracle.learn(root, document, keys)
    records: list[tuple[RecordIdentity, bytes]] = []
    parent = b""
    first = 0
    while first < len(keys):
        last = min(first + store_rng.randint(1, options.max_sections), len(keys))
        tail = store_rng.randint(1, size - 1) if size > 1 and last < len(keys) and store_rng.random() < 0.3 else 0
        if last - first + bool(tail) > options.max_sections:
            tail = 0
        key = keys[last - 1]
        end = last * size + tail
        if tail:
            key = next_key(key, tokens[last * size : end])
        identity = RecordIdentity(
            key=key,
            store_id=store_rng.randbytes(16),
            parent_key=parent,
            start_key=keys[first - 1] if first else root,
            start=first * size,
            end=end,
            page_tokens=size,
            tail_tokens=tail,
            has_row=options.has_rows and store_rng.random() < 0.8,
        )
        records.append((identity, document[4 * first * size : 4 * end]))
        first = last
        parent = key
        if tail:
            break
    return records


def seed_records(world: World) -> None:
    """Records of an earlier life: mostly whole on every rank."""
    rng = world.rng
    for _ in range(world.options.num_seeded):
        document = rng.choice(world.workload.documents)
        for identity, token_ids in _chain(world, document, rng)[: rng.randint(1, 4)]:
            name = record_file_name(identity.key)
            if any(name in disk.names for disk in world.disks):
                continue
            odd = rng.randrange(len(world.disks)) if rng.random() < 0.3 else -1
            how = rng.choice(("missing", "other store", "cut", "rubbish", "misnamed"))
            for disk in world.disks:
                data = _record_bytes(world, identity, token_ids, disk.rank)
                if disk.rank == odd:
                    _put_odd(world, disk, identity, token_ids=token_ids, data=data, how=how)
                else:
                    _put(disk, name, data)


def _put_odd(world: World, disk: SimDisk, identity: RecordIdentity, *, token_ids: bytes, data: bytes, how: str) -> None:
    rng, name = world.rng, record_file_name(identity.key)
    disk.excused.add(name)
    match how:
        case "other store":
            twin = RecordIdentity(
                **{field: getattr(identity, field) for field in identity.__struct_fields__ if field != "store_id"},
                store_id=rng.randbytes(16),
            )
            _put(disk, name, _record_bytes(world, twin, token_ids, disk.rank))
        case "cut":
            geometry = world.settings.identity.geometries[disk.rank]
            layout = file_layout(identity, page_bytes=geometry.page_bytes, row_stride=geometry.row_stride)
            _put(disk, name, data[: rng.choice((layout.pages_end, layout.tail_end, rng.randrange(len(data))))])
        case "rubbish":
            _put(disk, name, rng.randbytes(rng.choice((0, 100, 8192))))
        case "misnamed":
            wrong = record_file_name(rng.randbytes(32))
            disk.excused.add(wrong)
            _put(disk, wrong, data)
        case _:
            pass


def diverge(world: World) -> None:
    """Between two runs a directory changes: an operator, a restored backup, a repaired file system."""
    rng = world.rng
    disk = rng.choice(world.disks)
    names = sorted(disk.records())
    how = rng.choice(("lose", "lose", "cut", "wipe", "twin", "temporary", "backup"))
    world.loop.note(f"r{disk.rank} diverges: {how}")
    match how:
        case "lose" if names:
            name = rng.choice(names)
            disk.set_name(name, None)
            disk.excused.add(name)
        case "cut" if names:
            name = rng.choice(names)
            inode = disk.names[name]
            disk.excused.add(name)
            size = rng.choice((0, len(inode.data) // 2, max(0, len(inode.data) - 4096)))
            del inode.data[size:]
            inode.is_damaged = True
            inode.version += 1
            inode.sync()
        case "wipe":
            wipe(disk)
        case "twin" if names:
            _replace_by_twin(world, disk, rng.choice(names))
        case "temporary":
            _put(disk, f"{rng.randbytes(32).hex()}.{rng.randbytes(16).hex()}.tmp", rng.randbytes(64))
        case "backup":
            _restore_backup(world, disk)
        case _:
            pass
    disk.sync_names()


def wipe(disk: SimDisk) -> None:
    """Everything in the directory is removed."""
    disk.excused.update(disk.records())
    for name in list(disk.names):
        disk.set_name(name, None)
    disk.sync_names()


def _replace_by_twin(world: World, disk: SimDisk, name: str) -> None:
    """Another computation's record of the same tokens, whole and sound."""
    found = world.checks.reader.found(disk, name)
    if found is None or found.header.layout.row_end != len(disk.names[name].data):
        return
    disk.set_name(name, None)
    disk.excused.add(name)
    _put_odd(world, disk, found.identity, token_ids=found.header.token_ids, data=b"", how="other store")


def _restore_backup(world: World, disk: SimDisk) -> None:
    """The directory as it was some runs ago."""
    backup = world.backups.get(disk.rank)
    if backup is None:
        world.backups[disk.rank] = {
            name: (bytes(inode.data), inode.is_damaged) for name, inode in disk.records().items()
        }
        return
    now = disk.records()
    disk.excused.update(now)
    for name in now:
        disk.set_name(name, None)
    for name, (data, is_damaged) in backup.items():
        disk.excused.add(name)
        _put(disk, name, data)
        disk.names[name].is_damaged = is_damaged
