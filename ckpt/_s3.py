"""S3 and the stores that speak it (AWS, Ceph, MinIO, R2, ...), on the client of s3fs.

Only calls that are whole or nothing are used: PutObject with Content-MD5, which the store checks; multipart uploads
whose parts are checked likewise and which are aborted on any failure; ranged reads tied to one version by its etag.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from ckpt._files import NewFile, Source, translate_os_error
from ckpt._s3_client import Body, S3Client
from ckpt._s3_errors import translate
from ckpt._transfer import Budget, Watch, close_at_exit, immortal
from ckpt.credentials import Credentials, check_credentials, check_storage_options, merged, resolve_credentials
from ckpt.errors import AccessDeniedError, CkptError, ConfigError
from ckpt.storage import MEMORY_BUDGET, STALL_TIMEOUT, Entry, Progress, Receipt, check_key, normalize_uri, scheme_of

T = TypeVar("T")
PART_SIZE = 16 * 2**20
"""Bytes of a part: large enough that requests cost little, small enough that several fit a modest budget."""
MIN_PART_SIZE = 5 * 2**20
"""S3's own limit for all parts but the last."""
CONNECT_TIMEOUT = 10
"""Seconds."""
REFRESH_BEFORE = 300
"""Seconds before they expire at which credentials with a known end are fetched anew."""

logger = logging.getLogger("ckpt")
_alive: weakref.WeakSet[S3Storage] = weakref.WeakSet()


class S3Storage:
    """Objects under a prefix of a bucket.

    It pickles as its configuration, connects at its first use in each process, and is used by many threads at once.

    Args:
        uri: `s3://<bucket>/<prefix>`.
        credentials: see `ckpt.credentials`.
        storage_options: options of s3fs without secrets; `region` is understood too.
        memory_budget: bytes that all transfers of this storage together may hold.
        stall_timeout: seconds without a moved byte after which a transfer is cancelled.
        part_size: bytes of a part of a multipart upload; grows with the file so that 10,000 parts are enough. Left out:
            16 MiB, or less where four such do not fit into the budget.
    """

    def __init__(
        self,
        uri: str,
        *,
        credentials: Credentials = "env",
        storage_options: Mapping[str, Any] | None = None,
        memory_budget: int = MEMORY_BUDGET,
        stall_timeout: float = STALL_TIMEOUT,
        part_size: int | None = None,
    ) -> None:
        self._uri = normalize_uri(uri)
        if scheme_of(self._uri) != "s3":
            raise ConfigError(f"storage URI {self._uri!r} is not of S3")
        if part_size is None:
            part_size = max(MIN_PART_SIZE, min(PART_SIZE, memory_budget // 4))
        if not MIN_PART_SIZE <= part_size <= memory_budget:
            raise ConfigError(
                f"memory_budget ({memory_budget} bytes) must hold a part ({part_size}), a part at least {MIN_PART_SIZE}"
            )
        self._bucket, _, prefix = self._uri.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._credentials = check_credentials(credentials)
        self._options = check_storage_options(storage_options)
        self._memory_budget = memory_budget
        self._stall_timeout = stall_timeout
        self._part_size = part_size
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._connected: S3Client | None = None
        self._resolved: dict[str, Any] = {}
        """What `credentials` gave for the connection."""
        _alive.add(self)

    def __repr__(self) -> str:
        return f"S3Storage({self._uri!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in {"_lock", "_connected", "_resolved"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    @property
    def uri(self) -> str:
        """The root."""
        return self._uri

    def create(self, key: str, data: bytes) -> None:
        """Put the object on the condition that there is none (`If-None-Match: *`), or raise `ObjectExistsError`."""
        path = self._path(key)
        self._run("create", key, lambda client, _: client.create(path, data))

    def write(self, key: str, data: bytes) -> None:
        """Put the object."""
        path = self._path(key)
        self._run("write", key, lambda client, _: client.put("write", path, Body(data)))

    def read(self, key: str) -> bytes:
        """All bytes of the object."""
        path = self._path(key)
        return self._run("read", key, lambda client, watch: client.read(path, watch))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object whose key starts with `prefix`, by key, as the store says now.

        Keys that end with a slash are some tools' way to mark folders; they are no files and left out.
        """
        found = self._run("list", prefix, lambda client, watch: client.listing(self._prefix + prefix, watch))
        entries = [_entry(said, len(self._prefix)) for said in found if said["Key"][-1] != "/"]
        # Sorted here, because some stores do not answer in order (S3 Express, gateways).
        return iter(sorted(entries, key=lambda entry: entry.key))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove the objects, 1000 in a request; a missing one is fine."""
        paths = [self._path(key) for key in keys]
        self._run("delete", "", lambda client, watch: client.delete(paths, watch))

    def upload(self, source: Path, key: str, *, progress: Progress) -> Receipt:
        """Copy a local file to `key`: in one request, or from two part sizes on in parts, several at a time."""
        path, watch = self._path(key), Watch(progress, self._stall_timeout)
        with Source(source) as reading:
            return self._run("upload", key, lambda client, watch: client.upload(reading, path, watch), watch)

    def download(self, key: str, target: Path, *, progress: Progress) -> Receipt:
        """Copy an object to a local file, in ranges of one version of it, several at a time."""
        path, watch = self._path(key), Watch(progress, self._stall_timeout)
        try:
            with NewFile(target.parent) as new:
                etag = self._run("download", key, lambda client, watch: client.download(path, new, watch), watch)
                new.replace(target)
        except OSError as error:
            if error is watch.error:
                raise
            raise translate_os_error("write", target, error) from error
        return Receipt(size=new.size, digest=new.digest, etag=etag)

    def abort_uploads(self, *, older_than: float) -> int:
        """Abort multipart uploads under the root that dead processes left; a store bills their parts for ever.

        Args:
            older_than: seconds since an upload was begun; take more than a living one can last.

        Returns:
            How many there were.
        """
        return self._run("abort", "", lambda client, watch: client.abort_uploads(self._prefix, older_than, watch))

    def credentials_changed(self) -> bool:
        """Whether `credentials` gives something else by now than what the connection was made with."""
        if self._connected is None:
            return False
        with contextlib.suppress(CkptError):
            return resolve_credentials(self._credentials, "s3") != self._resolved
        return False

    def ask(self, method: str) -> dict[str, Any]:
        """What the store says about the bucket: `method` of the S3 client, such as `get_bucket_versioning`."""
        return self._run("ask", method, lambda client, _: client.call(method, "", method))

    def _path(self, key: str) -> str:
        path = self._prefix + check_key(key)
        if len(path.encode()) > 1024:
            raise ConfigError(
                f"key s3://{self._bucket}/{path} has over 1024 bytes, S3's limit; use a shorter storage path"
            )
        return path

    def _run(
        self, verb: str, key: str, work: Callable[[S3Client, Watch], Coroutine[Any, Any, T]], watch: Watch | None = None
    ) -> T:
        # A small request has no bytes to watch: twice the time covers one that hangs and one more try.
        watch = watch or Watch(lambda _: None, 2 * self._stall_timeout)
        return watch.run(work(self._client(), watch), f"{verb} {self._uri}/{key}")

    def _client(self) -> S3Client:
        with self._lock:
            if self._connected is None:
                client = self._connect()
                # It lives on in transfers under way; only when they too are done with it are its connections closed.
                weakref.finalize(self, close_at_exit(id(client), client.close)).atexit = False
                self._connected = client
            return self._connected

    def _connect(self) -> S3Client:
        import s3fs

        self._resolved = resolve_credentials(self._credentials, "s3")
        found = _named(self._resolved)
        try:
            session = _session(self._credentials, found)
        except Exception as error:
            raise translate("open", self._uri, error) from error
        options = _options(merged(found, self._options), self._memory_budget // self._part_size, self._stall_timeout)
        unknown = options.keys() - inspect.signature(s3fs.S3FileSystem.__init__).parameters.keys()
        if unknown:
            raise ConfigError(f"storage_options for {self._uri}: s3fs has no option {', '.join(sorted(unknown))}")
        try:
            fs = s3fs.S3FileSystem(
                asynchronous=True, skip_instance_cache=True, use_listings_cache=False, session=session, **options
            )
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"storage_options for {self._uri}: s3fs says {error}") from error
        fs.retries = 1  # its own know too few errors and give up within two seconds
        return S3Client(fs, self._bucket, budget=Budget(self._memory_budget), part_size=self._part_size)

    def _forked(self) -> None:
        if self._connected is not None:
            immortal(self._connected)
        self._begin()


def _after_fork() -> None:
    for storage in list(_alive):
        storage._forked()  # noqa: SLF001 - this module's own


os.register_at_fork(after_in_child=_after_fork)


def _options(given: Mapping[str, Any], parts: int, stall_timeout: float) -> dict[str, Any]:
    """Options of s3fs: what a checkpoint needs, under what the user says."""
    config = {
        "connect_timeout": CONNECT_TIMEOUT,
        "read_timeout": max(60.0, stall_timeout),
        "max_pool_connections": max(16, min(64, parts)),
        # We try again ourselves; botocore's way draws from the global random numbers, which belong to the training.
        "retries": {"mode": "standard", "total_max_attempts": 1},
        # Newer SDKs send checksums in a trailer otherwise, which Ceph and others refuse; Content-MD5 does it for us.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "tcp_keepalive": True,
        **given.get("config_kwargs", {}),
    }
    # Content-MD5 covers the body; a SHA-256 of it on top would be computed on the event loop.
    config["s3"] = {"payload_signing_enabled": False, **config.get("s3", {})}
    options = {**given, "config_kwargs": config}
    region = options.pop("region", None) or options.pop("region_name", None)
    if region:
        options["client_kwargs"] = {"region_name": region, **options.get("client_kwargs", {})}
    return options


def _named(found: Mapping[str, Any]) -> dict[str, Any]:
    """Credentials under the names that s3fs has for them."""
    names = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "aws_session_token": "token"}
    return {names.get(name, name): value for name, value in found.items()}


def _session(credentials: Credentials, found: dict[str, Any]) -> Any:
    """A session of botocore; takes out of `found` what it cares for itself.

    Where the end of the credentials is known, it asks for new ones by itself before that.
    """
    from aiobotocore.session import AioSession

    session = AioSession(profile=found.pop("profile", None))
    # The descriptions of AWS's services are parsed once in a process, not for every storage.
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    if found.get("expires_at") is not None:
        session._credentials = _renewing(credentials, found)  # noqa: SLF001 - there is no public way
        for name in ("key", "secret", "token"):
            found.pop(name, None)
    found.pop("expires_at", None)
    return session


@functools.cache
def _loader(data_path: str | None) -> Any:
    from botocore.loaders import create_loader

    return create_loader(data_path)


def _renewing(credentials: Credentials, found: Mapping[str, Any]) -> Any:
    from aiobotocore.credentials import AioRefreshableCredentials

    def metadata(options: Mapping[str, Any]) -> dict[str, Any]:
        if not {"key", "secret", "expires_at"} <= options.keys():
            raise AccessDeniedError("credentials with expires_at must have key and secret (and token), each time")
        keys = {"access_key": options["key"], "secret_key": options["secret"], "token": options.get("token")}
        return {**keys, "expiry_time": _iso(options["expires_at"])}

    async def refresh() -> dict[str, Any]:
        logger.info("renewing credentials before they expire")
        return metadata(_named(await asyncio.to_thread(resolve_credentials, credentials, "s3")))

    return AioRefreshableCredentials.create_from_metadata(
        metadata(found), refresh, "prefect-ckpt", advisory_timeout=REFRESH_BEFORE, mandatory_timeout=REFRESH_BEFORE // 5
    )


def _iso(when: Any) -> str:
    if isinstance(when, int | float):
        when = datetime.fromtimestamp(when, UTC)
    return when.isoformat() if isinstance(when, datetime) else str(when)


def _entry(said: Mapping[str, Any], prefix: int) -> Entry:
    etag = said.get("ETag")
    return Entry(key=said["Key"][prefix:], size=said["Size"], etag=etag.strip('"') if etag else None)
