"""The table of settings: how each is named, read, shown and explained. Flags, variables and the file derive from it.

Owns the defaults. Does not know click, nor which source wins (``resolve``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flare_cache.pool.url import parse_pool_url
from flare_cli.config import DEFAULT_PAGE_TOKENS, HostPort, KvMemory
from flare_cli.units import format_duration, format_size, parse_duration, parse_size
from flare_core.errors import UsageError

__all__ = ["RUN_SETTINGS", "Setting"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        name: field of ``RunConfig``; the flag, the variable and the file's key derive from it.
        group: heading in ``flare run --help``.
        parse: from text; raises ``UsageError``.
        default: the value without any source.
        metavar: what stands for the value in help; empty for a switch.
        text: one line of help.
        show: the value for people.
    """

    name: str
    group: str
    parse: Callable[[str], object]
    default: object
    metavar: str
    text: str
    show: Callable[[object], str] = str

    @property
    def flag(self) -> str:
        """``--max-model-len``; the model itself is positional."""
        return "MODEL" if self.name == "model" else "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """``FLARE_MAX_MODEL_LEN``."""
        return "FLARE_" + self.name.upper()

    @property
    def key(self) -> str:
        """``max-model-len``, as in the TOML file."""
        return self.name.replace("_", "-")


def parse_int(text: str) -> int:
    """A decimal integer.

    Raises:
        UsageError: anything else.
    """
    if not re.fullmatch(r"\s*-?\d{1,18}\s*", text, re.ASCII):
        msg = f"{text!r} is not a whole number"
        raise UsageError(msg)
    return int(text)


def parse_switch(text: str) -> bool:
    """true or false in the usual spellings.

    Raises:
        UsageError: anything else.
    """
    match text.strip().lower():
        case "1" | "true" | "yes" | "on":
            return True
        case "0" | "false" | "no" | "off" | "":
            return False
        case _:
            msg = f"{text!r} is neither true nor false"
            raise UsageError(msg)


def parse_address(text: str) -> HostPort:
    """HOST:PORT, IPv6 as [HOST]:PORT.

    Raises:
        UsageError: host or port is missing or the port is out of range.
    """
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+)):(\d{1,5})", text.strip(), re.ASCII)
    if match is None or not 0 < int(match[3]) < 65536:
        msg = f"{text!r} is not HOST:PORT (IPv6: [HOST]:PORT)"
        raise UsageError(msg)
    return HostPort(match[1] or match[2], int(match[3]))


def parse_kv_memory(text: str) -> KvMemory:
    """A size, or ``512pages``.

    Raises:
        UsageError: neither.
    """
    match = re.fullmatch(r"\s*(\d{1,12})\s*pages?\s*", text, re.ASCII)
    if match is not None:
        return KvMemory(num_pages=int(match[1]))
    return KvMemory(num_bytes=parse_size(text))


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            msg = f"{text!r} is not one of {', '.join(choices)}"
            raise UsageError(msg)
        return text

    return parse


def _parse_speculation(text: str) -> str:
    """The JSON, checked and in one spelling, so that ranks can compare it.

    Raises:
        UsageError: as ``flare_spec.config.parse_speculative_config``.
    """
    try:
        from flare_spec.config import parse_speculative_config  # comes with the engine, which not every command needs
    except ModuleNotFoundError:
        msg = "drafting needs the engine: pip install 'flare-cli[engine]'"
        raise UsageError(msg) from None
    return str(parse_speculative_config(text))


def _parse_path(text: str) -> Path:
    return Path(text).expanduser()


def _show_size(value: object) -> str:
    return format_size(value) if isinstance(value, int) else str(value)


def _show_kv(value: object) -> str:
    return format_size(value.num_bytes) if isinstance(value, KvMemory) and value.num_bytes is not None else str(value)


def _show_seconds(value: object) -> str:
    return format_duration(value) if isinstance(value, float) else str(value)


_PLACE = "Place in the group"
_SERVER = "Server"
_ENGINE = "Engine"
_CACHE = "Prefix cache"
_POOL = "Pool"
_LIMITS = "Limits"

RUN_SETTINGS: tuple[Setting, ...] = (
    Setting("model", _SERVER, str, None, "MODEL", "Hugging Face directory or exported package; default: SmolLM2-135M."),
    Setting("rank", _PLACE, parse_int, 0, "N", "This process's rank; rank 0 serves HTTP."),
    Setting("world_size", _PLACE, parse_int, 1, "N", "Number of ranks."),
    Setting("rendezvous", _PLACE, parse_address, None, "HOST:PORT", "Where rank 0 listens for the other ranks."),
    Setting(
        "rendezvous_timeout", _PLACE, parse_duration, 300.0, "TIME", "Wait this long for all ranks.", _show_seconds
    ),
    Setting("key_file", _PLACE, _parse_path, None, "FILE", "The cluster key, made by 'flare key'; equal on all ranks."),
    Setting("insecure_plaintext", _PLACE, parse_switch, False, "", "Links without TLS: trusted networks only."),
    Setting("host", _SERVER, str, None, "A[,B]", "Serve HTTP there; default: loopback and rank 0's --rendezvous host."),
    Setting("port", _SERVER, parse_int, 8000, "N", "Port to serve HTTP on; 0: any free one."),
    Setting("served_model_name", _SERVER, str, None, "NAME", "Name in the API; default: the directory's name."),
    Setting("api_key_file", _SERVER, _parse_path, None, "FILE", "Lines 'name: key'; the name is the cache's tenant."),
    Setting("admin_key_file", _SERVER, _parse_path, None, "FILE", "Key for cache resets from other hosts."),
    Setting("drain_timeout", _SERVER, parse_duration, 30.0, "TIME", "At SIGTERM, let requests finish.", _show_seconds),
    Setting("log_json", _SERVER, parse_switch, False, "", "Logs as JSON lines."),
    Setting("max_model_len", _ENGINE, parse_int, None, "N", "Longest prompt and output; default: the model's."),
    Setting("dtype", _ENGINE, _one_of("auto", "float32", "bfloat16"), "auto", "TYPE", "auto, float32 or bfloat16."),
    Setting("device", _ENGINE, str, "auto", "DEVICE", "auto, cpu, cuda or cuda:N."),
    Setting("kv_memory", _ENGINE, parse_kv_memory, None, "SIZE", "KV pool of a rank: 64GiB, or 512pages.", _show_kv),
    Setting("page_tokens", _ENGINE, parse_int, DEFAULT_PAGE_TOKENS, "N", "Tokens of a page; equal on all ranks."),
    Setting("max_sequences", _ENGINE, parse_int, 64, "N", "Sequences computed together."),
    Setting("max_batch_tokens", _ENGINE, parse_int, 2048, "N", "Prompt tokens of a step; a quarter beside decodes."),
    Setting("threads", _ENGINE, parse_int, None, "N", "CPU threads of the model; default: all cores."),
    Setting("plan_lead", _ENGINE, parse_int, None, "0|1", "Steps planned ahead; default: 1 on CUDA, 0 on the CPU."),
    Setting(
        "speculative_config", _ENGINE, _parse_speculation, None, "JSON", 'Draft tokens ahead: {"method": "ngram"}.'
    ),
    Setting("prefix_cache_disk", _CACHE, _parse_path, None, "DIR", "Directory of this rank's records ({rank} in it)."),
    Setting(
        "prefix_cache_disk_limit", _CACHE, parse_size, None, "SIZE", "Bytes per rank; the least counts.", _show_size
    ),
    Setting(
        "prefix_cache_disk_transport",
        _CACHE,
        _one_of("auto", "direct", "buffered"),
        "auto",
        "HOW",
        "auto, direct (O_DIRECT) or buffered.",
    ),
    Setting("prefix_cache_memory", _CACHE, parse_size, 0, "SIZE", "A tier of records in RAM, per rank.", _show_size),
    Setting(
        "prefix_cache_durability",
        _CACHE,
        _one_of("process", "power"),
        "process",
        "WHAT",
        "Records survive: process (kills) or power (power cuts).",
    ),
    Setting("prefix_cache_min_tail", _CACHE, parse_int, 16, "N", "Do not store partial pages below N tokens."),
    Setting("prefix_cache_salt_key_file", _CACHE, _parse_path, None, "FILE", "Salt key, shared by instances."),
    Setting("prefix_cache_accept_loss", _CACHE, parse_switch, False, "", "Start though most records are lost."),
    Setting("pool", _POOL, parse_pool_url, None, "URL", "Shared pool: selene://HOST:PORT or selenes:// (TLS)."),
    Setting("pool_key_file", _POOL, _parse_path, None, "FILE", "The pool's key, made by 'flare key'; its manager's."),
    Setting("pool_restore", _POOL, _one_of("auto", "always"), "auto", "WHEN", "auto: where quicker than computing."),
    Setting(
        "pool_pending", _POOL, parse_size, 1 << 30, "SIZE", "Records to be put, per rank; more is dropped.", _show_size
    ),
    Setting(
        "pool_flush_timeout", _POOL, parse_duration, 10.0, "TIME", "At SIGTERM, put what is pending.", _show_seconds
    ),
    Setting("max_body", _LIMITS, parse_size, 8 << 20, "SIZE", "Largest request body.", _show_size),
    Setting("max_n", _LIMITS, parse_int, 16, "N", "Most choices of a request (prompts times n: 8 times that)."),
    Setting(
        "max_output_tokens", _LIMITS, parse_int, None, "N", "Most output tokens; default: what the context allows."
    ),
    Setting("max_concurrent_requests", _LIMITS, parse_int, 512, "N", "More get 429."),
)
