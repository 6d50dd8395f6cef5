"""Opening a run: claim it, adopt what earlier attempts left, and give it a place to upload from."""

from __future__ import annotations

import contextvars
import logging
import random
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ckpt.adopting import adopt
from ckpt.attempts import Attempt, LooksFirst, Owner, claim, enforces_create
from ckpt.commits import Start
from ckpt.config import RunConfig
from ckpt.context import activate
from ckpt.errors import CkptError, FencedError, StorageError
from ckpt.history import reference
from ckpt.inflight import Destination, Live, Locations
from ckpt.manifest import git_commit
from ckpt.ordering import ReportLine
from ckpt.ordering import gather as gather_line
from ckpt.publishing import Observer, Publisher, Retention
from ckpt.records import Report, ReportRecord, Submit
from ckpt.result import Result
from ckpt.resuming import chooser, describe_start, restored, run_info
from ckpt.run import Gather, Run
from ckpt.slots import UploadSlots
from ckpt.staging import Staging, staging_candidates
from ckpt.storage import Storage, join_uri, normalize_uri, open_storage
from ckpt.transferring import sweep_uploads
from ckpt.uploading import upload
from ckpt.validating import SubmitValidation, Validation, Validations, Verdict, validate

logger = logging.getLogger("ckpt")


@contextmanager
def open_run(
    config: RunConfig,
    submit: Submit | None = None,
    *,
    gather: Gather | None = None,
    owner: Owner | None = None,
    observers: list[Observer] | None = None,
    submit_validation: SubmitValidation | None = None,
) -> Iterator[Run]:
    """Open a run without Prefect: report inside the block; leaving it drains, then raises what the failure policy says.

    Args:
        config: the run.
        submit: starts one upload; default: a `ThreadPoolExecutor`. It is called with a frozen `Report` and must run
            `ckpt.uploading.upload(report, run.destination)`.
        gather: starts the ordering task; default: a daemon thread.
        owner: who claims the run; default: this process.
        observers: told of every published record, in order.
        submit_validation: starts one validation, which must run `ckpt.validating.validate(validation)`; default: threads.

    Yields:
        The run, active for `ckpt.report` and the other functions; `run.result` after the block.

    Raises:
        RunBusyError: another driver owns the run and is alive.
        StorageError: the storage cannot be used; said before any training.
        FencedError: at the end, if another driver took the run over and no report has said so.
        CheckpointsLostError: at the end, by the failure policy; carries `.result`. The block's own exception wins.
    """
    with ExitStack() as stack:
        claimant = replace(owner or Owner(), lease_time=config.lease_time)
        with _same_random_numbers():
            run = _start(config, submit, submit_validation, claimant, observers or [], stack)
        run.begin(gather or _gather_in_thread)
        error: BaseException | None = None
        try:
            with activate(run):
                yield run
        except BaseException as raised:
            error = raised
            raise
        finally:
            finish(run, error)
        run.check_end()


def finish(run: Run, error: BaseException | None) -> None:
    """Drain; if the block raised, its exception wins over what the drain meets."""
    try:
        run.end(error)
    except CkptError:
        if error is None:
            raise
        logger.exception("run %s could not be drained", run.config.name)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Libraries that are imported for a store may draw from `random` (rich does): the training's numbers stay the same."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def _start(
    config: RunConfig,
    submit: Submit | None,
    submit_validation: SubmitValidation | None,
    owner: Owner,
    observers: list[Observer],
    stack: ExitStack,
) -> Run:
    root = _storage_root(config)
    uri = join_uri(root, config.name)
    storage = _open(config, uri)
    enforced = enforces_create(storage)
    if not enforced:
        logger.warning(
            "%s ignores the condition of a conditional create: that only one driver uses a run name cannot be enforced there",
            storage.uri,
        )
    objects = storage if enforced else LooksFirst(storage)
    info = run_info(config, objects)
    attempt, start, found = claim(objects, owner, chooser(config, storage, info, owner), lease_time=config.lease_time)
    run_of: list[Run] = []
    stack.callback(_end_attempt, attempt, run_of)
    stack.enter_context(_lease(attempt, config.lease_time / 3, run_of))
    sweep_uploads(storage)
    local = None if "://" in uri else Path(root)
    label = f"{config.name}-{str(info.get('run_id', ''))[:8]}"
    staging = Staging(staging_candidates(config.staging_dir, local), label)
    staging.sweep()
    stack.callback(staging.close)
    live = _live(config, storage, attempt, staging)
    destination = _destination(config, uri, info, attempt, enforced)
    destination.register(live)
    stack.callback(destination.unregister)
    publisher = _publisher(config, storage, attempt, start)
    publisher.observers.extend(observers)
    publisher.latest = restored(config, storage, start)
    run = Run(config, destination, live, publisher, submit or _pool(destination, config, stack), start.first_seq)
    if config.validation_fn is not None:
        submit_validation = submit_validation or _validation_pool(config, stack)
        run.validates(Validations(destination, config, submit_validation, run.line.answer))
    adopt(publisher, live, found, start.first_seq)
    logger.info("%s", describe_start(config, start, found))
    run_of.append(run)
    return run


def _storage_root(config: RunConfig) -> str:
    given = str(config.storage_path)
    root = normalize_uri(given)
    if "://" not in given and not Path(given).is_absolute():
        logger.info("storage_path %s is relative; runs are kept in %s", given, root)
    return root


def _open(config: RunConfig, uri: str) -> Storage:
    upload_config = config.upload_config
    return open_storage(
        uri,
        credentials=config.credentials or "env",
        storage_options=config.storage_options,
        memory_budget=upload_config.memory_bytes,
        stall_timeout=upload_config.stall_timeout,
        retry_budget=upload_config.retry_budget,
    )


def _live(config: RunConfig, storage: Storage, attempt: Attempt, staging: Staging) -> Live:
    upload_config = config.upload_config
    slots = UploadSlots(upload_config.max_concurrent_uploads, upload_config.max_pending)
    return Live(storage=storage, attempt=attempt, slots=slots, staging=staging, locations=Locations())


def _destination(config: RunConfig, uri: str, info: Mapping[str, Any], attempt: Attempt, enforced: bool) -> Destination:
    return Destination(
        uri=uri, run=config.name, run_id=str(info.get("run_id", "")), attempt=attempt.number, nonce=attempt.nonce,
        credentials=config.credentials or "env", storage_options=dict(config.storage_options or {}),
        upload_config=config.upload_config, create_enforced=enforced, git_commit=git_commit(),
    )  # fmt: skip


def _publisher(config: RunConfig, storage: Storage, attempt: Attempt, start: Start) -> Publisher:
    checkpoint_config = config.checkpoint_config
    retention = Retention(
        policy=checkpoint_config.policy,
        score_attribute=checkpoint_config.checkpoint_score_attribute,
        score_order=checkpoint_config.checkpoint_score_order,
    )

    refer = partial(reference, config.credentials, config.storage_options)
    return Publisher(run=config.name, storage=storage, attempt=attempt, start=start, retention=retention, refer=refer)


def _pool(destination: Destination, config: RunConfig, stack: ExitStack) -> Submit:
    pool = stack.enter_context(ThreadPoolExecutor(config.upload_config.max_pending, thread_name_prefix="ckpt-upload"))

    def submit(report: Report) -> Future[ReportRecord]:
        return pool.submit(contextvars.copy_context().run, upload, report, destination)

    return submit


def _validation_pool(config: RunConfig, stack: ExitStack) -> SubmitValidation:
    bound = config.max_concurrent_validations
    pool = stack.enter_context(ThreadPoolExecutor(bound, thread_name_prefix="ckpt-validation"))

    def submit(validation: Validation) -> Future[Verdict]:
        return pool.submit(contextvars.copy_context().run, validate, validation)

    return submit


def _gather_in_thread(line: ReportLine) -> Future[Result]:
    outcome: Future[Result] = Future()

    def order() -> None:
        try:
            outcome.set_result(gather_line(line))
        except BaseException as error:  # noqa: BLE001 - the next report raises it
            outcome.set_exception(error)

    threading.Thread(target=order, name="ckpt-ordering", daemon=True).start()
    return outcome


@contextmanager
def _lease(attempt: Attempt, interval: float, run_of: list[Run]) -> Iterator[None]:
    """Give signs of life while the block lasts, and find out when the run was taken over."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(interval):
            try:
                attempt.renew()
                attempt.check_fence()
            except FencedError as error:
                for run in run_of:
                    run.fence(error)
                return
            except StorageError as error:
                logger.warning("The lease of attempt %d could not be renewed; going on: %s", attempt.number, error)

    thread = threading.Thread(target=beat, name="ckpt-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(5.0)


def _end_attempt(attempt: Attempt, run_of: list[Run]) -> None:
    """Record the end; a process that was told to stop does not wait for a store that does not answer."""

    def end() -> None:
        try:
            attempt.end("ended")
        except StorageError as error:
            logger.warning(
                "The end of attempt %d could not be recorded; the next waits for its lease: %s", attempt.number, error
            )

    left = run_of[0].time_left() if run_of else None
    if left is None:
        end()
        return
    thread = threading.Thread(target=end, name="ckpt-end", daemon=True)
    thread.start()
    thread.join(max(1.0, left))
    if thread.is_alive():
        logger.warning(
            "The end of attempt %d could not be recorded in time; the next waits for its lease", attempt.number
        )
