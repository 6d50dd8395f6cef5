"""Every storage keeps one contract; what is special to each is tested below it."""

import errno
import fcntl
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import _s3_client, errors
from ckpt._fsspec import FsspecStorage
from ckpt._local import LocalStorage
from ckpt._memory import MemoryStorage
from ckpt._s3 import MIN_PART_SIZE, S3Storage
from ckpt.storage import open_storage
from ckpt.testing import StorageContract

# ------------------------------------------------------------------------------------------------------- the contract


class _RawFolder:
    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, key, data):
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def get(self, key):
        return (self.root / key).read_bytes()

    def keys(self):
        return {
            path.relative_to(self.root).as_posix()
            for path in self.root.rglob("*")
            if path.is_file() and ".ckpt-tmp" not in path.as_posix()
        }

    def remove(self, key):
        (self.root / key).unlink()


class TestLocal(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path):
        return open_storage(tmp_path / "store/run")

    @pytest.fixture
    def raw(self, tmp_path):
        return _RawFolder(tmp_path / "store/run")


class TestMemory(StorageContract):
    @pytest.fixture
    def storage(self):
        return open_storage(f"memory://{uuid4().hex}/run")

    @pytest.fixture
    def raw(self, storage):
        return _RawStorage(storage.uri)


class _RawStorage:
    """Through a second memory storage, one level up."""

    def __init__(self, uri: str) -> None:
        root, _, self.name = uri.rpartition("/")
        self.store = MemoryStorage(root)

    def put(self, key, data):
        self.store.write(f"{self.name}/{key}", data)

    def get(self, key):
        return self.store.read(f"{self.name}/{key}")

    def keys(self):
        return {entry.key.removeprefix(f"{self.name}/") for entry in self.store.list(f"{self.name}/")}

    def remove(self, key):
        self.store.delete([f"{self.name}/{key}"])


class _RawFsspec:
    def __init__(self, fs, root) -> None:
        self.fs, self.root = fs, root

    def put(self, key, data):
        self.fs.pipe_file(f"{self.root}/{key}", data)

    def get(self, key):
        return bytes(self.fs.cat_file(f"{self.root}/{key}"))

    def keys(self):
        self.fs.invalidate_cache()
        return {name[len(self.root) + 1 :] for name in self.fs.find(self.root)}

    def remove(self, key):
        self.fs.rm_file(f"{self.root}/{key}")


class TestFsspecMemory(StorageContract):
    enforces_create = False  # fsspec's memory file system looks first and puts then

    @pytest.fixture
    def root(self):
        import fsspec

        fs, root = fsspec.filesystem("memory"), f"/{uuid4().hex}/run"
        yield root
        if fs.exists(root):
            fs.rm(root, recursive=True)

    @pytest.fixture
    def storage(self, root):
        return FsspecStorage(f"memory:/{root}")

    @pytest.fixture
    def raw(self, root):
        import fsspec

        return _RawFsspec(fsspec.filesystem("memory"), root)


class TestFsspecFolder(StorageContract):
    """A file system that renames, as SFTP, SMB and HDFS do."""

    enforces_create = False

    @pytest.fixture
    def storage(self, tmp_path, monkeypatch):
        _register_folder_fs()
        return FsspecStorage(f"ckptfolder://{tmp_path}/store/run")

    @pytest.fixture
    def raw(self, tmp_path):
        return _RawFolder(tmp_path / "store/run")


def _register_folder_fs():
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    class FolderFileSystem(LocalFileSystem):
        """The local one with nothing but what a remote one has: streams and a rename."""

        protocol = "ckptfolder"
        pipe_file = fsspec.AbstractFileSystem.pipe_file
        put_file = fsspec.AbstractFileSystem.put_file

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(path.removeprefix("ckptfolder://"))

    fsspec.register_implementation("ckptfolder", FolderFileSystem, clobber=True)


class _RawS3:
    def __init__(self, server, bucket, prefix) -> None:
        self.client, self.bucket, self.prefix = server.client(), bucket, prefix

    def put(self, key, data):
        self.client.put_object(Bucket=self.bucket, Key=self.prefix + key, Body=data)

    def get(self, key):
        return self.client.get_object(Bucket=self.bucket, Key=self.prefix + key)["Body"].read()

    def keys(self):
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.prefix)
        return {found["Key"].removeprefix(self.prefix) for page in pages for found in page.get("Contents", ())}

    def remove(self, key):
        self.client.delete_object(Bucket=self.bucket, Key=self.prefix + key)

    def uploads(self):
        try:
            found = self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])
        except self.client.exceptions.NoSuchUpload:  # rclone says so when there is none at all
            return []
        return [upload["Key"] for upload in found if upload["Key"].startswith(self.prefix)]


@cache
def _bucket_on(server):
    """One bucket for the session; each test has a prefix of its own in it."""
    name = f"bucket-{uuid4().hex}"
    server.client().create_bucket(Bucket=name)
    return name


class S3Contract(StorageContract):
    """A subclass gives the fixture `server`."""

    large = 12 * 2**20

    @pytest.fixture
    def bucket(self, server):
        return _bucket_on(server)

    @pytest.fixture
    def prefix(self, server, monkeypatch):
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        return f"runs/{uuid4().hex}/"

    @pytest.fixture
    def storage(self, bucket, prefix):
        storage = S3Storage(f"s3://{bucket}/{prefix}", part_size=MIN_PART_SIZE)
        yield storage
        storage.delete([entry.key for entry in storage.list()])

    @pytest.fixture
    def raw(self, server, bucket, prefix):
        return _RawS3(server, bucket, prefix)

    @pytest.fixture(autouse=True)
    def no_part_is_left(self, raw):
        yield
        assert raw.uploads() == []

    def test_an_upload_that_the_source_stops_leaves_no_part(self, storage, raw, tmp_path):
        source = tmp_path / "source"
        source.write_bytes(bytes(self.large))
        with pytest.raises(errors.SourceChangedError):
            storage.upload(source, "file", progress=lambda count: os.utime(source, (0, 0)))
        assert raw.uploads() == []

    def test_a_missing_bucket_is_named(self, storage):
        missing = f"missing-{uuid4().hex}"
        for work in (lambda s: s.write("a", b""), lambda s: list(s.list()), lambda s: s.read("a")):
            with pytest.raises(errors.BucketNotFoundError, match=missing):
                work(S3Storage(f"s3://{missing}/runs"))

    def test_a_range_of_large_files_fits_a_small_budget(self, storage, bucket, tmp_path):
        """More transfers at a time than the memory budget has parts: they wait for each other, and all arrive."""
        storage = S3Storage(storage.uri, part_size=MIN_PART_SIZE, memory_budget=MIN_PART_SIZE + 1)
        data = os.urandom(1000) * (self.large // 1000)
        (tmp_path / "source").write_bytes(data)

        def both_ways(number):
            target = tmp_path / f"target-{number}"
            storage.upload(tmp_path / "source", f"file-{number}", progress=lambda _: None)
            storage.download(f"file-{number}", target, progress=lambda _: None)
            return target.read_bytes() == data

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(both_ways, range(4)))

    def test_a_forked_child_uses_a_storage_of_its_parent(self, storage, raw):
        storage.write("parent", b"1")
        child = os.fork()
        if child == 0:  # pragma: no cover - in the child
            try:
                storage.write("child", storage.read("parent"))
            finally:
                os._exit(0)
        _wait_for_child(child)
        storage.write("parent", b"2")
        assert raw.keys() == {"parent", "child"}
        assert (raw.get("parent"), raw.get("child")) == (b"2", b"1")


def _wait_for_child(child):
    deadline = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.01)


class TestMoto(S3Contract):
    many = 50

    @pytest.fixture(autouse=True)
    def small_pages(self, monkeypatch):
        monkeypatch.setattr(_s3_client, "PAGE", 20)

    @pytest.fixture
    def server(self, moto_server):
        return moto_server

    def test_listing_keys_of_a_folder_marker_leaves_it_out(self, storage, raw):
        raw.put("folder/", b"")
        raw.put("folder/a", b"1")
        assert [entry.key for entry in storage.list()] == ["folder/a"]
        raw.remove("folder/")

    def test_uploads_of_dead_processes_are_aborted(self, storage, raw, bucket):
        other = f"other/{uuid4().hex}"
        for key in (f"{raw.prefix}a", f"{raw.prefix}b", other):
            raw.client.create_multipart_upload(Bucket=bucket, Key=key)
        century = 100 * 365 * 24 * 3600  # moto says that every upload was begun in 2010
        assert storage.abort_uploads(older_than=century) == 0
        assert storage.abort_uploads(older_than=0) == 2
        assert raw.uploads() == []
        assert S3Storage(f"s3://{bucket}").abort_uploads(older_than=0) == 1

    def test_the_bucket_itself_is_a_root(self, server, storage, raw):
        raw.client.create_bucket(Bucket="whole")
        storage = S3Storage("s3://whole/")
        storage.write("a/b", b"1")
        assert storage.uri == "s3://whole"
        assert [entry.key for entry in storage.list("a")] == ["a/b"]


class TestRclone(S3Contract):
    enforces_create = False
    many = 50  # it reads the whole folder for each request

    @pytest.fixture
    def server(self, rclone_server):
        return rclone_server


@pytest.mark.ceph
class TestCeph(S3Contract):
    @pytest.fixture
    def server(self, ceph_server):
        return ceph_server


class TestRetryingMoto(S3Contract):
    """What `open_storage` gives for S3."""

    many = 10
    large = StorageContract.large

    @pytest.fixture
    def server(self, moto_server):
        return moto_server

    @pytest.fixture
    def storage(self, bucket, prefix):
        storage = open_storage(f"s3://{bucket}/{prefix}")
        yield storage
        storage.delete([entry.key for entry in storage.list()])


# ------------------------------------------------------------------------------------------------------- a local folder


@pytest.fixture
def local(tmp_path):
    return LocalStorage(tmp_path / "store")


def _leftover(local, age, folder=""):
    """A file in flight, as a writer leaves it that was killed."""
    path = Path(local.uri) / folder / f".ckpt-tmp-{uuid4().hex}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"torn")
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_files_in_flight_are_in_no_listing(local):
    local.write("a/b", b"1")
    for folder in ("", "a", ".ckpt-tmp", ".ckpt-tmp/x"):
        _leftover(local, age=0, folder=folder)
    assert [entry.key for entry in local.list()] == ["a/b"]
    outer = LocalStorage(Path(local.uri).parent)
    assert [entry.key for entry in outer.list()] == ["store/a/b"]


def test_what_dead_writers_left_is_swept_and_what_living_ones_write_is_not(local):
    dead = _leftover(local, age=7200, folder=".ckpt-tmp")
    young = _leftover(local, age=60, folder=".ckpt-tmp")
    alive = _leftover(local, age=7200, folder=".ckpt-tmp")
    with alive.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        os.utime(alive, (time.time() - 7200,) * 2)
        local.write("a", b"")
        assert (dead.exists(), young.exists(), alive.exists()) == (False, True, True)


def test_deleting_the_last_file_removes_its_folders_up_to_the_root(local):
    for key in ("a/b/c/d", "a/b/c/e", "a/x"):
        local.write(key, b"")
    _leftover(local, age=7200, folder="a/b/c")
    local.delete(["a/b/c/d"])
    assert (Path(local.uri) / "a/b/c").exists()
    local.delete(["a/b/c/e"])
    assert sorted(path.name for path in (Path(local.uri) / "a").iterdir()) == ["x"]
    local.delete(["a/x"])
    assert Path(local.uri).exists()
    assert not (Path(local.uri) / "a").exists()


def test_writes_and_deletes_in_one_folder_do_not_disturb_each_other(local):
    stop = threading.Event()

    def write(number):
        count = 0
        while not stop.is_set() and count < 200:
            local.create(f"folder/sub/{number}-{count}", b"x")
            local.delete([f"folder/sub/{number}-{count}"])
            count += 1
        return count

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(write, range(6))) == [200] * 6
    assert list(local.list()) == []


def test_a_file_system_without_hard_links_is_named(local, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(errors.StorageError, match=r"hard link.*storage_path"):
        local.create("a", b"")
    assert list(local.list()) == []


def test_a_link_that_the_file_server_reports_as_existing_though_it_is_ours_is_ours(local, monkeypatch):
    link = os.link

    def link_twice(source, target):
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    local.create("a", b"ours")
    assert local.read("a") == b"ours"


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, errors.StorageFullError),
        (errno.EDQUOT, errors.StorageFullError),
        (errno.EROFS, errors.AccessDeniedError),
        (errno.EACCES, errors.AccessDeniedError),
        (errno.ESTALE, errors.TransientStorageError),
        (errno.EIO, errors.TransientStorageError),
        (errno.ETIMEDOUT, errors.TransientStorageError),
        (errno.ENAMETOOLONG, errors.StorageError),
    ],
)
def test_what_the_operating_system_says_is_translated_and_leaves_nothing(local, tmp_path, monkeypatch, number, kind):
    local.write("old", b"old")
    (tmp_path / "source").write_bytes(b"new")

    def fail(fd):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    for work in (
        lambda: local.create("a", b"new"),
        lambda: local.write("old", b"new"),
        lambda: local.upload(tmp_path / "source", "old", progress=lambda _: None),
        lambda: local.download("old", tmp_path / "target", progress=lambda _: None),
    ):
        with pytest.raises(kind, match=os.strerror(number)) as caught:
            work()
        assert type(caught.value) is kind
    monkeypatch.undo()
    assert {entry.key: local.read(entry.key) for entry in local.list()} == {"old": b"old"}
    assert not (tmp_path / "target").exists()


def test_files_are_as_readable_as_the_umask_allows(local, tmp_path):
    (tmp_path / "source").write_bytes(b"")
    mask = os.umask(0o027)
    try:
        local.create("created", b"")
        local.upload(tmp_path / "source", "uploaded", progress=lambda _: None)
        local.download("created", tmp_path / "target", progress=lambda _: None)
    finally:
        os.umask(mask)
    paths = [Path(local.uri) / "created", Path(local.uri) / "uploaded", tmp_path / "target"]
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o640] * 3


def test_a_listing_follows_links_and_stops_at_loops_and_leaves_out_what_is_no_file(local, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/b").write_bytes(b"22")
    local.write("a", b"1")
    root = Path(local.uri)
    (root / "elsewhere").symlink_to(tmp_path / "disk")
    (root / "loop").symlink_to(root)
    (root / "broken").symlink_to(root / "nowhere")
    os.mkfifo(root / "fifo")
    assert [(entry.key, entry.size) for entry in local.list()] == [("a", 1), ("elsewhere/b", 2)]
    local.create("elsewhere/c", b"333")
    assert (tmp_path / "disk/c").read_bytes() == b"333"


def test_a_folder_is_no_object(local):
    local.write("a/b", b"")
    for work in (lambda: local.read("a"), lambda: local.write("a", b""), lambda: local.write("a/b/c", b"")):
        with pytest.raises(errors.StorageError):
            work()
    local.delete(["a/b/c"])
    with pytest.raises(errors.StorageError):
        local.delete(["a"])
    assert [entry.key for entry in local.list()] == ["a/b"]


# ---------------------------------------------------------------------------------------------------- the law behind it


_keys = st.sampled_from(["a", "b", "a-b", "d/a", "d/b", "d-/a", "d/e/f"])
_steps = st.lists(
    st.tuples(st.sampled_from(["create", "write", "delete", "read", "list"]), _keys, st.binary(max_size=8)), max_size=30
)


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_any_sequence_of_verbs_does_what_it_does_to_a_dict(kind, tmp_path_factory):
    @settings(max_examples=60, deadline=None)
    @given(_steps)
    def law(steps):
        storage = MemoryStorage() if kind == "memory" else LocalStorage(tmp_path_factory.mktemp("store"))
        model: dict[str, bytes] = {}
        for verb, key, data in steps:
            if verb == "create" and key in model:
                with pytest.raises(errors.ObjectExistsError):
                    storage.create(key, data)
            elif verb in {"create", "write"}:
                getattr(storage, verb)(key, data)
                model[key] = data
            elif verb == "delete":
                storage.delete([key])
                model.pop(key, None)
            elif verb == "read" and key in model:
                assert storage.read(key) == model[key]
            elif verb == "read":
                with pytest.raises(errors.ObjectNotFoundError):
                    storage.read(key)
            else:
                found = [(entry.key, entry.size) for entry in storage.list(key)]
                assert found == sorted((name, len(held)) for name, held in model.items() if name.startswith(key))

    law()
