"""The asynchronous half of S3 storage: every request, and how files travel in parts. Paths are whole object keys."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from aiohttp import payload

from ckpt._files import NewFile, Source
from ckpt._s3_errors import code_of, from_answer, translate
from ckpt._transfer import Budget, HighWater, Watch, in_thread, keep
from ckpt.errors import (
    BucketNotFoundError,
    CredentialsExpiredError,
    ObjectExistsError,
    StorageError,
    TransientStorageError,
)
from ckpt.storage import Receipt

if TYPE_CHECKING:
    from aiohttp.abc import AbstractStreamWriter

T = TypeVar("T")
MAX_PARTS = 10_000
"""S3's own limit for one multipart upload."""
PARALLEL = 4
"""Parts of one file on the wire; more files at a time give more."""
TRIES = 6
"""Of one part, before the file is given up (and tried again as a whole outside)."""
PAGE = 1000
"""Objects in one answer of a listing, and in one request to delete: S3's own limit."""
_STEP = 256 * 2**10
_random = random.Random()
"""Of our own: a training must draw the same numbers with uploads as without."""
_NOT_BY_REQUEST = {"NoSuchUpload", "InvalidPart"}
"""Only the whole file can be tried again after these."""

logger = logging.getLogger("ckpt")


class Body(bytearray):
    """What a request sends; `moved` hears of every piece that is handed to the connection."""

    moved = HighWater(lambda _: None)


@payload.payload_type(Body, order=payload.Order.try_first)
class _BodyPayload(payload.Payload):
    """Sends a `Body` in small pieces: the event loop stays free, and the stall watch sees them move."""

    _autoclose = True

    def __init__(self, value: Body, *args: Any, **kwargs: Any) -> None:
        super().__init__(value, *args, **kwargs)
        self._size = len(value)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Send all of it."""
        await self.write_with_length(writer, None)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Send as much as was announced."""
        view = memoryview(self._value)[:content_length]
        self._value.moved.restart()  # aiohttp sends again by itself when a connection kept alive turns out to be dead
        for start in range(0, len(view), _STEP):
            piece = view[start : start + _STEP]
            self._value.moved(len(piece))  # first: the answer can be there before the last `write` returns
            await writer.write(piece)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """As text."""
        return bytes(self._value).decode(encoding, errors)


class _Range(NamedTuple):
    data: bytearray
    total: int
    """Bytes of the whole object."""
    etag: str | None


class S3Client:
    """Requests to one bucket.

    Args:
        fs: an asynchronous `s3fs.S3FileSystem`.
        bucket: its name.
        budget: the memory that transfers share.
        part_size: bytes of a part, where the file needs no larger ones.
    """

    def __init__(self, fs: Any, bucket: str, *, budget: Budget, part_size: int) -> None:
        self._fs = fs
        self._bucket = bucket
        self._budget = budget
        self._part_size = part_size

    async def close(self) -> None:
        """Close its connections."""
        if self._fs._s3 is not None:  # noqa: SLF001 - s3fs closes synchronously only, on a loop that is not ours
            await self._fs._s3creator.__aexit__(None, None, None)  # noqa: SLF001 - as above

    async def call(self, verb: str, path: str, method: str, **params: Any) -> Any:
        """One request, its failure translated.

        Args:
            verb: what the caller is doing, for the error.
            path: the object's key; for the error only, if `params` has no place for it.
            method: of the S3 client.
            params: its parameters; `Bucket` is added.
        """
        try:
            # Not `call_s3`: that one blocks its thread until fsspec's own loop has done it.
            return await self._fs._call_s3(method, Bucket=self._bucket, **params)  # noqa: SLF001
        except Exception as error:
            raise translate(verb, self.where(path), error) from error

    def where(self, path: str) -> str:
        """The URI of a key."""
        return f"s3://{self._bucket}/{path}"

    # ---------------------------------------------------------------------------------------------------- small objects

    async def create(self, path: str, data: bytes) -> None:
        """Put on the condition that there is none."""
        for attempt in range(TRIES):
            try:
                await self.put("create", path, Body(data), IfNoneMatch="*")
            except ObjectExistsError as error:
                raise ObjectExistsError(f"create {self.where(path)}: it exists") from error
            except TransientStorageError as error:
                # Another conditional write to this key is under way; S3 asks to repeat ours.
                if code_of(error) != "ConditionalRequestConflict" or attempt == TRIES - 1:
                    raise
                await asyncio.sleep(_backoff(attempt))
            else:
                return

    async def put(self, verb: str, path: str, body: Body, **params: Any) -> Any:
        """One PutObject, whose bytes the store checks."""
        return await self.call(verb, path, "put_object", Key=path, Body=body, ContentMD5=await _md5(body), **params)

    async def read(self, path: str, watch: Watch) -> bytes:
        """All bytes of an object."""
        answer = await self.call("read", path, "get_object", Key=path)
        return bytes(await self._receive("read", path, answer, watch.moved))

    async def listing(self, prefix: str, watch: Watch) -> list[dict[str, Any]]:
        """What ListObjectsV2 says of every object under a prefix, page after page."""
        found: list[dict[str, Any]] = []
        more: dict[str, Any] = {}
        while True:
            page = await self.call("list", prefix, "list_objects_v2", Prefix=prefix, MaxKeys=PAGE, **more)
            watch.moved(0)
            found += page.get("Contents", ())
            if not page.get("IsTruncated"):
                return found
            if more == (more := {"ContinuationToken": page.get("NextContinuationToken")}):
                raise StorageError(f"list {self.where(prefix)}: the store answers with the same page for ever")

    async def delete(self, paths: list[str], watch: Watch) -> None:
        """Remove objects; all are tried before the first failure is raised."""
        failed: list[BaseException] = []
        for start in range(0, len(paths), PAGE):
            watch.moved(0)
            some = paths[start : start + PAGE]
            try:
                failed += await self._delete_bulk(some)
            except (TransientStorageError, BucketNotFoundError) as error:
                failed.append(error)
            except StorageError as error:
                logger.info("s3://%s refuses to delete in bulk, so one by one (%s)", self._bucket, error)
                failed += await self._delete_singly(some, watch)
        if failed:
            raise failed[0]

    async def _delete_bulk(self, paths: list[str]) -> list[BaseException]:
        request = {"Objects": [{"Key": path} for path in paths], "Quiet": True}
        answer = await self.call("delete", paths[0], "delete_objects", Delete=request)
        return [
            from_answer(f"delete {self.where(said.get('Key', ''))}", said)
            for said in answer.get("Errors", ())
            if said.get("Code") not in {"NoSuchKey", "NoSuchVersion"}
        ]

    async def _delete_singly(self, paths: list[str], watch: Watch) -> list[BaseException]:
        slots = asyncio.Semaphore(16)

        async def one(path: str) -> None:
            async with slots:
                await self.call("delete", path, "delete_object", Key=path)
                watch.moved(0)

        done = await asyncio.gather(*map(one, paths), return_exceptions=True)
        return [
            error for error in done if isinstance(error, BaseException) and not isinstance(error, FileNotFoundError)
        ]

    # ----------------------------------------------------------------------------------------------------------- upload

    async def upload(self, source: Source, path: str, watch: Watch) -> Receipt:
        """A whole file."""
        part_size = max(self._part_size, _round_up(math.ceil(source.size / MAX_PARTS)))
        if source.size >= 2 * part_size:
            return await self._upload_parts(source, path, part_size, watch)
        async with self._budget.hold(source.size, watch):
            body = await in_thread(_read, source, source.size)
            source.check_unchanged()
            answer = await self._send(body, watch, lambda: self.put("upload", path, body))
        return Receipt(size=source.size, digest=source.digest, etag=_etag(answer))

    async def _upload_parts(self, source: Source, path: str, part_size: int, watch: Watch) -> Receipt:
        upload = await self._begin(path)
        try:
            parts = await self._send_parts(source, path, upload, part_size, watch)
            source.check_unchanged()
            with watch.waiting():  # a store may take minutes to put the parts together
                etag = await self._complete(path, upload, parts, source.size)
        except BaseException:
            await self._abort(path, upload)
            raise
        return Receipt(size=source.size, digest=source.digest, etag=etag)

    async def _begin(self, path: str) -> str:
        """The upload's id. If this is cancelled meanwhile, the answer is waited for and the upload aborted."""
        beginning = asyncio.ensure_future(self.call("upload", path, "create_multipart_upload", Key=path))
        try:
            answer = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(lambda done: self._abort_begun(path, done))
            raise
        except TransientStorageError:
            await asyncio.shield(keep(self._abort_unknown(path)))
            raise
        return str(answer["UploadId"])

    async def _abort_unknown(self, path: str) -> None:
        """After a beginning whose answer got lost: nobody else uploads to this key, so what is under way there is ours."""
        try:
            page = await self.call("abort", path, "list_multipart_uploads", Prefix=path)
            for found in page.get("Uploads", ()):
                if found["Key"] == path:
                    await self._abort_now(path, found["UploadId"])
        except StorageError as error:
            logger.debug("multipart uploads of %s could not be listed: %s", self.where(path), error)

    def _abort_begun(self, path: str, done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            return
        known = done.exception() is None
        keep(self._abort_now(path, done.result()["UploadId"]) if known else self._abort_unknown(path))

    async def _send_parts(self, source: Source, path: str, upload: str, part_size: int, watch: Watch) -> list[Any]:
        """Read parts in order and send a few at a time; the first failure cancels the others and waits for them."""
        sent: dict[int, str] = {}
        slots = asyncio.Semaphore(PARALLEL)

        async def send(number: int, body: Body) -> None:
            params = {
                "Key": path,
                "UploadId": upload,
                "PartNumber": number,
                "Body": body,
                "ContentMD5": await _md5(body),
            }
            answer = await self._send(body, watch, lambda: self.call("upload", path, "upload_part", **params))
            sent[number] = answer["ETag"]

        async with _tasks() as tasks:
            for number, start in enumerate(range(0, source.size, part_size), 1):
                size = min(part_size, source.size - start)
                await slots.acquire()
                held = await self._budget.acquire(size, watch)
                try:
                    body = await in_thread(_read, source, size)
                except BaseException:
                    self._budget.release(held)
                    raise
                task = tasks.create_task(send(number, body))
                # Not in the task's own `finally`: a task that is cancelled before its first step never gets there.
                task.add_done_callback(lambda _, held=held: self._budget.release(held))  # type: ignore[misc]
                task.add_done_callback(lambda _: slots.release())
        return [{"PartNumber": number, "ETag": sent[number]} for number in sorted(sent)]

    async def _complete(self, path: str, upload: str, parts: list[Any], size: int) -> str | None:
        """Put the parts together; returns the etag."""
        whole = {"Key": path, "UploadId": upload, "MultipartUpload": {"Parts": parts}}
        for attempt in range(TRIES):
            try:
                answer = await self.call("upload", path, "complete_multipart_upload", **whole)
            except CredentialsExpiredError:
                raise
            except TransientStorageError as error:
                if code_of(error) == "NoSuchUpload":
                    # An earlier request of ours did it and its answer got lost, or somebody aborted the upload.
                    return await self._completed(path, size, len(parts), error)
                if attempt == TRIES - 1:
                    raise
                await _pause(attempt, error)
            else:
                return await self._check_size(path, size) or _etag(answer)
        raise AssertionError("unreachable")

    async def _completed(self, path: str, size: int, parts: int, error: TransientStorageError) -> str | None:
        answer = await self.call("upload", path, "head_object", Key=path)
        etag = _etag(answer)
        if answer["ContentLength"] != size or (etag and "-" in etag and not etag.endswith(f"-{parts}")):
            raise error
        return etag

    async def _check_size(self, path: str, size: int) -> str | None:
        """Its etag as listings show it: gateways answer a multipart upload with another one than they list."""
        try:
            answer = await self.call("upload", path, "head_object", Key=path)
        except StorageError as error:
            logger.debug("after the upload: %s", error)
            return None
        if answer["ContentLength"] != size:
            raise TransientStorageError(f"upload {self.where(path)}: {answer['ContentLength']} bytes arrived of {size}")
        return _etag(answer)

    async def _send(self, body: Body, watch: Watch, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """A request with a body, tried again a few times."""

        async def once(count: HighWater) -> T:
            body.moved = count
            return await request()

        return await self._insist(watch, once)

    async def _insist(self, watch: Watch, request: Callable[[HighWater], Coroutine[Any, Any, T]]) -> T:
        """A request tried again a few times; every byte is counted once."""
        count = HighWater(watch.moved)
        for attempt in range(TRIES):
            count.restart()
            try:
                with watch.on_the_wire():
                    return await request(count)
            except CredentialsExpiredError:
                raise
            except TransientStorageError as error:
                if attempt == TRIES - 1 or code_of(error) in _NOT_BY_REQUEST:
                    raise
                await _pause(attempt, error)
        raise AssertionError("unreachable")

    async def _abort(self, path: str, upload: str) -> None:
        """Leave no part behind, also when this is cancelled once more."""
        await asyncio.shield(keep(self._abort_now(path, upload)))

    async def _abort_now(self, path: str, upload: str) -> None:
        where = {"Key": path, "UploadId": upload}
        try:
            for attempt in range(TRIES):
                await self.call("abort", path, "abort_multipart_upload", **where)
                # A part that was on the wire can land after the abort: S3 asks to look, and to abort again.
                if not (await self.call("abort", path, "list_parts", **where)).get("Parts"):
                    return
                await asyncio.sleep(_backoff(attempt))
        except TransientStorageError as error:
            if code_of(error) != "NoSuchUpload":
                logger.warning("multipart upload %s of %s may be left behind: %s", upload, self.where(path), error)
        except StorageError as error:
            if code_of(error) not in {"NoSuchKey", "404"}:
                logger.warning("multipart upload %s of %s may be left behind: %s", upload, self.where(path), error)

    async def abort_uploads(self, prefix: str, older_than: float, watch: Watch) -> int:
        """Abort the multipart uploads under a prefix that were begun more than so many seconds ago."""
        count = 0
        more: dict[str, Any] = {}
        while True:
            page = await self.call("abort", prefix, "list_multipart_uploads", Prefix=prefix, **more)
            for found in page.get("Uploads", ()):
                if (datetime.now(UTC) - found["Initiated"]).total_seconds() >= older_than:
                    await self._abort_now(found["Key"], found["UploadId"])
                    watch.moved(0)
                    count += 1
            if not page.get("IsTruncated"):
                return count
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    # --------------------------------------------------------------------------------------------------------- download

    async def download(self, path: str, new: NewFile, watch: Watch) -> str | None:
        """A whole object; returns its etag. The answer to the first range tells how many there are."""
        step = self._part_size
        async with self._budget.hold(step, watch):
            first = await self._range(path, 0, step, None, watch)
            await in_thread(new.write, first.data)
            first.data.clear()
        if first.total > step:
            await self._ranges(path, new, watch, first)
        if new.size != first.total:
            raise TransientStorageError(f"download {self.where(path)}: {new.size} bytes arrived of {first.total}")
        return first.etag

    async def _ranges(self, path: str, new: NewFile, watch: Watch, first: _Range) -> None:
        """The ranges after the first: fetched a few at a time, written in order."""
        step, starts = self._part_size, deque(range(self._part_size, first.total, self._part_size))
        window: deque[tuple[int, asyncio.Task[_Range]]] = deque()
        try:
            async with _tasks() as tasks:
                while starts or window:
                    while starts and len(window) < PARALLEL:
                        size = min(step, first.total - starts[0])
                        # With ranges at hand, write those first: two downloads that wait could hold all the memory.
                        held = self._budget.try_acquire(size) if window else await self._budget.acquire(size, watch)
                        if held is None:
                            break
                        start = starts.popleft()
                        window.append((held, tasks.create_task(self._range(path, start, size, first.etag, watch))))
                    await in_thread(new.write, (await window[0][1]).data)
                    self._budget.release(window.popleft()[0])
        finally:
            for held, _ in window:
                self._budget.release(held)

    async def _range(self, path: str, start: int, length: int, etag: str | None, watch: Watch) -> _Range:
        return await self._insist(watch, lambda moved: self._range_once(path, start, length, etag, moved))

    async def _range_once(
        self, path: str, start: int, length: int, etag: str | None, moved: Callable[[int], None]
    ) -> _Range:
        same = {"IfMatch": f'"{etag}"'} if etag else {}
        wanted = f"bytes={start}-{start + length - 1}"
        try:
            answer = await self.call("download", path, "get_object", Key=path, Range=wanted, **same)
        except ObjectExistsError as error:  # 412: the etag is another one now
            raise TransientStorageError(f"download {self.where(path)}: the object was replaced meanwhile") from error
        except StorageError as error:
            if start or code_of(error) not in {"InvalidRange", "416"}:
                raise
            answer = await self.call("download", path, "get_object", Key=path)  # it has no bytes, so no range of them
        total = int(answer.get("ContentRange", "").rpartition("/")[2] or answer["ContentLength"])
        if answer["ContentLength"] > length or ("ContentRange" not in answer and start):
            answer["Body"].close()
            raise StorageError(f"download {self.where(path)}: the store ignores the Range header")
        return _Range(await self._receive("download", path, answer, moved), total, _etag(answer))

    async def _receive(self, verb: str, path: str, answer: Any, moved: Callable[[int], None]) -> bytearray:
        size, data = int(answer["ContentLength"]), bytearray()
        try:
            async with answer["Body"] as body:
                while chunk := await body.read(_STEP):
                    data += chunk
                    moved(len(chunk))
        except Exception as error:
            raise translate(verb, self.where(path), error) from error
        if len(data) != size:
            raise TransientStorageError(f"{verb} {self.where(path)}: {len(data)} bytes arrived of {size}")
        return data


@contextlib.asynccontextmanager
async def _tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises the first failure itself, not a group of them."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        error: BaseException = failures
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__


def _read(source: Source, size: int) -> Body:
    body = Body(size)
    with memoryview(body) as view:
        source.read_into(view)
    return body


async def _md5(body: Body) -> str:
    """What Content-MD5 wants; the store refuses bytes that do not match."""
    if len(body) < _STEP:
        return _md5_now(body)
    return await in_thread(_md5_now, body)


def _md5_now(body: Body) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


def _etag(answer: Any) -> str | None:
    etag = answer.get("ETag")
    return str(etag).strip('"') if etag else None


def _round_up(size: int) -> int:
    return -(-size // 2**20) * 2**20


async def _pause(attempt: int, error: BaseException) -> None:
    seconds = _backoff(attempt)
    logger.info("trying again in %.1f s: %s", seconds, error)
    await asyncio.sleep(seconds)


def _backoff(attempt: int) -> float:
    return float(_random.uniform(0.5, 1.0) * min(10.0, 0.25 * 2**attempt))
