"""Reads an upload (multipart/form-data) as it comes: its file goes to the store in pieces, its fields to memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request

from pagoda.server.http.errors import HttpError
from pagoda.server.http.stores.files import FileWriter

MAX_FIELDS: Final = 16
MAX_FIELD_BYTES: Final = 1 << 16
"""Bytes of all fields together, besides the file."""

_FILE: Final = "file"


class Upload:
    """The parts of one form. `open_file`: starts the file in the store when its part begins.

    Raises HttpError: 400 for an invalid form, 413 and 507 as the store does.
    """

    def __init__(self, content_type: str, open_file: Callable[[], FileWriter]) -> None:
        from python_multipart import MultipartParser
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if not boundary:
            raise _invalid("the content type has no boundary")
        self.fields: dict[str, str] = {}
        self.file: FileWriter | None = None
        self.filename = ""
        self._open_file = open_file
        self._parse_options = parse_options_header
        self._header = [b"", b""]
        self._headers = dict[bytes, bytes]()
        self._name = ""  # Name of the part that is being read.
        self._value: bytearray | None = None  # Value of the field that is being read.
        self._size = 0
        self._ended = False
        callbacks: Any = {
            "on_part_begin": self._headers.clear,
            "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_part,
            "on_part_data": lambda data, start, end: self._add_data(data[start:end]),
            "on_part_end": self._end_part,
            "on_end": self._end,
        }
        self._parser = MultipartParser(boundary, callbacks)

    async def read(self, request: Request) -> None:
        """Read the whole body of a request."""
        from python_multipart.exceptions import FormParserError

        try:
            async for data in request.stream():
                self._parser.write(data)
            self._parser.finalize()
        except FormParserError as error:
            raise _invalid(str(error)) from None
        except ClientDisconnect:
            raise _invalid("the client has left") from None
        if not self._ended:
            raise _invalid("it ends before its last boundary")

    def abandon(self) -> None:
        """Remove what was stored of the file."""
        if self.file is not None:
            self.file.abandon()

    # Called by the parser.

    def _add_header(self, part: int, data: bytes) -> None:
        self._header[part] += data

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value
        self._header = [b"", b""]

    def _begin_part(self) -> None:
        kind, options = self._parse_options(self._headers.get(b"content-disposition", b""))
        if kind != b"form-data" or b"name" not in options:
            raise _invalid("a part has no name")
        self._name = options[b"name"].decode("utf-8", "replace")
        if self._name == _FILE and b"filename" in options:
            if self.file is not None:
                raise _invalid("it has more than one file; send them one by one")
            self.filename = options[b"filename"].decode("utf-8", "replace")
            self.file = self._open_file()
            return
        if len(self.fields) >= MAX_FIELDS:
            raise _invalid(f"it has more than {MAX_FIELDS} fields")
        self._value = bytearray()

    def _add_data(self, data: bytes) -> None:
        if self._value is None:
            assert self.file is not None
            self.file.write(data)
            return
        self._size += len(data)
        if self._size > MAX_FIELD_BYTES:
            raise _invalid(f"its fields have more than {MAX_FIELD_BYTES} bytes")
        self._value += data

    def _end_part(self) -> None:
        if self._value is not None:
            self.fields[self._name] = self._value.decode("utf-8", "replace")
            self._value = None

    def _end(self) -> None:
        self._ended = True


def _invalid(problem: str) -> HttpError:
    return HttpError(400, f"the body is not valid multipart/form-data: {problem}")
