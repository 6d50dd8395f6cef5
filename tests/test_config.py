"""Configuration: checked where it is made, with the value in the text."""

import dataclasses
import pickle
from pathlib import Path

import pytest

from ckpt import (
    CheckpointConfig,
    FailurePolicy,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepYounger,
    RunConfig,
    UploadConfig,
    ValidationTaskConfig,
)
from ckpt.config import parse_bytes
from ckpt.errors import ConfigError
from ckpt.retention import KeepAll

RUN = {"name": "run", "storage_path": "/runs"}


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        (CheckpointConfig, {"num_to_keep": 0}, "num_to_keep=0"),
        (CheckpointConfig, {"num_to_keep": True}, "num_to_keep=True"),
        (CheckpointConfig, {"num_to_keep": "3"}, "num_to_keep='3'"),
        (CheckpointConfig, {"checkpoint_score_order": "up"}, "'up'"),
        (CheckpointConfig, {"checkpoint_score_attribute": 5}, "checkpoint_score_attribute=5"),
        (CheckpointConfig, {"retention": 3}, "retention=3"),
        (CheckpointConfig, {"num_to_keep": 1, "retention": KeepLast(1)}, "not both"),
        (UploadConfig, {"max_concurrent_uploads": 0}, "max_concurrent_uploads=0"),
        (UploadConfig, {"max_pending": 1.5}, "max_pending=1.5"),
        (UploadConfig, {"when_full": "wait"}, "'wait'"),
        (UploadConfig, {"block_timeout": 0}, "block_timeout=0"),
        (UploadConfig, {"block_timeout": float("inf")}, "block_timeout=inf"),
        (UploadConfig, {"stall_timeout": float("nan")}, "stall_timeout=nan"),
        (UploadConfig, {"retry_budget": "5m"}, "'5m'"),
        (UploadConfig, {"memory_budget": "lots"}, "'lots'"),
        (UploadConfig, {"memory_budget": "0MB"}, "'0MB'"),
        (UploadConfig, {"concurrency_limit": " "}, "concurrency_limit=' '"),
        (UploadConfig, {"concurrency_limit": 2}, "concurrency_limit=2"),
        (FailurePolicy, {"stop_after": 0}, "stop_after=0"),
        (FailurePolicy, {"red_on": "all"}, "'all'"),
        (RunConfig, {**RUN, "name": "a/b"}, "'a/b'"),
        (RunConfig, {**RUN, "name": "../x"}, "'../x'"),
        (RunConfig, {**RUN, "name": ""}, "''"),
        (RunConfig, {**RUN, "name": ".hidden"}, "'.hidden'"),
        (RunConfig, {**RUN, "name": "a@b"}, "'a@b'"),
        (RunConfig, {**RUN, "name": "x\x00"}, "x"),
        (RunConfig, {**RUN, "name": None}, "None"),
        (RunConfig, {**RUN, "name": "n" * 201}, "200 bytes"),
        (RunConfig, {**RUN, "storage_path": None}, "storage_path=None"),
        (RunConfig, {**RUN, "storage_path": ""}, "empty"),
        (RunConfig, {**RUN, "storage_path": "s3://"}, "no bucket"),
        (RunConfig, {**RUN, "storage_path": "s3://b/../c"}, "'..'"),
        (RunConfig, {**RUN, "credentials": "password"}, "credentials="),
        (RunConfig, {**RUN, "staging_dir": 3}, "staging_dir=3"),
        (RunConfig, {**RUN, "checkpoint_config": {"num_to_keep": 1}}, "checkpoint_config="),
        (RunConfig, {**RUN, "upload_config": None}, "upload_config=None"),
        (RunConfig, {**RUN, "failure_policy": "any"}, "failure_policy='any'"),
        (RunConfig, {**RUN, "resume": "yes"}, "'yes'"),
        (RunConfig, {**RUN, "resume": None}, "resume=None"),
        (RunConfig, {**RUN, "stop_timeout": -1}, "stop_timeout=-1"),
        (RunConfig, {**RUN, "validation_fn": "package:function"}, "'package:function'"),
        (RunConfig, {**RUN, "validation_task_config": {}}, "validation_task_config={}"),
        (RunConfig, {**RUN, "max_concurrent_validations": 0}, "max_concurrent_validations=0"),
        (ValidationTaskConfig, {"fn_kwargs": {"data": object()}}, "'data'"),
        (ValidationTaskConfig, {"fn_kwargs": [1]}, "fn_kwargs=[1]"),
        (ValidationTaskConfig, {"timeout_s": 0}, "timeout_s=0"),
        (KeepLast, {"n": 0}, "KeepLast(0)"),
        (KeepBest, {"n": 1, "attribute": 3}, "attribute=3"),
        (KeepBest, {"n": 1, "attribute": "a", "order": "low"}, "'low'"),
        (KeepEvery, {"n": True}, "KeepEvery(True)"),
        (KeepYounger, {"seconds": float("nan")}, "nan"),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_a_value_that_can_never_work_is_refused_at_construction(kind, fields, named):
    """The text names it; nothing has been contacted."""
    with pytest.raises(ConfigError) as caught:
        kind(**fields)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"secret": "hunter2"},
        {"client_kwargs": {"aws_secret_access_key": "hunter2"}},
        {"token": "hunter2"},
        {"endpoint_url": "https://user:hunter2@host"},
    ],
)
def test_a_secret_in_the_storage_options_is_refused_and_not_repeated(options):
    """Options are written to logs and forms."""
    with pytest.raises(ConfigError, match="credentials=") as caught:
        RunConfig(**RUN, storage_options=options)
    assert "hunter2" not in str(caught.value)


def test_a_password_in_the_storage_path_is_refused_and_not_repeated():
    """As in `ftp://user:password@host`."""
    with pytest.raises(ConfigError) as caught:
        RunConfig(name="run", storage_path="ftp://user:hunter2@host/x")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 512 * 2**20), ("1GB", 10**9), (1024, 1024), ("7", 7), ("1.5 KiB", 1536), (" 2 mb ", 2_000_000)],
)
def test_sizes_are_read_as_people_write_them(text, size):
    """Binary and decimal units, or bytes."""
    assert parse_bytes(text, "x") == size


def test_a_configuration_is_frozen_and_pickles():
    """Tasks get it as a parameter."""
    config = RunConfig(name="run", storage_path=Path("/runs"), checkpoint_config=CheckpointConfig(num_to_keep=2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.name = "other"
    assert pickle.loads(pickle.dumps(config)) == config


def test_the_policy_is_what_the_fields_say():
    """`num_to_keep` is the best with a score attribute, else the newest."""
    assert CheckpointConfig().policy == KeepAll()
    assert CheckpointConfig(num_to_keep=2).policy == KeepLast(2)
    assert CheckpointConfig(
        num_to_keep=2, checkpoint_score_attribute="a", checkpoint_score_order="min"
    ).policy == KeepBest(2, "a", "min")
    assert CheckpointConfig(retention=KeepEvery(5)).policy == KeepEvery(5)


def test_a_blocked_report_gives_up_before_nccls_watchdog_ends_the_process():
    """Which is after 600 s by default."""
    assert UploadConfig().block_timeout < 600
