"""The scheduler knows which API key and which HTTP request a sequence is of, but not the key itself."""

from __future__ import annotations

import pytest
from support.servers.live_server import live_server

from pagoda.common.engine.messages import EngineRequest
from pagoda.common.engine.scheduling.scheduler import Scheduler


@pytest.mark.setting("--api-key")
def test_sequences_have_the_owner_and_the_group_of_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[EngineRequest] = []
    add = Scheduler.add

    def spy(self: Scheduler, request: EngineRequest, *more: object) -> None:
        added.append(request)
        add(self, request, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Scheduler, "add", spy)
    with live_server(api_key=("first-key", "second-key")) as server:
        for key, body in (
            ("first-key", {"prompt": ["abc", "abd"], "n": 2, "stream": False}),
            ("second-key", {"prompt": "abc", "stream": True}),
            ("first-key", {"prompt": "abc"}),
        ):
            status, _ = server.post("/v1/completions", body | {"max_tokens": 1}, authorization=f"Bearer {key}")
            assert status == 200
    assert len(added) == 6
    first, second = added[0].owner, added[4].owner
    assert [each.owner for each in added] == [first] * 4 + [second, first]
    assert first != second
    assert "key" not in first + second
    groups = [each.group for each in added]
    assert len(set(groups[:4])) == 1, "all sequences of all prompts of one request"
    assert len(set(groups)) == 3
