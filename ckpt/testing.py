"""For tests of what uses a storage, and for who writes one: a contract suite, and wrappers that inject behaviour.

A new storage is tested by a dozen lines:

    class TestMyStorage(StorageContract):
        @pytest.fixture
        def storage(self): ...

        @pytest.fixture
        def raw(self): ...        # a `Raw` that reaches the same place without the storage
"""

from __future__ import annotations

import fnmatch
import os
import pickle
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

import pytest
import xxhash

from ckpt.errors import ConfigError, ObjectExistsError, ObjectNotFoundError, SourceChangedError, TransientStorageError
from ckpt.storage import Entry, Progress, Receipt, Storage

T = TypeVar("T")
GATE_TIMEOUT = 60.0
"""Seconds after which a closed gate fails the test instead of hanging it."""

ODD_NAMES = (
    "with space", "plus+plus", "hash#tag", "question?mark", "percent%20", "slash%2Fcode", "amp&er=sand", "comma,semi;",
    "it's \"quoted\"", "back\\slash", "tilde~", "[bracket]*", "{brace}", "<angle>|pipe", "colon:at@", "$dollar!",
    ".hidden",
    "..dots", "trailing.", "-dash", "emoji-\N{ROCKET}", "\u00fcml\u00e4ut", "\u65e5\u672c\u8a9e",
)  # fmt: skip
"""Names of files that people really have."""
BAD_KEYS = (
    "",
    "/a",
    "a/",
    "a//b",
    "./a",
    "a/../b",
    "..",
    "a\0b",
    "a\nb",
    "x" * 2000,
    ".ckpt-tmp/a",
    "a/.ckpt-tmp-1",
    "a\udc80",
)
"""Keys that no storage takes."""


class Raw(Protocol):
    """The same place, reached behind the storage's back."""

    def put(self, key: str, data: bytes) -> None:
        """Make the object hold `data`."""

    def get(self, key: str) -> bytes:
        """All bytes of the object."""

    def keys(self) -> set[str]:
        """Keys of all objects."""

    def remove(self, key: str) -> None:
        """Remove the object."""


class StorageContract:
    """What every storage does. A subclass gives the fixtures `storage` (empty) and `raw`."""

    enforces_create = True
    """False for a store that accepts conditional writes and does not heed them."""
    keeps_unicode = True
    """False for a file system that takes composed and decomposed letters for the same."""
    odd_names: Sequence[str] = ODD_NAMES
    """Without those that the store itself cannot hold."""
    large = 33 * 2**20
    """Bytes of a file that is sent in parts, where the storage has such."""
    many = 1100
    """Objects of the listing that takes more than one page."""

    @pytest.fixture
    def storage(self) -> Storage:
        """The storage under test; empty."""
        raise NotImplementedError

    @pytest.fixture
    def raw(self) -> Raw:
        """The way around it."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------------------------- small objects

    def test_it_is_a_storage_with_a_plain_uri(self, storage: Storage) -> None:
        assert isinstance(storage, Storage)
        assert not storage.uri.endswith("/")
        assert storage.uri in repr(storage)

    def test_what_is_written_is_read(self, storage: Storage, raw: Raw) -> None:
        storage.write("a/b.json", b"one")
        assert storage.read("a/b.json") == raw.get("a/b.json") == b"one"

    def test_writing_replaces(self, storage: Storage, raw: Raw) -> None:
        storage.write("a", b"a longer one")
        storage.write("a", b"two")
        assert storage.read("a") == raw.get("a") == b"two"

    def test_an_empty_object_is_an_object(self, storage: Storage) -> None:
        storage.write("empty", b"")
        assert storage.read("empty") == b""
        assert [(entry.key, entry.size) for entry in storage.list()] == [("empty", 0)]

    def test_reading_what_is_not_there_says_so(self, storage: Storage) -> None:
        with pytest.raises(ObjectNotFoundError, match="not/there"):
            storage.read("not/there")

    def test_reading_is_not_cached(self, storage: Storage, raw: Raw) -> None:
        storage.write("a", b"old")
        assert storage.read("a") == b"old"
        raw.put("a", b"new one")
        assert storage.read("a") == b"new one"

    def test_create_makes_the_object(self, storage: Storage, raw: Raw) -> None:
        storage.create("commits/000001.a1.json", b"{}")
        assert raw.get("commits/000001.a1.json") == b"{}"

    def test_create_leaves_an_existing_object_alone(self, storage: Storage, raw: Raw) -> None:
        if not self.enforces_create:
            pytest.skip("this store does not heed conditions")
        raw.put("a", b"first")
        with pytest.raises(ObjectExistsError, match="/a: "):
            storage.create("a", b"second")
        assert raw.get("a") == b"first"
        assert raw.keys() == {"a"}

    def test_of_eight_racing_creates_one_wins(self, storage: Storage, raw: Raw) -> None:
        if not self.enforces_create:
            pytest.skip("this store does not heed conditions")
        for number in range(5):
            key, start = f"race/{number}", threading.Barrier(8)

            def create(racer: int, key: str = key, start: threading.Barrier = start) -> bytes | None:
                data = f"racer {racer}".encode() * 100
                start.wait(GATE_TIMEOUT)
                try:
                    storage.create(key, data)
                except ObjectExistsError:
                    return None
                return data

            with ThreadPoolExecutor(8) as pool:
                winners = [data for data in pool.map(create, range(8)) if data is not None]
            assert winners == [raw.get(key)]

    def test_create_works_again_after_a_delete(self, storage: Storage) -> None:
        storage.create("a", b"first")
        storage.delete(["a"])
        storage.create("a", b"second")
        assert storage.read("a") == b"second"

    def test_a_listing_has_every_key_and_size_in_order(self, storage: Storage) -> None:
        sizes = {"b": 3, "a/z": 1, "a/b/c": 2, "a-b": 0, "a.b": 4, "ab": 5, "\u00fc": 6}
        for key, size in sizes.items():
            storage.write(key, b"x" * size)
        assert [(entry.key, entry.size) for entry in storage.list()] == sorted(sizes.items())

    def test_a_prefix_is_a_string(self, storage: Storage) -> None:
        for key in ("run/a", "run-2/a", "run/ab/c", "ru", "x/run/a"):
            storage.write(key, b"")
        found = {
            prefix: [entry.key for entry in storage.list(prefix)]
            for prefix in ("run", "run/", "run/a", "run/ab/", "no", "run/no/")
        }
        assert found == {
            "run": ["run-2/a", "run/a", "run/ab/c"],
            "run/": ["run/a", "run/ab/c"],
            "run/a": ["run/a", "run/ab/c"],
            "run/ab/": ["run/ab/c"],
            "no": [],
            "run/no/": [],
        }

    def test_a_listing_of_nothing_is_empty(self, storage: Storage) -> None:
        assert list(storage.list()) == []
        assert list(storage.list("a/b")) == []

    def test_a_listing_is_never_from_a_cache(self, storage: Storage, raw: Raw) -> None:
        storage.write("f/a", b"1")
        assert [entry.key for entry in storage.list("f/")] == ["f/a"]
        raw.put("f/b", b"22")
        raw.put("g/c", b"")
        assert [entry.key for entry in storage.list("f/")] == ["f/a", "f/b"]
        raw.remove("f/a")
        raw.put("f/b", b"4444")
        assert [(entry.key, entry.size) for entry in storage.list()] == [("f/b", 4), ("g/c", 0)]

    def test_more_keys_than_a_page_are_listed_and_deleted(self, storage: Storage, raw: Raw) -> None:
        keys = [f"many/{number:05d}" for number in range(self.many)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: raw.put(key, b""), keys))
        assert [entry.key for entry in storage.list("many/")] == keys
        storage.delete(keys)
        assert raw.keys() == set()

    def test_delete_removes_what_is_named_and_nothing_else(self, storage: Storage, raw: Raw) -> None:
        for key in ("a", "a-b", "f/a", "f/g/h", "f2/a"):
            raw.put(key, b"")
        storage.delete(["a", "f/g/h"])
        assert raw.keys() == {"a-b", "f/a", "f2/a"}

    def test_deleting_what_is_not_there_is_fine(self, storage: Storage, raw: Raw) -> None:
        storage.write("a", b"")
        storage.delete([])
        storage.delete(["not/there", "a", "a", "b"])
        assert raw.keys() == set()

    def test_odd_names_come_back_as_they_are(self, storage: Storage, raw: Raw) -> None:
        keys = {f"{name}/x-{name}" for name in self.odd_names}
        for key in keys:
            storage.write(key, key.encode())
        assert {entry.key for entry in storage.list()} == raw.keys() == keys
        assert {key: storage.read(key) for key in keys} == {key: key.encode() for key in keys}
        assert {key: [entry.key for entry in storage.list(key)] for key in keys} == {key: [key] for key in keys}
        storage.delete(keys)
        assert raw.keys() == set()

    def test_composed_and_decomposed_letters_are_two_names(self, storage: Storage) -> None:
        if not self.keeps_unicode:
            pytest.skip("this file system takes them for the same")
        names = {form: unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD")}
        for form, name in names.items():
            storage.write(name, form.encode())
        assert {form: storage.read(name) for form, name in names.items()} == {"NFC": b"NFC", "NFD": b"NFD"}
        assert {entry.key for entry in storage.list()} == set(names.values())

    def test_a_bad_key_is_refused_by_every_verb(self, storage: Storage, raw: Raw, tmp_path: Path) -> None:
        source = _file(tmp_path / "source", b"x")
        target = tmp_path / "target"
        verbs: dict[str, Callable[[str], object]] = {
            "create": lambda key: storage.create(key, b""),
            "write": lambda key: storage.write(key, b""),
            "read": storage.read,
            "delete": lambda key: storage.delete([key]),
            "upload": lambda key: storage.upload(source, key, progress=_ignore),
            "download": lambda key: storage.download(key, target, progress=_ignore),
        }
        for key in BAD_KEYS:
            for verb in verbs.values():
                with pytest.raises(ConfigError):
                    verb(key)
        assert raw.keys() == set()
        assert not target.exists()

    # ------------------------------------------------------------------------------------------------------------ files

    @pytest.mark.parametrize("kind", ["empty", "small", "large"])
    def test_a_file_goes_up_and_comes_down_as_it_is(
        self, storage: Storage, raw: Raw, tmp_path: Path, kind: str
    ) -> None:
        data = self._data(kind)
        source = _file(tmp_path / "source", data)
        up, down = _Sum(), _Sum()
        sent = storage.upload(source, "f/file.pt", progress=up)
        assert raw.get("f/file.pt") == data
        got = storage.download("f/file.pt", tmp_path / "new/folder/target", progress=down)
        assert (tmp_path / "new/folder/target").read_bytes() == data
        assert sent.digest == got.digest == f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}"
        assert sent.size == got.size == up.total == down.total == len(data)
        assert _names(tmp_path / "new/folder") == ["target"]

    @pytest.mark.parametrize("kind", ["empty", "small", "large"])
    def test_a_receipt_agrees_with_a_later_listing(self, storage: Storage, tmp_path: Path, kind: str) -> None:
        sent = storage.upload(_file(tmp_path / "source", self._data(kind)), "file", progress=_ignore)
        (entry,) = storage.list()
        assert (entry.key, entry.size) == ("file", sent.size)
        assert entry.etag == sent.etag

    def test_uploading_replaces(self, storage: Storage, raw: Raw, tmp_path: Path) -> None:
        raw.put("file", b"old and longer")
        storage.upload(_file(tmp_path / "source", b"new"), "file", progress=_ignore)
        assert raw.get("file") == b"new"

    @pytest.mark.parametrize("kind", ["small", "large"])
    def test_an_upload_that_progress_stops_leaves_nothing(
        self, storage: Storage, raw: Raw, tmp_path: Path, kind: str
    ) -> None:
        source = _file(tmp_path / "source", self._data(kind))
        with pytest.raises(_StopError, match="enough"):
            storage.upload(source, "f/file", progress=_stop_at(source.stat().st_size // 2))
        assert list(storage.list()) == []
        assert raw.keys() == set()
        storage.upload(source, "f/file", progress=_ignore)
        assert raw.get("f/file") == source.read_bytes()

    @pytest.mark.parametrize("kind", ["small", "large"])
    def test_an_upload_that_progress_stops_keeps_the_old_object(
        self, storage: Storage, raw: Raw, tmp_path: Path, kind: str
    ) -> None:
        raw.put("file", b"old")
        source = _file(tmp_path / "source", self._data(kind))
        with pytest.raises(_StopError):
            storage.upload(source, "file", progress=_stop_at(source.stat().st_size // 2))
        assert raw.get("file") == b"old"

    def test_what_progress_raises_is_not_taken_for_the_stores_error(self, storage: Storage, tmp_path: Path) -> None:
        source = _file(tmp_path / "source", b"x" * 1000)
        storage.write("there", b"x" * 1000)
        for error in (
            TransientStorageError("mine"),
            TimeoutError("mine"),
            PermissionError("mine"),
            KeyboardInterrupt(),
        ):
            with pytest.raises(type(error)) as up:
                storage.upload(source, "file", progress=_raise(error))
            with pytest.raises(type(error)) as down:
                storage.download("there", tmp_path / "target", progress=_raise(error))
            assert up.value is down.value is error

    def test_a_source_that_is_gone_is_a_changed_source(self, storage: Storage, raw: Raw, tmp_path: Path) -> None:
        with pytest.raises(SourceChangedError, match="source"):
            storage.upload(tmp_path / "source", "file", progress=_ignore)
        assert raw.keys() == set()

    def test_a_source_that_shrinks_is_a_changed_source(self, storage: Storage, raw: Raw, tmp_path: Path) -> None:
        source = _file(tmp_path / "source", self._data("large"))
        with pytest.raises(SourceChangedError, match="source"):
            storage.upload(source, "file", progress=lambda _: os.truncate(source, self.large // 2))
        assert raw.keys() == set()

    def test_downloading_what_is_not_there_leaves_no_file(self, storage: Storage, tmp_path: Path) -> None:
        with pytest.raises(ObjectNotFoundError, match="not/there"):
            storage.download("not/there", tmp_path / "new/target", progress=_ignore)
        assert not (tmp_path / "new").exists() or _names(tmp_path / "new") == []

    @pytest.mark.parametrize("kind", ["small", "large"])
    def test_a_download_that_progress_stops_leaves_the_old_file(
        self, storage: Storage, raw: Raw, tmp_path: Path, kind: str
    ) -> None:
        data = self._data(kind)
        raw.put("file", data)
        folder = tmp_path / "folder"
        folder.mkdir()
        target = _file(folder / "target", b"old")
        with pytest.raises(_StopError):
            storage.download("file", target, progress=_stop_at(len(data) // 2))
        assert target.read_bytes() == b"old"
        assert _names(folder) == ["target"]

    def test_downloading_replaces(self, storage: Storage, raw: Raw, tmp_path: Path) -> None:
        raw.put("file", b"new")
        target = _file(tmp_path / "target", b"old and longer")
        storage.download("file", target, progress=_ignore)
        assert target.read_bytes() == b"new"

    def test_many_threads_use_one_storage(self, storage: Storage, raw: Raw, tmp_path: Path) -> None:
        files = {f"f/{number}": os.urandom(50_000 + number) for number in range(32)}

        def both_ways(number: int, key: str) -> bytes:
            target = tmp_path / f"target-{number}"
            storage.upload(_file(tmp_path / f"source-{number}", files[key]), key, progress=_ignore)
            storage.download(key, target, progress=_ignore)
            return target.read_bytes()

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(both_ways, range(len(files)), files)) == list(files.values())
        assert raw.keys() == set(files)

    def test_a_pickled_storage_reaches_the_same_objects(self, storage: Storage, raw: Raw) -> None:
        storage.write("a", b"1")
        again: Storage = pickle.loads(pickle.dumps(storage))  # noqa: S301 - of our own making
        assert again.uri == storage.uri
        assert again.read("a") == b"1"
        again.write("b", b"2")
        assert raw.keys() == {"a", "b"}

    def _data(self, kind: str) -> bytes:
        size = {"empty": 0, "small": 100_000, "large": self.large}[kind]
        return (os.urandom(1009) * (size // 1009 + 1))[:size]


# ------------------------------------------------------------------------------------------------------------- wrappers


class WrappedStorage:
    """Passes everything on; `around` is the one place to inject behaviour.

    Args:
        inner: does the work.
    """

    def __init__(self, inner: Storage) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def around(self, verb: str, key: str, work: Callable[[], T], progress: Progress | None = None) -> T:
        """Called for each verb with the key (of a listing: the prefix; a delete: once for each key first, then "")."""
        return work()

    @property
    def uri(self) -> str:
        """The inner one's."""
        return self.inner.uri

    def create(self, key: str, data: bytes) -> None:
        """Passed on."""
        self.around("create", key, lambda: self.inner.create(key, data))

    def write(self, key: str, data: bytes) -> None:
        """Passed on."""
        self.around("write", key, lambda: self.inner.write(key, data))

    def read(self, key: str) -> bytes:
        """Passed on."""
        return self.around("read", key, lambda: self.inner.read(key))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Passed on."""
        return iter(self.around("list", prefix, lambda: tuple(self.inner.list(prefix))))

    def delete(self, keys: Iterable[str]) -> None:
        """Passed on, key by key; all are tried."""
        failed = [error for error in map(self._delete, keys) if error is not None]
        if failed:
            raise failed[0]

    def _delete(self, key: str) -> Exception | None:
        try:
            self.around("delete", key, lambda: self.inner.delete([key]))
        except Exception as error:  # noqa: BLE001 - raised by `delete`
            return error
        return None

    def upload(self, source: Path, key: str, *, progress: Progress) -> Receipt:
        """Passed on."""
        return self.around("upload", key, lambda: self.inner.upload(source, key, progress=progress), progress)

    def download(self, key: str, target: Path, *, progress: Progress) -> Receipt:
        """Passed on."""
        return self.around("download", key, lambda: self.inner.download(key, target, progress=progress), progress)


class CountingStorage(WrappedStorage):
    """Counts the calls of each verb in `counts`."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def around(self, verb: str, key: str, work: Callable[[], T], progress: Progress | None = None) -> T:
        """Count, then work."""
        with self._lock:
            self.counts[verb] += 1
        return work()


class RecordingStorage(WrappedStorage):
    """Keeps `(verb, key)` of every call in `calls`, in the order in which they began."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.calls: Sequence[tuple[str, str]] = ()
        self._lock = threading.Lock()

    def around(self, verb: str, key: str, work: Callable[[], T], progress: Progress | None = None) -> T:
        """Note, then work."""
        with self._lock:
            self.calls = (*self.calls, (verb, key))
        return work()


class FailingStorage(WrappedStorage):
    """Raises what a schedule says.

    Args:
        inner: does the work.
        schedule: called with verb, key and how many calls of this verb came before; returns the error to raise, or
            None.
        after: do the work first and raise then, as when an answer gets lost.
    """

    def __init__(
        self, inner: Storage, schedule: Callable[[str, str, int], BaseException | None], *, after: bool = False
    ) -> None:
        super().__init__(inner)
        self._schedule = schedule
        self._after = after
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()

    def around(self, verb: str, key: str, work: Callable[[], T], progress: Progress | None = None) -> T:
        """Ask the schedule."""
        with self._lock:
            error = self._schedule(verb, key, self._seen[verb])
            self._seen[verb] += 1
        if error is not None and not self._after:
            raise error
        result = work()
        if error is not None:
            raise error
        return result


class FailOnceStorage(FailingStorage):
    """Fails the first `times` calls of a verb on keys that match a pattern.

    Args:
        inner: does the work.
        verb: which one fails.
        pattern: of the keys, as in a shell; `*` matches `/` too.
        error: what is raised.
        times: how often.
        after: do the work first, as when an answer gets lost.
    """

    def __init__(
        self,
        inner: Storage,
        verb: str,
        pattern: str = "*",
        *,
        error: BaseException | None = None,
        times: int = 1,
        after: bool = False,
    ) -> None:
        left = times

        def schedule(called: str, key: str, _: int) -> BaseException | None:
            nonlocal left
            if called != verb or not left or not fnmatch.fnmatchcase(key, pattern):
                return None
            left -= 1
            return error or TransientStorageError(f"{verb} {key}: injected by a test")

        super().__init__(inner, schedule, after=after)


class SlowStorage(WrappedStorage):
    """Holds calls back until the test opens the gate.

    While a transfer is held back its `progress` is called with 0 now and then, so that it can be cancelled.

    Args:
        inner: does the work.
        verbs: which calls are held back.
        pattern: of the keys, as in a shell.
    """

    def __init__(self, inner: Storage, *verbs: str, pattern: str = "*") -> None:
        super().__init__(inner)
        self.gate = threading.Event()
        self.waiting = threading.Semaphore(0)
        self._verbs = verbs or ("upload",)
        self._pattern = pattern

    def wait_until_held(self, count: int = 1) -> None:
        """Return once so many calls have arrived at the gate."""
        for _ in range(count):
            assert self.waiting.acquire(timeout=GATE_TIMEOUT), "no call arrived at the gate"

    def around(self, verb: str, key: str, work: Callable[[], T], progress: Progress | None = None) -> T:
        """Wait at the gate, then work."""
        if verb in self._verbs and fnmatch.fnmatchcase(key, self._pattern):
            self.waiting.release()
            for _ in range(int(GATE_TIMEOUT / 0.02)):
                if self.gate.wait(0.02):
                    break
                if progress is not None:
                    progress(0)
            else:
                raise AssertionError("the test never opened the gate")
        return work()


# -------------------------------------------------------------------------------------------------------------- private


class _StopError(Exception):
    """What a test's progress function raises."""


class _Sum:
    """Adds up progress."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        assert count >= 0
        with self._lock:
            self.total += count


def _ignore(count: int) -> None:
    assert count >= 0


def _raise(error: BaseException) -> Progress:
    def progress(_: int) -> None:
        raise error

    return progress


def _stop_at(limit: int) -> Progress:
    seen = _Sum()

    def progress(count: int) -> None:
        seen(count)
        if seen.total > limit:
            raise _StopError("enough")

    return progress


def _file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
