"""What S3 answers to a request: objects, ranges, conditions, uploads in parts, copies, listings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import formatdate
from urllib.parse import quote, unquote
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from integration_tests.benchmarks.loopback_s3.http import Request
from integration_tests.benchmarks.loopback_s3.objects import ConditionError, MissingError, Objects, Stored

__all__ = ["Answer", "Service"]

_PAGE = 200  # fewer than S3 has, so that clients have to ask for the next page
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_XML = {"Content-Type": "application/xml"}


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, headers and the pieces of a body of `size` bytes."""

    status: str
    headers: dict[str, str] = field(default_factory=dict)
    body: Iterable[bytes | memoryview] = ()
    size: int = 0


class Service:
    """One container; the first part of a path is its name, and any name will do."""

    def __init__(self) -> None:
        self._objects = Objects()

    def answer(self, request: Request) -> Answer:
        """The answer; also to what cannot be done."""
        _, _, key = request.path.lstrip("/").partition("/")
        try:
            return self._act(request)(request, key)
        except MissingError as error:
            return _error("404 Not Found", str(error))
        except ConditionError:
            return _error("412 Precondition Failed", "PreconditionFailed")

    def _act(self, request: Request) -> Callable[[Request, str], Answer]:
        in_parts = "uploadId" in request.query
        in_bucket = "/" not in request.path.strip("/")
        table: dict[str, Callable[[Request, str], Answer]] = {
            "PUT": self._bucket if in_bucket else self._put_part if in_parts else self._put,
            "POST": self._delete_many if in_bucket else self._complete if in_parts else self._begin,
            "GET": self._list if in_bucket else self._get,
            "HEAD": self._bucket if in_bucket else self._get,
            "DELETE": self._forget if in_parts else self._delete,
        }
        return table.get(request.method, _not_implemented)

    def _bucket(self, request: Request, key: str) -> Answer:
        return Answer("200 OK")

    def _put(self, request: Request, key: str) -> Answer:
        source = request.headers.get("x-amz-copy-source")
        if source is not None:
            found = self._objects.get(unquote(source).lstrip("/").partition("/")[2])
            made = self._objects.put(key, found.pieces)
            return _xml(
                "CopyObjectResult", f"<ETag>{escape(made.etag)}</ETag><LastModified>{_iso(made)}</LastModified>"
            )
        headers = request.headers
        none_match = headers.get("if-none-match") == "*"
        made = self._objects.put(key, [request.body], match=headers.get("if-match"), none_match=none_match)
        return Answer("200 OK", {"ETag": made.etag})

    def _put_part(self, request: Request, key: str) -> Answer:
        made = self._objects.part(request.query["uploadId"], int(request.query["partNumber"]), [request.body])
        return Answer("200 OK", {"ETag": made.etag})

    def _begin(self, request: Request, key: str) -> Answer:
        return _xml("InitiateMultipartUploadResult", f"<UploadId>{self._objects.begin()}</UploadId>")

    def _complete(self, request: Request, key: str) -> Answer:
        parts = ET.fromstring(bytes(request.body))
        numbers = [int(each.text or 0) for each in parts.iter() if each.tag.endswith("PartNumber")]
        made = self._objects.complete(request.query["uploadId"], key, numbers)
        return _xml("CompleteMultipartUploadResult", f"<Key>{escape(key)}</Key><ETag>{escape(made.etag)}</ETag>")

    def _forget(self, request: Request, key: str) -> Answer:
        self._objects.forget(request.query["uploadId"])
        return Answer("204 No Content")

    def _get(self, request: Request, key: str) -> Answer:
        found = self._objects.get(key)
        start, stop, status = 0, found.size, "200 OK"
        headers = {
            "ETag": found.etag,
            "Last-Modified": formatdate(found.seconds, usegmt=True),
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        asked = _RANGE.fullmatch(request.headers.get("range", ""))
        if asked is not None:
            start = int(asked[1]) if asked[1] else max(0, found.size - int(asked[2]))
            stop = min(found.size, int(asked[2]) + 1) if asked[1] and asked[2] else found.size
            if start >= stop:
                return _error("416 Range Not Satisfiable", "InvalidRange")
            status = "206 Partial Content"
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{found.size}"
        body = () if request.method == "HEAD" else found.range(start, stop)
        return Answer(status, headers, body, stop - start)

    def _delete(self, request: Request, key: str) -> Answer:
        self._objects.delete(key)
        return Answer("204 No Content")

    def _delete_many(self, request: Request, key: str) -> Answer:
        wanted = ET.fromstring(bytes(request.body))
        keys = [each.text or "" for each in wanted.iter() if each.tag.endswith("Key")]
        for each in keys:
            self._objects.delete(each)
        return _xml("DeleteResult", "".join(f"<Deleted><Key>{escape(each)}</Key></Deleted>" for each in keys))

    def _list(self, request: Request, key: str) -> Answer:
        query = request.query
        if "location" in query:
            return _xml("LocationConstraint", "us-east-1")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        entries: dict[str, Stored | None] = {}
        for name, found in self._objects.listed(prefix):
            head, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            entries[prefix + head + cut if cut else name] = None if cut else found
        names = [name for name in entries if name > after]
        page = names[: min(_PAGE, int(query.get("max-keys", _PAGE)))]
        encoded = quote if query.get("encoding-type") == "url" else escape
        texts = [
            f"<CommonPrefixes><Prefix>{encoded(name)}</Prefix></CommonPrefixes>"
            if found is None
            else f"<Contents><Key>{encoded(name)}</Key><LastModified>{_iso(found)}</LastModified>"
            f"<ETag>{escape(found.etag)}</ETag><Size>{found.size}</Size></Contents>"
            for name, found in ((name, entries[name]) for name in page)
        ]
        more = len(page) < len(names)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        head = f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>{token}"
        kind = "<EncodingType>url</EncodingType>" if encoded is quote else ""
        return _xml("ListBucketResult", head + kind + "".join(texts))


def _not_implemented(request: Request, key: str) -> Answer:
    return _error("501 Not Implemented", "NotImplemented")


def _iso(found: Stored) -> str:
    return datetime.fromtimestamp(found.seconds, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _xml(name: str, content: str, status: str = "200 OK") -> Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}>{content}</{name}>'.encode()
    return Answer(status, _XML, [text], len(text))


def _error(status: str, code: str) -> Answer:
    return _xml("Error", f"<Code>{code}</Code><Message>{code}</Message>", status)
