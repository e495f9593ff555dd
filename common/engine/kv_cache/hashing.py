"""Content hashes of KV pages: a chained SHA-256 over everything that determines their values.

    digest[p] = SHA-256(digest[p-1] + token ids of page p + its embeddings),     digest[-1] = root

The root includes what is not a token: salt, LoRA version, media. Two equal digests therefore mean equal tokens and
embeddings from the first one on, with equal extra keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from pagoda.common.engine.request import Request


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What distinguishes requests with equal tokens."""

    cache_salt: str | None = None
    lora: str | None = None
    media: tuple[bytes, ...] = ()  # digests of the images or audio behind placeholder tokens, in order


def root_digest(extras: ExtraKeys) -> bytes:
    """Return the 32 bytes that start a chain. Each part is prefixed by its length, so that parts are distinct."""
    parts = [b"" if text is None else b"+" + text.encode() for text in (extras.cache_salt, extras.lora)]
    parts.extend(extras.media)
    return sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def page_digest(parent: bytes, page_bytes: bytes) -> bytes:
    """Return the digest of one full page, 32 bytes. `page_bytes`: its token ids as int32, then its embeddings."""
    return sha256(parent + page_bytes).digest()


def extend_hashes(request: Request, block_size: int, num_pages: int) -> list[bytes]:
    """Return the request's digests, at least `num_pages`; computes missing ones, whose tokens must be known."""
    hashes = request.hashes
    while len(hashes) < num_pages:
        start = len(hashes) * block_size
        parent = hashes[-1] if hashes else root_digest(ExtraKeys(request.cache_salt))
        hashes.append(page_digest(parent, request.page_bytes(start, start + block_size)))
    return hashes
