"""Staging: what the trainer does to its directory after `report()` must not reach the upload.

A directory that will be deleted is renamed away (O(1)) and an empty one left in its place; one that is kept is
hard-linked, so that its owner may rotate it. Either needs a folder on the same file system; where none is found the
files are copied inside the call (and, if they are to be deleted, deleted there: a later save into the same directory
must not meet a deletion that was meant for this one). The files' sizes and times are noted at the call, and checked
again after each was read.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from glob import escape
from operator import attrgetter
from pathlib import Path

from ckpt.errors import ConfigError, SourceChangedError, StorageFullError
from ckpt.storage import RESERVED, check_key

_OWNER = re.compile(r"(?P<boot>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{8}")
_TRY_ELSEWHERE = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EBUSY, errno.EMLINK, errno.ENOTSUP, errno.EROFS}
"""What a rename or a link is answered where it is not possible, and a copy may be."""
logger = logging.getLogger("ckpt")

_OLD = 14 * 86400.0
"""Seconds: a node that was rebooted leaves what it had staged on a disk that outlives it, and so may a living other one."""
_FRESH = "dir-"
"""Begins the name of a directory that `checkpoint_dir()` gave out."""
_HIDDEN = ".ckpt-staging"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One local file as it was at the call."""

    path: str
    """POSIX, relative to the checkpoint."""
    real: str
    """The same with symbolic links resolved; still relative."""
    size: int
    mtime_ns: int
    mode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A local directory as it was at the call."""

    root: Path
    """Where the files are read from."""
    original: Path
    """Where the trainer had them."""
    real: str
    """The same, with symbolic links resolved."""
    files: tuple[SourceFile, ...]
    empty_dirs: tuple[str, ...] = ()
    staged: bool = False
    """Whether `root` is ours to delete."""

    @property
    def nbytes(self) -> int:
        """Sum of the files' sizes."""
        return sum(file.size for file in self.files)

    def check(self, file: SourceFile) -> None:
        """Raise `SourceChangedError` if the file is not as it was at the call."""
        try:
            now = (self.root / file.real).stat()
        except OSError as error:
            raise SourceChangedError(f"{file.path} of {self.original} went away while it was uploaded") from error
        if (now.st_size, now.st_mtime_ns) != (file.size, file.mtime_ns):
            raise SourceChangedError(
                f"{file.path} of {self.original} changed between report() and the end of its upload ({file.size} bytes "
                f"then, {now.st_size} now): write each checkpoint into a fresh directory, or use checkpoint_dir()"
            )

    def discard(self) -> None:
        """Delete the staged copy; a directory of the trainer's is left alone."""
        if self.staged:
            shutil.rmtree(self.root, ignore_errors=True)

    def delete_original(self) -> list[str]:
        """Delete, where the trainer had them, the files listed at the call and the folders this empties, not the root.

        Returns:
            Paths of files that were written again since; they are another checkpoint's, and stay.
        """
        folders = {Path(file.path).parent for file in self.files} | {Path(path) for path in self.empty_dirs}
        left = []
        for file in self.files:
            path = self.original / file.path
            if _is_as_listed(path, file):
                path.unlink(missing_ok=True)
            else:
                left.append(file.path)
        every = {folder for leaf in folders for folder in (leaf, *leaf.parents)} - {Path()}
        for folder in sorted(every, key=lambda item: len(item.parts), reverse=True):
            path = self.original / folder
            with suppress(OSError):  # not empty, or gone: not ours to force
                path.unlink() if path.is_symlink() else path.rmdir()
        return left


def _is_as_listed(path: Path, file: SourceFile) -> bool:
    """Whether a file is gone, or as it was at the call."""
    try:
        now = os.stat(path)
    except FileNotFoundError:
        return True
    return (now.st_size, now.st_mtime_ns) == (file.size, file.mtime_ns)


def scan(root: Path) -> Source:
    """List a directory: files, empty folders, modes, sizes; symbolic links that stay inside are followed.

    What vanishes meanwhile is left out: an async writer may be at work, renaming its temporary files. So are, as in
    every listing, files in flight of a storage of ours that is rooted here.

    Raises:
        ConfigError: it is missing, not a directory, or holds what cannot be stored (a link that is broken, escapes or
            loops; a socket, FIFO or device; a name with control characters).
    """
    if not root.is_dir():
        what = "is not a directory" if root.exists() else "does not exist"
        raise ConfigError(f"checkpoint directory {root} {what}: save into a directory and report that directory")
    real_root = os.path.realpath(root)
    files: list[SourceFile] = []
    empty: list[str] = []
    _walk(real_root, real_root, "", (real_root,), files, empty)
    return Source(root=root, original=root, real=real_root, files=tuple(files), empty_dirs=tuple(empty))


def _walk(
    root: str, folder: str, prefix: str, above: tuple[str, ...], files: list[SourceFile], empty: list[str]
) -> None:
    try:
        with os.scandir(folder) as found:
            entries = sorted((entry for entry in found if not entry.name.startswith(RESERVED)), key=attrgetter("name"))
    except FileNotFoundError:
        return
    if not entries and prefix:
        empty.append(prefix.rstrip("/"))
    for entry in entries:
        path = check_key(prefix + entry.name)
        real = _resolve(root, entry, path) if entry.is_symlink() else entry.path
        try:
            info = os.stat(real)
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(info.st_mode):
            if real in above:
                raise ConfigError(f"symbolic link {path} in {root} loops back to its own folder: remove it")
            _walk(root, real, path + "/", (*above, real), files, empty)
        elif stat.S_ISREG(info.st_mode):
            files.append(
                SourceFile(
                    path=path,
                    real=os.path.relpath(real, root) if entry.is_symlink() else real[len(root) + 1 :],
                    size=info.st_size,
                    mtime_ns=info.st_mtime_ns,
                    mode=stat.S_IMODE(info.st_mode),
                )
            )
        else:
            raise ConfigError(
                f"{path} in {root} is a socket, FIFO or device; a checkpoint can hold files and folders only"
            )


def _resolve(root: str, entry: os.DirEntry[str], path: str) -> str:
    real = os.path.realpath(entry.path)
    if not os.path.exists(real):
        raise ConfigError(
            f"symbolic link {path} in {root} is broken (it points to {os.readlink(entry.path)}): remove it"
        )
    if os.path.commonpath((root, real)) != root:
        raise ConfigError(f"symbolic link {path} in {root} leaves the checkpoint (to {real}): copy the file instead")
    return real


class Staging:
    """The staging folders of one process for one open run; no two share one, so that each removes its own at its end.

    Args:
        candidates: folders to try, best first; each is used only for sources on its own file system.
        label: of the run; what failed is kept under it.
    """

    def __init__(self, candidates: list[Path], label: str = "checkpoint") -> None:
        self._candidates = candidates
        self._label = label
        self._name = f"{_owner()}-{uuid.uuid4().hex[:8]}"
        self._made: set[Path] = set()
        self._real: dict[Path, str] = {}
        self._keeping = threading.Lock()

    def take(self, source: Source, *, rename: bool) -> tuple[Source, bool]:
        """Secure a source: renamed away if it will be deleted, else hard-linked, else copied.

        Args:
            source: as it was scanned.
            rename: it is to be deleted: nothing of it stays where the trainer had it.

        Returns:
            The source as it is to be read from, and whether its bytes had to be copied.

        Raises:
            StorageFullError: the bytes would have to be copied and the disk has no room for them.
        """
        for base in self._bases(source):
            for way in (_move, _link_and_delete) if rename else (_link,):
                target = base / uuid.uuid4().hex
                try:
                    way(source, target)
                except OSError as error:
                    if error.errno not in _TRY_ELSEWHERE:
                        raise
                else:
                    return _at(source, target), False
        copy = self._copy(source)
        if rename:
            source.delete_original()
        return copy, True

    def fresh_dir(self) -> Path:
        """A new empty directory in the first usable candidate."""
        for root in self._candidates:
            if base := self._base(root):
                return _mkdir(base / f"{_FRESH}{uuid.uuid4().hex[:12]}")
        raise StorageFullError(f"no staging folder can be written: tried {', '.join(map(str, self._candidates))}")

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """`fresh_dir`, for the length of the block."""
        folder = self.fresh_dir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def keep(self, source: Source, seq: int, kind: str = "") -> Path:
        """Move the staged copy of report `seq` to where no sweep takes it; earlier reports' of the kind make room.

        Returns:
            Where the files are.
        """
        if not source.staged:
            return source.root
        top, name = source.root.parent.parent, f"kept-{self._label}{kind}-"
        kept = top / f"{name}{seq:06d}"
        with self._keeping:
            for other in top.glob(f"{escape(name)}*"):
                if other.name <= kept.name:
                    shutil.rmtree(other, ignore_errors=True)
            source.root.rename(kept)
        return kept

    def close(self) -> None:
        """Remove this run's own folders, and those above them that this empties.

        What is staged still, because the run ended in disorder, may be all there is of a checkpoint: it is kept.
        """
        for base in self._made:
            for staged in base.glob("*"):
                if not staged.name.startswith(_FRESH):
                    kept = base.parent / f"kept-{self._label}-{staged.name}"
                    staged.rename(kept)
                    logger.warning(
                        "A reported checkpoint was neither committed nor given up; its files are kept at %s", kept
                    )
            shutil.rmtree(base, ignore_errors=True)
            for above in (base.parent, base.parent.parent):
                if above.name.startswith(_HIDDEN):
                    with suppress(OSError):  # somebody else's staging is in it
                        above.rmdir()

    def sweep(self) -> None:
        """Remove what dead processes of this machine left in the candidates."""
        for root in self._candidates:
            _sweep(_top(root))

    def _bases(self, source: Source) -> Iterator[Path]:
        """Usable folders on the source's own file system, never inside its parent (that may be temporary itself)."""
        device, parent = source.original.stat().st_dev, os.path.dirname(source.real)
        grandparent = source.original.parent.parent / f"{_HIDDEN}-beside"
        for root in (*self._candidates, grandparent):
            if _device(root.parent if root is grandparent else root) != device:
                continue
            if self._resolved(root).startswith(f"{parent}/") and Path(parent) not in self._made:
                continue
            if base := self._base(root):
                yield base

    def _resolved(self, root: Path) -> str:
        """A candidate without symbolic links; looked up once, because every report asks."""
        if root not in self._real:
            self._real[root] = os.path.realpath(root)
        return self._real[root]

    def _base(self, root: Path) -> Path | None:
        top = _top(root)
        base = top / self._name
        if base in self._made and base.is_dir():
            return base
        try:
            top.mkdir(mode=0o700, parents=True, exist_ok=True)
            if top.stat().st_uid != os.getuid():
                return None  # in a folder that everybody may write to somebody else was first
            base.mkdir(mode=0o700, exist_ok=True)  # another thread of this run may make it, too
        except OSError:
            return None
        self._made.add(base)
        _sweep(top)
        return base

    def _copy(self, source: Source) -> Source:
        for root in self._candidates:
            if not (base := self._base(root)):
                continue
            free = shutil.disk_usage(base).free
            if free < source.nbytes:
                continue
            target = base / uuid.uuid4().hex
            _clone(source, target, shutil.copy2)
            return _at(source, target)
        raise StorageFullError(
            f"staging {source.original} needs {source.nbytes} bytes, and none of {', '.join(map(str, self._candidates))} "
            "has them: free space, or set staging_dir to a folder on the checkpoint's own file system (no copy then)"
        )


def staging_candidates(staging_dir: str | os.PathLike[str] | None, storage_root: Path | None) -> list[Path]:
    """Where staging folders may be, best first: `staging_dir`, the system's temporary folder, a local storage."""
    first = [] if staging_dir is None else [Path(staging_dir).absolute()]
    return [*first, Path(tempfile.gettempdir()), *([] if storage_root is None else [storage_root])]


def _device(folder: Path) -> int | None:
    """The file system that a folder is on; None if it is not there."""
    try:
        return folder.stat().st_dev
    except OSError:
        return None


def _top(root: Path) -> Path:
    return root / f"{_HIDDEN}-{os.getuid()}"


def _sweep(top: Path) -> None:
    for base in top.glob("*-*-*-*"):
        if (match := _OWNER.fullmatch(base.name)) and (_is_dead(match) or _is_old(base, match)):
            shutil.rmtree(base, ignore_errors=True)


def _mkdir(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True)
    return path


def _at(source: Source, root: Path) -> Source:
    return replace(source, root=root, staged=True)


def _move(source: Source, target: Path) -> None:
    """Rename the directory away and leave an empty one; not where the path is a link, or the process stands in it."""
    original = source.original
    if original.is_symlink() or _stands_in(source.real):
        raise OSError(errno.EBUSY, "cannot be renamed away", str(original))
    mode = stat.S_IMODE(original.stat().st_mode)
    original.rename(target)
    try:
        original.mkdir()
        original.chmod(mode)
    except OSError:
        target.rename(original)
        raise


def _stands_in(folder: str) -> bool:
    """Whether the working directory is a folder or lies in it."""
    try:
        return f"{os.getcwd()}/".startswith(f"{folder}/")
    except FileNotFoundError:
        return False  # the working directory was deleted


def _link(source: Source, target: Path) -> None:
    _clone(source, target, os.link)


def _link_and_delete(source: Source, target: Path) -> None:
    _link(source, target)
    source.delete_original()


def _clone(source: Source, target: Path, way: Callable[[str, str], object]) -> None:
    """Make `target` hold the files by their real paths, linked or copied with their times; all of them, or nothing."""
    target.mkdir(mode=0o700)
    try:
        for folder in {os.path.dirname(file.real) for file in source.files} - {""}:
            (target / folder).mkdir(parents=True, exist_ok=True)
        for real in {file.real for file in source.files}:
            way(f"{source.root}/{real}", f"{target}/{real}")  # text: paths cost more than the links
    except OSError:
        shutil.rmtree(target, ignore_errors=True)
        raise


@cache
def machine_id() -> str:
    """This boot of this machine (and this process namespace), 8 hex digits: where a process id means something."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = f"{os.uname().nodename}-{uuid.getnode()}"
    return uuid.uuid5(uuid.NAMESPACE_OID, boot).hex[:8]


def start_time(pid: int) -> int | None:
    """When a process of this machine started, in the kernel's ticks; 0 where the system does not tell; None: no such."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return _alive(pid)  # no such process, or one that this user may not see, or no such file system
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])  # a zombie only waits for its parent to look


def is_running(pid: int, started: int) -> bool:
    """Whether the process that started at `started` runs still; where the system does not tell, it may."""
    return start_time(pid) in (started, 0)


def _alive(pid: int) -> int | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return 0
    return 0


def _owner() -> str:
    pid = os.getpid()
    return f"{machine_id()}-{pid}-{start_time(pid) or 0}"


def _is_old(base: Path, owner: re.Match[str]) -> bool:
    """For owners of another boot, who cannot be asked: nothing was staged there for `_OLD`."""
    try:
        return owner["boot"] != machine_id() and time.time() - base.stat().st_mtime > _OLD
    except OSError:
        return False  # its owner removes it just now


def _is_dead(owner: re.Match[str]) -> bool:
    """Only for owners of this very boot; what another machine left on a shared disk is not judged."""
    return owner["boot"] == machine_id() and not is_running(int(owner["pid"]), int(owner["start"]))
