"""How a storage gets its credentials: by name, resolved in every process, so that no secret is ever passed around.

    "env"                   what the store's own client finds: environment, config files, instance role
    "profile:<name>"        a profile of the AWS config files
    "block:<type>/<name>"   a credentials block of Prefect (read by `ckpt_tasks`), e.g. "block:aws-credentials/prod"
    a callable              gives fsspec options such as {"key": ..., "secret": ..., "token": ...}; in code only

What a callable or a block gives may hold `expires_at` (epoch seconds, a datetime or ISO text): requests to S3 are then
signed with fresh credentials before that time, also in the middle of a long upload.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from ckpt.errors import AccessDeniedError, CkptError, ConfigError

Credentials: TypeAlias = str | Callable[[], Mapping[str, Any]]
"""`"env"`, `"profile:<name>"`, `"block:<type>/<name>"`, or a callable that returns fsspec options."""

ENTRY_POINTS = "prefect_ckpt.credentials"
"""Entry point group; the one named `block` is a function `("<type>/<name>", protocol) -> fsspec options`."""

_GRAMMAR = "use 'env', 'profile:<name>', 'block:<type>/<name>', or in code a callable that returns fsspec options"
_REFERENCE = re.compile(r"env|profile:[^\s:/][^:/]*|block:[^\s:/]+/[^\s:/][^:/]*")
_SECRET_NAMES = frozenset({"key", "secret", "token", "pwd", "passphrase", "pkey", "sas"})
_SECRET_WORDS = re.compile(
    r"secret|passw|token|credential|access_?key|account_?key|private_?key|api_?key|customer_?key(?!md5)|sas_?|"
    r"connection_?string|authorization",
    re.IGNORECASE,
)
_PUBLIC_TOKENS = frozenset({"anon", "cloud", "google_default", "cache", "browser"})
"""What gcsfs takes as `token` to say where to look; these are words, not secrets."""
_URL_SECRET = re.compile(
    r"\b(sig|signature|x-amz-[a-z-]+|awsaccesskeyid|[a-z_]*token|[a-z_]*key)=[^&\s\"'<>]+", re.IGNORECASE
)
_URL_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]*@")


def check_credentials(value: Credentials) -> Credentials:
    """`value` itself, if it follows the grammar.

    Raises:
        ConfigError: it does not. The value is not repeated: somebody may have put a secret there.
    """
    if callable(value) or (isinstance(value, str) and _REFERENCE.fullmatch(value)):
        return value
    raise ConfigError(f"credentials= was given something it does not understand; {_GRAMMAR}")


def check_storage_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of `options`, if none of them carries a secret, at any depth.

    Raises:
        ConfigError: one does. The text names its key, never its value.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ConfigError(f"storage_options must be a mapping of fsspec options, not {type(options).__name__}")
    for name in _secrets(options):
        raise ConfigError(
            f"storage_options[{name!r}] carries a secret, and options are written to logs and forms: "
            f"pass it with credentials= ({_GRAMMAR})"
        )
    return dict(options)


def resolve_credentials(value: Credentials, protocol: str) -> dict[str, Any]:
    """The fsspec options for `value`, looked up now; may hold `expires_at`.

    Args:
        value: see the module's text.
        protocol: the URI's scheme, for blocks that serve several.

    Raises:
        ConfigError: the value does not follow the grammar, or the entry point for blocks is missing.
        AccessDeniedError: the block or the callable failed; the text has its reason.
    """
    check_credentials(value)
    if callable(value):
        return _called(value, "the credentials callable")
    kind, _, name = value.partition(":")
    if kind == "env":
        return {}
    if kind == "block":
        load = _block_loader(value)
        return _called(lambda: load(name, protocol), f"credentials {value!r}")
    if protocol not in {"s3", "s3a"}:
        raise ConfigError(
            f"credentials {value!r} is a profile of the AWS config files; {protocol}:// has none: use 'env'"
        )
    return {"profile": name}


def merged(found: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """What credentials gave under what the user's own options say, nested mappings merged likewise."""
    result = dict(found)
    for name, value in options.items():
        below = result.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[name] = {**below, **value} if both and below is not None else value
    return result


def redact(text: str) -> str:
    """`text` without what a URL in it may give away: signatures, tokens, passwords."""
    return _URL_WITH_PASSWORD.sub("://***@", _URL_SECRET.sub(r"\1=***", text))


def _block_loader(reference: str) -> Callable[[str, str], Mapping[str, Any]]:
    from importlib.metadata import entry_points

    found = [point for point in entry_points(group=ENTRY_POINTS) if point.name == "block"]
    if not found:
        raise ConfigError(
            f"credentials {reference!r} needs the entry point 'block' of group {ENTRY_POINTS!r}, which is not there: "
            "install prefect-ckpt with pip (a checkout on sys.path has no entry points)"
        )
    try:
        loader: Callable[[str, str], Mapping[str, Any]] = found[0].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"credentials {reference!r}: {found[0].value} cannot be imported: {error}") from error
    return loader


def _called(call: Callable[[], Mapping[str, Any]], what: str) -> dict[str, Any]:
    try:
        options = call()
    except CkptError:
        raise
    except Exception as error:
        # Its text may quote what it was given (pydantic's does), so only its type is passed on.
        raise AccessDeniedError(f"{what} could not be resolved: {type(error).__name__}") from error
    if not isinstance(options, Mapping):
        raise ConfigError(f"{what} must give a mapping of fsspec options, not {type(options).__name__}")
    return dict(options)


def _secrets(value: Any, name: str = "") -> Iterator[str]:
    """Dotted names of everything below `value` that looks like a secret."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            full = f"{name}.{key}" if name else str(key)
            if below is not None and _is_secret(str(key), below):
                yield full
            else:
                yield from _secrets(below, full)
    elif isinstance(value, list | tuple):
        for index, below in enumerate(value):
            yield from _secrets(below, f"{name}[{index}]")
    elif isinstance(value, str) and _URL_WITH_PASSWORD.search(value):
        yield name


def _is_secret(key: str, value: Any) -> bool:
    if isinstance(value, bool) or (key.lower() == "token" and value in _PUBLIC_TOKENS):
        return False
    return key.lower() in _SECRET_NAMES or bool(_SECRET_WORDS.search(key))
