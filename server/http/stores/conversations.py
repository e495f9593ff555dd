"""In-memory store of the conversations of /v1/conversations: their metadata and items.

Bounded in number and size; the least recently changed of the owner with most of them are evicted. Conversations are
only visible to their owner.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagoda.common.engine.scheduling.shares import Shares
from pagoda.server.http.errors import HttpError
from pagoda.server.http.stores.responses import ID_SIZE, OVERHEAD


@dataclass(eq=False, slots=True)
class StoredConversation:
    """One conversation. `items`: JSON by item id, oldest first."""

    owner: bytes  # Digest of the API key that may read it, see server.owner_of.
    id: str = field(default_factory=lambda: f"conv_{uuid.uuid4().hex}")
    created_at: int = field(default_factory=lambda: int(time.time()))
    metadata: Mapping[str, str] = field(default_factory=dict)
    items: dict[str, bytes] = field(default_factory=dict)
    size: int = 0  # Approximate memory in bytes.

    def measured(self) -> int:
        """Return the approximate memory in bytes."""
        metadata = sum(len(key) + len(value) for key, value in self.metadata.items())
        return OVERHEAD + metadata + sum(ID_SIZE + len(item) for item in self.items.values())


class ConversationStore:
    """Stores at most `max_count` conversations of at most `max_bytes` in total. 0: none."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._shares: Shares[bytes] = Shares(max_count, max_bytes)
        self._conversations: dict[tuple[bytes, str], StoredConversation] = {}  # The least recently changed is first.

    def __len__(self) -> int:
        return len(self._conversations)

    def create(self, owner: bytes, metadata: Mapping[str, str], items: Mapping[str, bytes]) -> StoredConversation:
        """Store a conversation. Raise HttpError (400, 413) if none is stored, or if it is too large."""
        if self._shares.max_count <= 0 or self._shares.max_bytes <= 0:
            raise HttpError(400, "conversations need a server that stores responses (--max-stored-responses)")
        conversation = StoredConversation(owner, metadata=metadata, items=dict(items))
        if conversation.measured() > self._shares.max_bytes:
            raise _too_large(self._shares.max_bytes)
        self._conversations[owner, conversation.id] = conversation
        self._shares.add(owner, count=1)
        self._resize(conversation)
        return conversation

    def get(self, conversation_id: str, owner: bytes) -> StoredConversation:
        """Return the owner's conversation. Raise HttpError (404), also for another owner's."""
        conversation = self._conversations.get((owner, conversation_id))
        if conversation is None:
            message = (
                f"there is no conversation {conversation_id[:200]!r}: it was not created, was deleted, or was evicted"
            )
            raise HttpError(404, message, "conversation_id")
        return conversation

    def add(self, conversation: StoredConversation, items: Mapping[str, bytes]) -> None:
        """Add items to a conversation. Raise HttpError (413) if it becomes too large; it is unchanged then."""
        added = sum(ID_SIZE + len(item) for item in items.values())
        if conversation.size + added > self._shares.max_bytes:
            raise _too_large(self._shares.max_bytes)
        conversation.items |= items
        self._resize(conversation)

    def remove(self, conversation: StoredConversation, item_ids: Sequence[str]) -> None:
        """Remove items that the conversation has."""
        for item_id in item_ids:
            del conversation.items[item_id]
        self._resize(conversation)

    def set_metadata(self, conversation: StoredConversation, metadata: Mapping[str, str]) -> None:
        conversation.metadata = metadata
        self._resize(conversation)

    def delete(self, conversation_id: str, owner: bytes) -> None:
        """Delete a conversation. Raise HttpError (404)."""
        self._drop(self.get(conversation_id, owner))

    def _resize(self, conversation: StoredConversation) -> None:
        """Update the size of a conversation, which is the latest then. Evict others if needed."""
        key = conversation.owner, conversation.id
        if self._conversations.pop(key, None) is None:  # It was evicted or deleted while a response was generated.
            return
        self._conversations[key] = conversation
        size = conversation.measured()
        self._shares.add(conversation.owner, size=size - conversation.size)
        conversation.size = size
        while (owner := self._shares.over()) is not None:
            self._drop(
                next(conversation for conversation in self._conversations.values() if conversation.owner == owner)
            )

    def _drop(self, conversation: StoredConversation) -> None:
        del self._conversations[conversation.owner, conversation.id]
        self._shares.add(conversation.owner, count=-1, size=-conversation.size)


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the conversation is larger than {limit} bytes (--max-stored-response-bytes)")
