"""The mutual proof of hosts that join: each shows that it knows the cluster's token, and the token is never sent.

Host 0 sends a new random number; a host answers with one of its own and a keyed digest (HMAC-SHA256, RFC
2104) of both numbers and of what it says; host 0 answers with one of what it says. A recorded message proves nothing
later, and neither side can be made to prove what the other one has to.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Final, Literal

NONCE_BYTES: Final = 32

MIN_TOKEN_CHARACTERS: Final = 16
"""A shorter token could be found by trying: one recorded handshake tells whether a guess is right."""


def new_nonce() -> bytes:
    """Return a new random number, which is used for one handshake only."""
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nonces:
    """The random numbers of a handshake."""

    host_0: bytes
    joining: bytes


def proof(*, token: str, role: Literal["joining", "host 0"], nonces: Nonces, content: bytes) -> bytes:
    """Return the digest of what a host says in a role, under the token; empty without a token."""
    if not token:
        return b""
    digest = hmac.new(token.encode(), role.encode(), hashlib.sha256)
    for part in (nonces.host_0, nonces.joining, content):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def is_proof(given: bytes, *, token: str, role: Literal["joining", "host 0"], nonces: Nonces, content: bytes) -> bool:
    """Return whether a digest is that of `proof`, in a time that does not depend on where it differs."""
    return hmac.compare_digest(given, proof(token=token, role=role, nonces=nonces, content=content))
