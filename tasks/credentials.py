"""Credentials blocks: `block:<type>/<name>` as fsspec options, loaded in the process that needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prefect.blocks.core import Block

from ckpt.errors import AccessDeniedError, ConfigError


def load_block(reference: str, protocol: str) -> dict[str, Any]:
    """Load a credentials block of Prefect as options of an fsspec file system.

    Args:
        reference: `<type>/<name>`, such as `aws-credentials/prod`.
        protocol: the file system's: `s3`, `gs`, `abfs`, ...

    Raises:
        ConfigError: the block's type is none that this package knows for that file system.
        AccessDeniedError: there is no such block, or it cannot be loaded.
    """
    kind, _, _name = reference.partition("/")
    known = _OPTIONS.get(protocol, {})
    options = known.get(kind)
    if options is None:
        raise ConfigError(
            f"credentials block:{reference}: blocks of type {kind!r} are not known for {protocol}://; "
            f"known are {', '.join(sorted(known)) or 'none'}"
        )
    try:
        block: Any = Block.load(reference)
    except ValueError as error:
        raise AccessDeniedError(f"credentials block:{reference} cannot be loaded: {error}") from error
    return {key: value for key, value in options(block).items() if value is not None}


def _aws(block: Any) -> Mapping[str, Any]:
    client = {
        key: value for key, value in dict(block.aws_client_parameters.get_params_override()).items() if key != "config"
    }
    return {
        "key": block.aws_access_key_id,
        "secret": _plain(block.aws_secret_access_key),
        "token": block.aws_session_token,
        "profile": block.profile_name,
        "client_kwargs": {**client, **({"region_name": block.region_name} if block.region_name else {})} or None,
    }


def _minio(block: Any) -> Mapping[str, Any]:
    client = {
        key: value for key, value in dict(block.aws_client_parameters.get_params_override()).items() if key != "config"
    }
    return {
        "key": block.minio_root_user,
        "secret": _plain(block.minio_root_password),
        "client_kwargs": {**client, **({"region_name": block.region_name} if block.region_name else {})} or None,
    }


def _gcp(block: Any) -> Mapping[str, Any]:
    return {"token": _plain(block.service_account_info) or block.service_account_file, "project": block.project}


def _azure(block: Any) -> Mapping[str, Any]:
    return {
        "connection_string": _plain(block.connection_string),
        "account_name": getattr(block, "account_url", None) and str(block.account_url).split("//")[-1].split(".")[0],
    }


def _plain(secret: Any) -> Any:
    return secret.get_secret_value() if hasattr(secret, "get_secret_value") else secret


_Reader = Callable[[Any], Mapping[str, Any]]
"""Options of a file system, from a loaded block."""
_AZURE: dict[str, _Reader] = {"azure-blob-storage-credentials": _azure}
_OPTIONS: dict[str, dict[str, _Reader]] = {
    "s3": {"aws-credentials": _aws, "minio-credentials": _minio},
    "gs": {"gcp-credentials": _gcp},
    "gcs": {"gcp-credentials": _gcp},
    "abfs": _AZURE,
    "az": _AZURE,
}
