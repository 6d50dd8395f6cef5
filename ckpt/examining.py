"""Whether a place can hold runs: every verb tried on throw-away objects, and the traps that a store has set.

Writes only below a fresh folder, and removes it.
"""

from __future__ import annotations

import enum
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.attempts import enforces_create
from ckpt.credentials import Credentials
from ckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CkptError,
    StorageError,
    StorageFullError,
    TransientStorageError,
)
from ckpt.storage import RESERVED, Below, Storage, normalize_uri, open_storage, scheme_of

MAX_SKEW = 60.0
"""Seconds between two clocks; S3 refuses requests from 900 on."""
LOW_SPACE = 10 * 2**30
"""Bytes of free staging space below which there is a warning."""
_MEMORY = 20 * 2**20
"""Bytes for transfers; makes parts of S3's least size."""
_LARGE = 11 * 2**20
"""Bytes of a file that travels in parts then."""
_RETRY_BUDGET = 10.0
_STALL_TIMEOUT = 20.0
"""Seconds: a doctor does not wait for minutes."""


class Level(enum.StrEnum):
    """How bad a finding is."""

    OK = "OK"
    WARN = "WARN"
    """Works, and may cost money, time or safety."""
    FAIL = "FAIL"
    """Runs will fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found."""

    check: str
    level: Level
    said: str
    fix: str = ""
    """What to do; empty if nothing is wrong."""


def ok(check: str, said: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check=check, level=Level.OK, said=said)


def warn(check: str, said: str, fix: str) -> Finding:
    """It works, but."""
    return Finding(check=check, level=Level.WARN, said=said, fix=fix)


def fail(check: str, said: str, fix: str) -> Finding:
    """It does not work."""
    return Finding(check=check, level=Level.FAIL, said=said, fix=fix)


def examine_storage(
    uri: str, *, credentials: Credentials | None = None, storage_options: Mapping[str, Any] | None = None
) -> Iterator[Finding]:
    """Try everything that a run asks of a storage path.

    Args:
        uri: the storage path; it need not exist on a local disk.
        credentials: see `ckpt.credentials`.
        storage_options: without secrets.

    Yields:
        Findings as they are made; after one that makes the rest senseless there are no more.

    Raises:
        ConfigError: an argument can never work.
    """
    root = normalize_uri(uri)
    storage = open_storage(
        root, credentials=credentials or "env", storage_options=storage_options, memory_budget=_MEMORY,
        stall_timeout=_STALL_TIMEOUT, retry_budget=_RETRY_BUDGET,
    )  # fmt: skip
    with _probed(root, storage) as probe:
        found = list(_verbs(probe))
        yield from found
        if found[0].level is Level.FAIL:
            return
        if scheme_of(root) == "file":
            yield _file_clock(Path(root), probe)
    if scheme_of(root) == "s3":
        from ckpt._bucket import examine_bucket
        from ckpt._s3 import S3Storage

        yield from examine_bucket(S3Storage(root, credentials=credentials or "env", storage_options=storage_options))


def examine_staging(staging_dir: str | None, storage_path: str | None) -> Iterator[Finding]:
    """Whether there is room for what waits for its upload, and whether moving files there is free.

    Args:
        staging_dir: as in `RunConfig`; None: the system's temporary folder.
        storage_path: where runs go.
    """
    folder = Path(staging_dir or tempfile.gettempdir())
    try:
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield fail(
            "staging", f"{folder} cannot be used: {error}", "set staging_dir to a folder on a local disk, or TMPDIR"
        )
        return
    amount = f"{folder} has {free / 2**30:.1f} GiB free"
    if free < LOW_SPACE:
        yield warn("staging", amount, "pending checkpoints (max_pending, 4) wait there: free space, or set staging_dir")
    else:
        yield ok("staging", amount)
    here = Path.cwd()
    if folder.stat().st_dev == here.stat().st_dev:
        yield ok("staging file system", f"the same as that of {here}: checkpoints are moved, not copied")
    elif storage_path is None or "://" in storage_path or _device_of(Path(storage_path)) != here.stat().st_dev:
        yield warn(
            "staging file system", f"not that of {here}: checkpoints saved there are copied inside report()",
            "save into ckpt.checkpoint_dir(), or set staging_dir to a folder on the file system of the checkpoints",
        )  # fmt: skip
    else:
        yield ok("staging file system", f"the storage path is on that of {here}: checkpoints are moved, not copied")


def _device_of(path: Path) -> int | None:
    """Of the nearest folder that is there."""
    return next((place.stat().st_dev for place in (path, *path.parents) if place.exists()), None)


@contextmanager
def _probed(root: str, storage: Storage) -> Iterator[Below]:
    """A fresh folder below the root; gone afterwards, as is a root that was not there."""
    probe = Below(storage, f"ckpt-doctor-{uuid.uuid4().hex}")
    is_new = scheme_of(root) == "file" and not Path(root).exists()
    try:
        yield probe
    finally:
        with suppress(StorageError):
            probe.delete([entry.key for entry in probe.list()])
        if is_new:
            for folder in (Path(root, RESERVED), Path(root)):
                with suppress(OSError):
                    folder.rmdir()


def _verbs(storage: Below) -> Iterator[Finding]:
    """Each verb of the seam, in an order where each needs only those before it; the first failure to write ends it."""
    data = os.urandom(1000)
    written = _tried("write", "s3:PutObject", lambda: storage.write("a/object", data))
    yield written
    if written.level is Level.FAIL:
        return
    yield _tried("read", "s3:GetObject", lambda: storage.read("a/object") == data, "it gives back other bytes")
    yield _tried(
        "list", "s3:ListBucket", lambda: [entry.key for entry in storage.list("a/")] == ["a/object"],
        "a listing does not show what was just written",
    )  # fmt: skip
    yield _tried("delete", "s3:DeleteObject", lambda: _deleted(storage), "what was deleted is still listed")
    yield _created(storage)
    yield _transferred(storage)


def _deleted(storage: Below) -> bool:
    storage.delete(["a/object"])
    return not list(storage.list("a/"))


def _tried(check: str, permission: str, verb: Callable[[], bool | None], otherwise: str = "") -> Finding:
    try:
        good = verb()
    except CkptError as error:
        return fail(check, str(error), _fix(error, permission))
    if good is False:
        return fail(check, otherwise, "take a store that shows at once what was written, as S3 does")
    return ok(check, "works")


def _fix(error: CkptError, permission: str) -> str:
    fixes: tuple[tuple[type[CkptError], str], ...] = (
        (AccessDeniedError, f"allow it ({permission} on S3, see docs/credentials.md), or name other credentials"),
        (BucketNotFoundError, "create the bucket, or correct its name or the endpoint"),
        (StorageFullError, "make room"),
        (TransientStorageError, "look at network, endpoint_url and the store's own health; then try again"),
    )
    return next((fix for kind, fix in fixes if isinstance(error, kind)), "the text says what is wrong")


def _created(storage: Below) -> Finding:
    check = "create if absent"
    try:
        enforced = enforces_create(storage)
    except CkptError as error:
        return fail(check, str(error), _fix(error, "s3:PutObject"))
    if enforced:
        return ok(check, "the store refuses to create what exists: one driver per run name is enforced")
    return warn(
        check, "the store ignores If-None-Match: two drivers on one run name cannot be kept apart",
        "never start one run name twice at a time, or take a store that heeds it (S3, Ceph, MinIO)",
    )  # fmt: skip


def _transferred(storage: Below) -> Finding:
    """A file large enough to travel in parts, there and back."""
    with tempfile.TemporaryDirectory(prefix="ckpt-doctor-") as folder:
        source, back = Path(folder, "there"), Path(folder, "back")
        try:
            source.write_bytes(os.urandom(_LARGE))
            began = time.monotonic()
            sent = storage.upload(source, "b/large", progress=lambda _: None)
            took = time.monotonic() - began
            same = storage.download("b/large", back, progress=lambda _: None).digest == sent.digest
        except CkptError as error:
            return fail("multipart", str(error), _fix(error, "s3:PutObject and s3:AbortMultipartUpload"))
        except OSError as error:
            return fail("multipart", str(error), "make room in the temporary folder")
    if not same:
        return fail("multipart", "a file came back different", "check the store and what is between: bytes are changed")
    return ok("multipart", f"{_LARGE / 2**20:.0f} MiB in parts, there in {took:.2f} s and back the same")


def _file_clock(root: Path, storage: Below) -> Finding:
    """The clock of the file server, if it is one."""
    try:
        before = time.time()
        storage.write("c/clock", b"")
        skew = Path(storage.uri, "c/clock").stat().st_mtime - before
    except (CkptError, OSError) as error:
        return fail("clock", f"{root}: {error}", "the text says what is wrong")
    return clock("clock", skew, "the storage's")


def clock(check: str, skew: float, whose: str) -> Finding:
    """A finding about the difference between this host's clock and another, in seconds."""
    if abs(skew) <= MAX_SKEW:
        return ok(check, f"within {max(1, round(abs(skew)))} s of {whose}")
    way = "behind" if skew > 0 else "ahead of"
    return fail(
        check, f"this host is {abs(skew):.0f} s {way} {whose}", "set the clock (NTP): signed requests are refused"
    )
