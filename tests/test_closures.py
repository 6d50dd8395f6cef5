"""What a custom function closes over is bound at the `report()` call."""

import functools
import threading

import pytest
from helpers import DEADLINE, make_checkpoint, make_config, states

from ckpt import get_context, open_run, report
from ckpt.upload_functions import freeze_function


def test_a_loop_variable_rebound_by_the_next_epoch_does_not_redirect_an_upload(storage_path, tmp_path):
    """Every epoch's function waits for its own future, though they all share the loop's variable."""
    release, seen = threading.Event(), []
    with open_run(make_config(storage_path)) as run:
        for epoch in range(3):

            def upload(checkpoint, name):
                assert release.wait(DEADLINE)
                seen.append(epoch)  # noqa: B023 - bound by report()
                return checkpoint

            report({}, make_checkpoint(tmp_path / str(epoch)), checkpoint_upload_fn=upload)
        release.set()
    assert sorted(seen) == [0, 1, 2]
    assert states(run.result) == ["committed"] * 3


def test_a_frozen_function_reads_the_value_of_the_moment():
    """Rebinding the variable afterwards is not seen; the function given stays as it was."""
    value = "then"

    def read():
        return value

    frozen = freeze_function(read)
    value = "now"
    assert (frozen(), read()) == ("then", "now")


def test_what_the_function_rebinds_itself_stays_shared():
    """A counter in the trainer's scope goes on counting, also when an inner function counts."""
    count = other = 0

    def add():
        nonlocal count
        count += 1

        def inner():
            nonlocal other
            other += 1

        inner()

    freeze_function(add)()
    freeze_function(add)()
    assert (count, other) == (2, 2)


def test_a_variable_without_a_value_yet_stays_shared():
    """There is nothing to bind; what it gets later is seen."""

    def read():
        return later

    frozen = freeze_function(read)
    with pytest.raises(NameError):
        frozen()
    later = 1
    assert frozen() == 1


def test_decorated_functions_helpers_and_partials_are_frozen_inside():
    """A decorator's wrapper closes over the function it wraps, which closes over the loop's variable."""

    def twice(fn):
        @functools.wraps(fn)
        def wrapper(*args):
            return [fn(*args), fn(*args)]

        return wrapper

    value = "then"

    def helper():
        return value

    @twice
    def decorated():
        return value

    def calls_helper():
        return helper()

    frozen = [freeze_function(fn) for fn in (decorated, calls_helper, functools.partial(decorated))]
    value = "now"
    assert [fn() for fn in frozen] == [["then", "then"], "then", ["then", "then"]]


def test_a_recursive_function_is_frozen_as_a_whole():
    """Its closure leads back to itself."""
    step = 2

    def down(n):
        return [n, *down(n - step)] if n > 0 else []

    frozen = freeze_function(down)
    step = 100
    assert frozen(5) == [5, 3, 1]


def test_a_frozen_function_keeps_defaults_keyword_defaults_name_and_attributes():
    """Everything else about it is as it was."""
    bound = 1

    def fn(a, b=2, *, c=3):
        """Doc."""
        return a, b, c, bound

    fn.label = "x"
    frozen = freeze_function(fn)
    assert frozen(0) == (0, 2, 3, 1)
    assert (frozen.__name__, frozen.__qualname__, frozen.__doc__, frozen.label) == (
        fn.__name__,
        fn.__qualname__,
        "Doc.",
        "x",
    )


def test_methods_callable_objects_and_functions_without_a_closure_are_taken_as_they_are():
    """Their state is theirs to keep."""

    class Uploader:
        def method(self, checkpoint, name):
            return checkpoint

        def __call__(self, checkpoint, name):
            return checkpoint

    uploader = Uploader()
    assert freeze_function(uploader) is uploader
    assert freeze_function(uploader.method).__self__ is uploader
    assert freeze_function(make_checkpoint) is make_checkpoint


def test_methods_callable_objects_and_partials_upload(storage_path, tmp_path):
    """All of them are called with (checkpoint, name)."""

    class Uploader:
        def method(self, checkpoint, name):
            return checkpoint

        def __call__(self, checkpoint, name):
            return checkpoint

    def partial(extra, checkpoint, name):
        assert extra == "x"
        return checkpoint

    with open_run(make_config(storage_path)) as run:
        for number, fn in enumerate((Uploader(), Uploader().method, functools.partial(partial, "x"))):
            report({}, make_checkpoint(tmp_path / str(number)), checkpoint_upload_fn=fn)
    assert states(run.result) == ["committed"] * 3


def test_the_context_of_the_run_is_there_in_the_thread_of_the_function(tmp_path):
    """With two runs open it is that of the run that was reported to, whichever is the active one here."""
    names = []

    def upload(checkpoint, name):
        names.append((get_context().get_experiment_name(), get_context().get_world_rank()))
        return checkpoint

    with open_run(make_config(tmp_path / "runs", "outer")) as outer, open_run(make_config(tmp_path / "runs", "inner")):
        outer.report({}, make_checkpoint(tmp_path / "a"), checkpoint_upload_fn=upload).wait(DEADLINE)
        report({}, make_checkpoint(tmp_path / "b"), checkpoint_upload_fn=upload).wait(DEADLINE)
    assert names == [("outer", 0), ("inner", 0)]
