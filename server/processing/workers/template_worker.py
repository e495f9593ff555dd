"""The process that renders chat templates, because a template or messages may take any time and memory.

    python -P -m pagoda.server.processing.workers.template_worker        (started by TemplateRenderer, never by hand)

Each frame has a template and what to render with it. The reply is the text, or the error of the request.
"""

from __future__ import annotations

import contextlib
import json
from typing import Final

from pagoda.common.errors import RequestError
from pagoda.common.text.chat_template import render, variables_of
from pagoda.server.processing.workers.worker import TEMPLATE_ERROR, TEMPLATE_TEXT, Handler, serve

MEMORY_BYTES: Final = 256 << 20
"""Memory for templates, messages and text, beyond the 20 MB of the process."""


def handler(_: bytes) -> Handler:
    """Return what renders a request."""
    return _rendered


def _rendered(data: bytes) -> bytes:
    """Return the reply to a request. A MemoryError ends the process."""
    try:
        request = json.loads(data.decode("utf-8", "surrogatepass"))
        if "messages" in request:
            text = render(request["template"], request["messages"], **request["options"])
        else:
            text = json.dumps(sorted(variables_of(request["template"])))
    except RecursionError:
        return TEMPLATE_ERROR + json.dumps(["messages", "the messages are nested too deeply"]).encode()
    except RequestError as error:
        return TEMPLATE_ERROR + json.dumps([error.field, str(error)]).encode()
    return TEMPLATE_TEXT + text.encode("utf-8", "surrogatepass")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        serve(handler, MEMORY_BYTES)
