"""What went wrong in S3, as the errors of this package."""

from __future__ import annotations

from typing import Any

import botocore.exceptions as boto

from ckpt.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CkptError,
    ConfigError,
    CredentialsExpiredError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StorageFullError,
    TransientStorageError,
)

_KINDS: dict[type[StorageError], frozenset[str]] = {
    ObjectNotFoundError: frozenset({"NoSuchKey", "NoSuchVersion", "404"}),
    BucketNotFoundError: frozenset({"NoSuchBucket"}),
    CredentialsExpiredError: frozenset({
        "ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired", "ExpiredAccessKey",
    }),
    AccessDeniedError: frozenset({
        "AccessDenied", "AllAccessDisabled", "AccountProblem", "InvalidAccessKeyId", "InvalidSecurity", "InvalidToken",
        "SignatureDoesNotMatch", "NotSignedUp", "UnauthorizedAccess", "AuthFailure", "Forbidden", "Unauthorized",
        "401", "403",
    }),
    StorageFullError: frozenset({
        "QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientCapacity", "StorageFull",
        "507",
    }),
    TransientStorageError: frozenset({
        "SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException", "RequestThrottled", "TooManyRequests",
        "RequestLimitExceeded", "BandwidthLimitExceeded", "InternalError", "InternalFailure", "RequestTimeout",
        "RequestTimeTooSkewed", "RequestTimeoutException", "OperationAborted", "ConditionalRequestConflict",
        "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "PriorRequestNotComplete", "NoSuchUpload",
        "InvalidPart", "ServerBusy",
        "408", "425", "429", "500", "502", "503", "504",
    }),
}  # fmt: skip
_PERMANENT = frozenset({"InvalidObjectState", "NotImplemented", "501", "PermanentRedirect", "MethodNotAllowed"})
_OTHER_REGION = "the bucket is in another region: set AWS_REGION or storage_options={'region': ...}"
_HINTS = {
    "RequestTimeTooSkewed": "the clock of this host is wrong: set it",
    "PermanentRedirect": _OTHER_REGION,
    "AuthorizationHeaderMalformed": _OTHER_REGION,
    "IllegalLocationConstraintException": _OTHER_REGION,
    "InvalidAccessKeyId": "the store does not know this access key: look at what credentials= names",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key: look at what credentials= names",
    "InvalidToken": "the session token is not valid here: look at what credentials= names",
    "InvalidObjectState": "the object is archived: restore it in the store first",
    "ExpiredToken": "the session token has expired",
    "NoSuchBucket": "create the bucket, or correct the name or the endpoint",
}
_CHANGE_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give credentials='profile:<name>' or 'block:<type>/<name>'"
)
_LOGIN = (
    boto.UnauthorizedSSOTokenError, boto.SSOTokenLoadError, boto.TokenRetrievalError, boto.PartialCredentialsError,
)  # fmt: skip
_CONFIG = (
    boto.ProfileNotFound, boto.ConfigParseError, boto.ConfigNotFound, boto.ParamValidationError, boto.NoRegionError,
    boto.InvalidRegionError, boto.UnknownEndpointError, boto.InvalidConfigError, boto.InvalidS3AddressingStyleError,
)  # fmt: skip


def translate(verb: str, uri: str, error: BaseException) -> BaseException:
    """The error of this package for `error`; one of this package, or no `Exception`, as it is.

    Args:
        verb: what was being done, for the text.
        uri: to what.
        error: anything that a call of s3fs's client raises.
    """
    while isinstance(error, OSError) and isinstance(error.__cause__, boto.ClientError):
        error = error.__cause__  # s3fs hides the store's own words behind an OSError
    if isinstance(error, CkptError) or not isinstance(error, Exception):
        return error
    if isinstance(error, boto.ClientError):
        return from_answer(f"{verb} {uri}", error.response)
    return _without_answer(f"{verb} {uri}", error)


def _without_answer(what: str, error: Exception) -> Exception:  # noqa: PLR0911 - one line per kind of error
    """The error where the store has not answered."""
    if isinstance(error, boto.NoCredentialsError):
        return AccessDeniedError(f"{what}: no credentials found; {_CHANGE_CREDENTIALS}")
    if isinstance(error, _LOGIN):
        return AccessDeniedError(f"{what}: {error}; log in again, e.g. with 'aws sso login'")
    if isinstance(error, _CONFIG):
        return ConfigError(f"{what}: {error}")
    if isinstance(error, boto.SSLError) and "CERTIFICATE" in str(error).upper():
        return StorageError(f"{what}: {error}; set AWS_CA_BUNDLE to the certificate authority of this store")
    if isinstance(error, boto.BotoCoreError | OSError | EOFError) or _is_of_aiohttp(error):
        return TransientStorageError(f"{what}: {type(error).__name__}: {error}")
    if isinstance(error, ValueError | TypeError):
        return ConfigError(f"{what}: {type(error).__name__}: {error}")
    return StorageError(f"{what}: {type(error).__name__}: {error}")


def from_answer(what: str, answer: Any) -> StorageError:
    """The error for an answer of the store, or for one key's entry of a bulk answer."""
    said = answer.get("Error", answer)
    code, text = str(said.get("Code", "?")), str(said.get("Message") or "no reason given")
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    hint = f"; {_HINTS[code]}" if code in _HINTS else ""
    return kind_of(code, status)(f"{what}: {code}: {text}{hint}")


def code_of(error: BaseException) -> str:
    """The store's error code behind a translated error; empty where there is none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, boto.ClientError):
        cause = cause.__cause__
    return "" if cause is None else str(cause.response.get("Error", {}).get("Code", ""))


def kind_of(code: str, status: int = 0) -> type[StorageError]:
    """The class of error for an error code of S3 and, where the code is unknown, the HTTP status."""
    if code in {"PreconditionFailed", "412"} or status == 412:
        return ObjectExistsError
    if code in _PERMANENT:
        return StorageError
    for text in (code, str(status)):
        for kind, codes in _KINDS.items():
            if text in codes:
                return kind
    return TransientStorageError if status >= 500 or "Throttl" in code or "SlowDown" in code else StorageError


def _is_of_aiohttp(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "aiohttp"
