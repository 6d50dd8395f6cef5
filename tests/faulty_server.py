"""A proxy in front of an S3 server that misbehaves as a test says: the network between, and the store itself."""

import http.client
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from servers import S3Server

Action = Callable[["_Handler"], None]


@dataclass
class Request:
    """What a rule sees."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    number: int
    """How many requests of this operation came before."""

    @property
    def operation(self) -> str:  # noqa: PLR0911 - one line per operation
        match self.method, sorted(self.query.keys() & {"uploads", "uploadId", "partNumber", "list-type", "delete"}):
            case "PUT", ["partNumber", "uploadId"]:
                return "UploadPart"
            case "POST", ["uploads"]:
                return "CreateMultipartUpload"
            case "POST", ["uploadId"]:
                return "CompleteMultipartUpload"
            case "DELETE", ["uploadId"]:
                return "AbortMultipartUpload"
            case "GET", ["uploads"]:
                return "ListMultipartUploads"
            case "GET", ["uploadId"]:
                return "ListParts"
            case "GET", ["list-type"]:
                return "ListObjectsV2"
            case "POST", ["delete"]:
                return "DeleteObjects"
        return {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}[self.method]


@dataclass
class FaultyServer:
    """`rule(request)` returns what to do instead of passing the request on, or None. `seen` has every operation."""

    server: S3Server
    rule: Callable[[Request], Action | None] = lambda request: None
    seen: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    """Set at the end: what hangs goes on."""
    busy: int = 0
    """Requests under way."""
    endpoint: str = ""


def answer(status: int, code: str, message: str = "said the test", body: bytes | None = None) -> Action:
    """The store refuses."""
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()

    def act(handler):
        handler.read_body()
        handler.reply(status, {"Content-Type": "application/xml"}, text if body is None else body)

    return act


def hang(handler) -> None:
    """The connection stays open; nothing is read from it and nothing answered."""
    handler.faulty.released.wait(60)
    handler.close_connection = True


def hang_up(handler) -> None:
    """The connection breaks before the store has seen the request."""
    handler.read_body()
    handler.close_connection = True


def lose_answer(handler) -> None:
    """The store does it; the answer never arrives."""
    handler.forward()
    handler.close_connection = True


def cut_answer(handler) -> None:
    """The connection breaks in the middle of the answer's body."""
    status, headers, body = handler.forward()
    handler.reply(status, headers, body[: len(body) // 2], announced=len(body))
    handler.close_connection = True


def reset_in_body(handler) -> None:
    """The connection is reset in the middle of the request's body, or before the answer if it has none."""
    length = int(handler.headers.get("Content-Length") or 0)
    handler.rfile.read(length // 2)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
    handler.close_connection = True


def delay(seconds: float) -> Action:
    """The request reaches the store late, whether or not anybody waits for the answer."""

    def act(handler):
        body = handler.read_body()
        handler.faulty.released.wait(seconds)
        handler.reply(*handler.forward(body))

    return act


def damage_body(handler) -> None:
    """A byte of the request's body is changed on the way."""
    body = bytearray(handler.read_body())
    body[len(body) // 2] ^= 0xFF
    handler.reply(*handler.forward(bytes(body)))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faulty: FaultyServer

    def log_message(self, *args) -> None:
        pass

    def handle_any(self) -> None:
        url = urlsplit(self.path)
        request = Request(self.command, url.path, parse_qs(url.query, keep_blank_values=True), dict(self.headers), 0)
        with _lock:
            request.number = self.faulty.seen.count(request.operation)
            self.faulty.seen.append(request.operation)
            self.faulty.busy += 1
        try:
            action = self.faulty.rule(request)
            if action is None:
                self.reply(*self.forward())
            else:
                action(self)
        finally:
            with _lock:
                self.faulty.busy -= 1

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815 - the names that http.server calls

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def forward(self, body: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
        body = self.read_body() if body is None else body
        upstream = http.client.HTTPConnection(urlsplit(self.faulty.server.endpoint).netloc, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body or None)
            response = upstream.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            upstream.close()

    def reply(self, status: int, headers: dict[str, str], body: bytes, announced: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in {"content-length", "transfer-encoding", "connection"} or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body) if announced is None else announced))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


_lock = threading.Lock()


@contextmanager
def faulty(server: S3Server) -> Iterator[FaultyServer]:
    """Yields it as it runs."""
    state = FaultyServer(server)
    handler = type("Handler", (_Handler,), {"faulty": state})
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    httpd.daemon_threads = True
    httpd.handle_error = lambda *_: None  # the client goes away: that is what is tested
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.05}, name="faulty", daemon=True)
    thread.start()
    state.endpoint = f"http://127.0.0.1:{httpd.server_port}"
    try:
        yield state
    finally:
        state.released.set()
        httpd.shutdown()
        httpd.server_close()
        thread.join(10)
