"""What makes two KV pages the same: a chained SHA-256 over everything that went into them.

    digest[p] = SHA-256(digest[p-1] + token ids of page p + rows of its EMBEDDED places),     digest[-1] = root

The root carries what is not a token: salt, LoRA version, media. So two equal digests mean equal tokens and rows from
the first one on, under equal extras. Knows bytes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from pagoda.common.engine.request import Request


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What distinguishes equal tokens. `media`: digests of the images or sounds behind placeholder tokens, in order."""

    cache_salt: str | None = None
    lora: str | None = None
    media: tuple[bytes, ...] = ()


def root_digest(extras: ExtraKeys) -> bytes:
    """32 bytes that start a chain. Each part is tagged with its length, so no two sets of extras run together."""
    parts = [b"" if text is None else b"+" + text.encode() for text in (extras.cache_salt, extras.lora)]
    parts.extend(extras.media)
    return sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def page_digest(parent: bytes, page_bytes: bytes) -> bytes:
    """32 bytes of one full page. `page_bytes`: its token ids as int32, then the rows of those that are EMBEDDED."""
    return sha256(parent + page_bytes).digest()


def extend_hashes(request: Request, block_size: int, num_pages: int) -> list[bytes]:
    """The request's digests, at least `num_pages` of them; computes the missing ones. Their tokens must be known."""
    hashes = request.hashes
    while len(hashes) < num_pages:
        start = len(hashes) * block_size
        parent = hashes[-1] if hashes else root_digest(ExtraKeys(request.cache_salt))
        hashes.append(page_digest(parent, request.page_bytes(start, start + block_size)))
    return hashes
