"""Every error: survives pickling, is the builtin that a caller would catch, and stands where the tree says."""

import builtins
import inspect
import pickle
import re

import pytest

from ckpt import ReportedCheckpointStatus, ReportRecord, ReportState, Result, errors
from ckpt.errors import CheckpointsLostError, CkptError, UploadFailedError, ValidationFailedError
from ckpt.layout import CommitId
from ckpt.validating import Verdict

CLASSES = [found for _, found in inspect.getmembers(errors, inspect.isclass) if issubclass(found, CkptError)]
RECORD = ReportRecord(seq=3, attempt=1, name="three", state=ReportState.FAILED, metrics={"a": 1}, reason="no room")
RESULT = Result(run="run", path="/runs/run", checkpoint=None, metrics={}, best_checkpoints=[], history=[])
VERDICT = Verdict(commit=CommitId(3, 1), status=ReportedCheckpointStatus.VALIDATION_FAILED, reason="no samples")
ARGUMENTS = {
    UploadFailedError: (RECORD,),
    CheckpointsLostError: ("the last one", RESULT),
    ValidationFailedError: (VERDICT,),
}


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_survives_pickling_with_its_arguments_text_and_attributes(kind):
    """Task runners pickle what a task raised."""
    error = kind(*ARGUMENTS.get(kind, ("what, where, what to do",)))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert copy.args == error.args
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    if "__init__" in vars(kind):
        assert len(error.args) == len(inspect.signature(kind.__init__).parameters) - 1


def drawn_tree() -> dict[str, tuple[str, set[str]]]:
    """Each class of the drawing: what it is below, and the builtins beside its name."""
    tree, above = {}, []
    for line in (errors.__doc__ or "").splitlines():
        if not (
            match := re.match(r"    (?P<branch>[│├└─ ]*)(?P<name>\w*Error)\b(?: \((?P<builtins>[\w, ]+)\))?", line)
        ):
            continue
        depth = len(match["branch"]) // 4
        above = [*above[:depth], match["name"]]
        named = {name.strip() for name in (match["builtins"] or "").split(",") if name.strip()}
        tree[match["name"]] = (above[depth - 1] if depth else "Exception", named)
    return tree


def test_the_tree_that_is_drawn_is_the_tree_that_is():
    """Every class is in it, below its parent, with the builtins it can be caught as."""
    tree = drawn_tree()
    assert set(tree) == {kind.__name__ for kind in CLASSES}
    for kind in CLASSES:
        parent, named = tree[kind.__name__]
        assert kind.__mro__[1].__name__ == parent, kind
        assert {base.__name__ for base in kind.__bases__ if hasattr(builtins, base.__name__)} - {
            "Exception"
        } == named, kind


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind is not CkptError])
def test_an_error_is_also_the_builtin_that_people_catch(kind):
    """Beside `CkptError`."""
    assert issubclass(kind, (ValueError, TypeError, RuntimeError, OSError))


def test_every_error_says_what_it_is():
    """In its docstring."""
    assert all(kind.__doc__ for kind in CLASSES)


def test_the_errors_that_carry_something_say_it_in_their_text():
    """A record's reason, and what was lost."""
    assert str(UploadFailedError(RECORD)) == "report 3 (three) is failed: no room"
    assert str(ValidationFailedError(VERDICT)) == "checkpoint 3: validation_failed: no samples"
    assert str(CheckpointsLostError("the last one", RESULT)) == "the last one"
