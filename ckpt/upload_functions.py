"""Calling a custom `checkpoint_upload_fn`: closure bound at the call, own daemon thread, deadline, every result shape.

A function may return a `Checkpoint`; or a coroutine, a `concurrent.futures.Future`, or the response of torch's
`async_save`, resolving to a `Checkpoint` or to DCP `Metadata`. Anything else fails that one report, clearly.
"""

from __future__ import annotations

import dis
import functools
import inspect
import time
import types
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ckpt.calling import call_with_deadline, name_of
from ckpt.checkpoint import Checkpoint
from ckpt.errors import UploadFunctionError


def freeze_function(fn: Any) -> Any:
    """Bind the closure of a plain function now: a loop variable rebound by the next epoch must not redirect an upload.

    Only variables that the function reads are bound; what it rebinds itself (`nonlocal`) stays shared, and so does what
    has no value yet. Functions of the same module that it closes over are frozen as well (a decorator's wrapper closes
    over what it wraps), and so is what a partial calls. Bound methods and other callables are returned as they are.
    """
    return _frozen(fn, {})


def _frozen(fn: Any, done: dict[int, Any]) -> Any:
    """`done` has the functions frozen so far, by id: closures may lead back to themselves."""
    if isinstance(fn, functools.partial):
        return functools.partial(_frozen(fn.func, done), *fn.args, **fn.keywords)
    if not isinstance(fn, types.FunctionType) or fn.__closure__ is None:
        return fn
    if id(fn) in done:
        return done[id(fn)]
    written = _rebound(fn.__code__)
    cells = tuple(
        cell if name in written or _is_empty(cell) else types.CellType()
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__, strict=True)
    )
    frozen = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)
    for attribute in ("__module__", "__qualname__", "__doc__", "__kwdefaults__", "__annotations__"):
        setattr(frozen, attribute, getattr(fn, attribute))
    frozen.__dict__.update(fn.__dict__)
    done[id(fn)] = frozen
    for cell, bound in zip(fn.__closure__, cells, strict=True):
        if bound is not cell:
            value = cell.cell_contents
            bound.cell_contents = _frozen(value, done) if getattr(value, "__module__", None) == fn.__module__ else value
    return frozen


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises where there is none
    except ValueError:
        return True
    return False


def call_upload_fn(
    fn: Any,
    checkpoint: Checkpoint,
    name: str,
    *,
    timeout: float,
    when_aborted: Callable[[Callable[[str], None]], None],
) -> Checkpoint:
    """Call `fn(checkpoint, name)` and wait until it, and whatever it returned, is done.

    It runs in a daemon thread with this thread's context, so that a function that never returns cannot hang the
    process.

    Args:
        fn: the custom function.
        checkpoint: as reported.
        name: the checkpoint's directory name.
        timeout: seconds for all of it.
        when_aborted: is given what ends the wait early, for a reason.

    Returns:
        Where the function says the checkpoint is.

    Raises:
        DeadlineError: it took longer; it is abandoned.
        UploadFunctionError: it returned what it must not, or raised a `BaseException` of its own kind.
    """
    return call_with_deadline(
        lambda deadline: _resolve(fn, checkpoint, name, deadline),
        what=f"checkpoint_upload_fn {name_of(fn)}",
        thread=f"ckpt-upload-fn-{name}",
        timeout=timeout,
        when_aborted=when_aborted,
    )


def _resolve(fn: Any, checkpoint: Checkpoint, name: str, deadline: float) -> Checkpoint:
    value = fn(checkpoint, name)
    while not isinstance(value, Checkpoint):
        left = deadline - time.monotonic()
        if inspect.iscoroutine(value):
            import asyncio  # a tenth of a second that programs without coroutines need not wait for

            value = asyncio.run(asyncio.wait_for(value, left))
        elif hasattr(value, "staging_completion") and hasattr(value, "upload_completion"):
            value.staging_completion.result(left)
            value = value.upload_completion.result(max(0.0, deadline - time.monotonic()))
        elif isinstance(value, Future):
            value = value.result(left)
        elif _is_dcp_metadata(value):
            return checkpoint
        else:
            raise UploadFunctionError(
                f"checkpoint_upload_fn {name_of(fn)} must return a ckpt.Checkpoint (or a coroutine, a Future or an "
                f"async_save response that gives one); it returned {_describe(value)}"
            )
    return value


def _is_dcp_metadata(value: Any) -> bool:
    kind = type(value)
    return kind.__name__ == "Metadata" and kind.__module__.startswith("torch.distributed.checkpoint")


def _describe(value: Any) -> str:
    return "None" if value is None else f"{type(value).__module__}.{type(value).__qualname__}: {value!r:.80}"


def _rebound(code: types.CodeType) -> set[str]:
    """Closure variables that the function, or one defined inside it, assigns or deletes."""
    inner: list[types.CodeType] = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    own = {
        str(step.argval)
        for step in dis.get_instructions(code)
        if step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars
    }
    return own.union(*(_rebound(item) & set(code.co_freevars) for item in inner))


def check_upload_fn(fn: object) -> Callable[[Checkpoint, str], Any]:
    """`fn` itself, if it can be called with a checkpoint and a name.

    Raises:
        UploadFunctionError: it cannot.
    """
    if not callable(fn):
        raise UploadFunctionError(f"checkpoint_upload_fn must be callable, not {_describe(fn)}")
    try:
        inspect.signature(fn).bind(None, "name")
    except TypeError as error:
        raise UploadFunctionError(
            f"checkpoint_upload_fn {name_of(fn)} must take (checkpoint, checkpoint_dir_name): {error}"
        ) from error
    except ValueError:
        pass  # a builtin without a signature
    return fn
