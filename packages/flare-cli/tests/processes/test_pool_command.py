"""``flare pool``: a manager process from its flags to its end, and what an operator's questions print and return."""

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from flare_cache.digest import ROW_INDEX, section_digest
from flare_cache.host_memory import aligned_buffer
from flare_cache.jobs import Extent, RecordIdentity
from flare_cache.pool.local_storage import open_local_storage
from flare_cache.pool.manifest import Manifest, Shard, encode_manifest, manifest_name, shard_name
from flare_cache.record import encode_header, file_layout
from flare_core.geometry import Axis, Geometry, Plane

PAGE_TOKENS, WORLD = 4, 2
NAMESPACE = hashlib.sha256(b"namespace").digest()


def flare(*arguments: object, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "flare_cli", "pool", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)


@dataclass
class Manager:
    process: subprocess.Popen
    url: str
    announced: str

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        _, rest = self.process.communicate(timeout=30)
        return self.process.returncode, rest


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "pool.key"
    path.touch(mode=0o600)
    path.write_text("a5" * 32 + "\n")
    return path


@pytest.fixture
def serve(tmp_path, key_file):
    """``serve(*flags)``: a started manager over ``pool`` in the test's directory."""
    started: list[subprocess.Popen] = []

    def start(*flags: object) -> Manager:
        command = [sys.executable, "-m", "flare_cli", "pool", "serve", "--key-file", str(key_file), "--listen",
                   "127.0.0.1:0", "--store", str(tmp_path / "pool"), *map(str, flags)]  # fmt: skip
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started.append(process)
        said = ""
        for line in process.stderr:
            said += line
            if (found := re.search(r"serving --pool (\S+)", line)) is not None:
                return Manager(process, found[1], said)
        raise AssertionError(said)

    yield start
    for process in started:
        process.kill()
        process.communicate()


def plant(root: Path, name: str, *, is_visible: bool = True) -> tuple[RecordIdentity, int]:
    """Put a record into the directory of a manager that does not run; it, and its bytes on all ranks."""
    digest = hashlib.sha256(name.encode()).digest()
    record = RecordIdentity(
        key=digest, store_id=digest[16:], parent_key=b"", start_key=hashlib.sha256(digest).digest(), start=0,
        end=3 * PAGE_TOKENS, page_tokens=PAGE_TOKENS, tail_tokens=0, has_row=True,
    )  # fmt: skip
    ids = b"".join(token.to_bytes(4, "little") for token in range(record.end))
    storage = open_local_storage(root)
    shards = []
    with contextlib.closing(storage):
        for rank in range(WORLD):
            data = make_shard(record, ids, rank)
            upload = storage.begin(shard_name(NAMESPACE, record.key, record.store_id, rank), len(data))
            upload.write(0, data)
            upload.commit(data)
            header_bytes = int.from_bytes(data[12:16], "little")
            shards.append(Shard(len(data), bytes(data[header_bytes - 32 : header_bytes])))
        manifest = Manifest(record=record, extent=Extent.ROW, token_ids=ids, shards=tuple(shards), created_at=1.0)
        if is_visible:
            assert storage.put_if_absent(manifest_name(NAMESPACE, record.key), encode_manifest(manifest))
    return record, manifest.num_bytes


def make_shard(record: RecordIdentity, ids: bytes, rank: int) -> memoryview:
    axes = (Axis("token", PAGE_TOKENS), Axis("dim", 256))
    geometry = Geometry(rank, WORLD, PAGE_TOKENS, (Plane("kv", "float32", axes),), 5000)
    layout = file_layout(record, page_bytes=geometry.page_bytes, row_stride=geometry.row_stride)
    data = aligned_buffer(layout.row_end)
    data[layout.header_bytes :] = os.urandom(layout.row_end - layout.header_bytes)
    places = [(index, layout.section_offset(index), layout.page_bytes) for index in range(layout.num_pages)]
    places.append((ROW_INDEX, layout.tail_end, layout.row_end - layout.tail_end))
    digests = b"".join(
        section_digest(record.store_id, rank, index=index, payload=[data[at : at + size]]) for index, at, size in places
    )
    data[: layout.header_bytes] = encode_header(
        record, ids, set_fingerprint=hashlib.sha256(b"set").digest(), geometry=geometry, digests=digests
    )
    return data


def test_a_manager_says_where_it_serves_and_ends_in_order(serve, tmp_path, key_file) -> None:
    plant(tmp_path / "pool", "a")
    manager = serve()
    assert "\nflare pool: 1 records, " in manager.announced
    assert manager.url.startswith("selenes://127.0.0.1:")
    status = json.loads(flare("status", manager.url, "--key-file", key_file, "--json").stdout)
    assert [space["num_records"] for space in status["namespaces"]] == [1]
    code, rest = manager.end()
    assert code == 0
    assert rest.endswith("flare pool: ending\n")
    assert "vanished" not in rest
    gone = flare("status", manager.url, "--key-file", key_file)
    assert gone.returncode == 1
    assert "no manager answers" in gone.stderr


def test_a_killed_manager_is_started_again_with_all_that_it_had(serve, tmp_path, key_file) -> None:
    record, _ = plant(tmp_path / "pool", "a")
    first = serve()
    first.end(signal.SIGKILL)
    second = serve("--plaintext")
    assert second.url.startswith("selene://")
    lines = [json.loads(line) for line in flare("ls", second.url, "--key-file", key_file, "--json").stdout.splitlines()]
    assert [(line["key"], line["num_ranks"], line["end"]) for line in lines] == [(record.key.hex(), WORLD, record.end)]
    table = flare("ls", second.url, "--key-file", key_file).stdout
    assert record.key.hex()[:16] in table


def test_verify_names_a_bad_record_exits_1_and_removes_it_when_told(serve, tmp_path, key_file) -> None:
    sound, _ = plant(tmp_path / "pool", "sound")
    bad, size = plant(tmp_path / "pool", "bad")
    shard = next((tmp_path / "pool").rglob(f"{bad.key.hex()}.*.1"))
    data = bytearray(shard.read_bytes())
    data[-1000] ^= 1
    shard.write_bytes(data)
    manager = serve()
    asked = ("verify", manager.url, "--key-file", key_file)
    found = flare(*asked)
    assert found.returncode == 1
    assert f"{bad.key.hex()[:16]}  rank 1: section-digest" in found.stdout
    assert "2 records" in found.stdout
    assert flare(*asked, "--remove").returncode == 1
    after = flare(*asked)
    assert (after.returncode, after.stdout.split()[:2]) == (0, ["1", "records,"])
    assert size > 0
    assert sound.key.hex() in flare("ls", manager.url, "--key-file", key_file, "--json").stdout


def test_gc_removes_what_belongs_to_no_record_once_it_is_old(serve, tmp_path, key_file) -> None:
    kept, _ = plant(tmp_path / "pool", "kept")
    left, _ = plant(tmp_path / "pool", "left", is_visible=False)
    manager = serve("--grace", "150s")
    young = flare("gc", manager.url, "--key-file", key_file)
    assert (young.returncode, "removed 0 shards" in young.stdout) == (0, True)
    assert "2 are younger" in young.stdout
    for shard in (tmp_path / "pool").rglob(f"*/shards/{left.key.hex()}.*"):
        os.utime(shard, (1, 1))
    for shard in (tmp_path / "pool").rglob(f"*/shards/{kept.key.hex()}.*"):
        os.utime(shard, (1, 1))
    assert "removed 2 shards" in flare("gc", manager.url, "--key-file", key_file).stdout
    assert not list((tmp_path / "pool").rglob(f"*/shards/{left.key.hex()}.*"))
    assert flare("verify", manager.url, "--key-file", key_file).returncode == 0


def test_what_a_manager_cannot_read_is_left_where_it_is(serve, tmp_path, key_file) -> None:
    record, _ = plant(tmp_path / "pool", "a")
    newer, _ = plant(tmp_path / "pool", "newer")
    manifest = next((tmp_path / "pool").rglob(f"manifests/{newer.key.hex()}"))
    manifest.write_bytes(b"\x81\xa6format\x63")
    for shard in (tmp_path / "pool").rglob("*/shards/*"):
        os.utime(shard, (1, 1))
    manager = serve("--grace", "150s")
    assert "is left alone" in manager.announced
    assert "removed 0 shards" in flare("gc", manager.url, "--key-file", key_file).stdout
    assert len(list((tmp_path / "pool").rglob(f"*/shards/{newer.key.hex()}.*"))) == WORLD
    listed = flare("ls", manager.url, "--key-file", key_file, "--json").stdout
    assert (record.key.hex() in listed, newer.key.hex() in listed) == (True, False)


def test_a_second_manager_of_a_directory_and_one_on_a_taken_port_do_not_start(serve, tmp_path, key_file) -> None:
    manager = serve()
    second = flare("serve", "--key-file", key_file, "--listen", "127.0.0.1:0", "--store", tmp_path / "pool")
    assert second.returncode == 2
    assert "used by another manager" in second.stderr
    place = manager.url.partition("://")[2]
    taken = flare("serve", "--key-file", key_file, "--listen", place, "--store", tmp_path / "other")
    assert taken.returncode == 2
    assert f"--listen {place}" in taken.stderr
    assert "in use" in taken.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--store", "ftp://x"), "unknown scheme ftp://"),
        (("--store", "/proc/none"), "--store /proc/none"),
        (("--listen", "nowhere"), "--listen nowhere"),
        (("--limit", "many"), "--limit: 'many' is not a size"),
        (("--quota", "-1"), "--quota: '-1' is not a size"),
        (("--memory", "x"), "--memory: 'x' is not a size"),
        (("--grace", "10s"), "must outlast transfers"),
        (("--grace", "soon"), "--grace: 'soon' is not a duration"),
        (("--refresh", "often"), "--refresh: 'often' is not a duration"),
        (("--key-file", "/none.key"), "/none.key"),
    ],
)
def test_a_wrong_flag_is_named_and_nothing_starts(tmp_path, key_file, flags, words) -> None:
    usual = {"--store": tmp_path / "pool", "--listen": "127.0.0.1:0", "--key-file": key_file}
    given = {**usual, **dict([flags])}
    done = flare("serve", *(part for pair in given.items() for part in pair))
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_key_that_others_can_read_and_a_wrong_key_are_refused(serve, tmp_path, key_file) -> None:
    manager = serve()
    wrong = tmp_path / "wrong.key"
    wrong.touch(mode=0o600)
    wrong.write_text("b6" * 32 + "\n")
    refused = flare("status", manager.url, "--key-file", wrong)
    assert refused.returncode != 0
    assert "keys differ" in refused.stderr
    wrong.chmod(0o644)
    assert flare("status", manager.url, "--key-file", wrong).returncode == 2
    other_scheme = manager.url.replace("selenes://", "selene://")
    plain = flare("status", other_scheme, "--key-file", key_file)
    assert plain.returncode != 0
    assert "TLS" in plain.stderr
