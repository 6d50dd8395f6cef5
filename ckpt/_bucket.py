"""The traps that a bucket of S3 has set: versions and parts that are billed for ever, rules that delete or archive."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any

from ckpt._s3 import S3Storage
from ckpt.errors import AccessDeniedError, CkptError
from ckpt.examining import Finding, clock, ok, warn


def examine_bucket(storage: S3Storage) -> Iterator[Finding]:
    """What a bucket says about itself."""
    versioning, rules = _asked(storage, "get_bucket_versioning"), _asked(storage, "get_bucket_lifecycle_configuration")
    if isinstance(versioning, Finding):
        yield versioning
    else:
        when = versioning.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        if when:
            yield clock("clock", parsedate_to_datetime(when).timestamp() - time.time(), "the store's")
        yield _versioning(versioning.get("Status"), rules)
    if isinstance(rules, Finding):
        yield rules
    else:
        yield from _lifecycle(rules.get("Rules", []))


def _asked(storage: S3Storage, method: str) -> dict[str, Any] | Finding:
    check = "versioning" if "versioning" in method else "lifecycle"
    try:
        return dict(storage.ask(method))
    except AccessDeniedError:
        action = "s3:GetBucketVersioning" if check == "versioning" else "s3:GetLifecycleConfiguration"
        return warn(check, f"not visible without {action}", "allow it for this check, or look in the store's console")
    except CkptError as error:
        if "NoSuchLifecycleConfiguration" in str(error):
            return {}
        return ok(check, f"the store does not say ({str(error).partition(': ')[2].partition(':')[0] or 'no answer'})")


def _versioning(status: str | None, rules: dict[str, Any] | Finding) -> Finding:
    if status != "Enabled":
        return ok("versioning", "off: what is deleted is gone, and not billed")
    known = [] if isinstance(rules, Finding) else rules.get("Rules", [])
    if any("NoncurrentVersionExpiration" in rule for rule in _enabled(known)):
        return ok("versioning", "on, with a rule that expires old versions")
    return warn(
        "versioning", "on: checkpoints that retention deletes stay as old versions, and are billed for ever",
        "add a lifecycle rule with NoncurrentVersionExpiration for this prefix, or turn versioning off",
    )  # fmt: skip


def _lifecycle(rules: list[dict[str, Any]]) -> Iterator[Finding]:
    enabled = _enabled(rules)
    if any("AbortIncompleteMultipartUpload" in rule for rule in enabled):
        yield ok("unfinished uploads", "a lifecycle rule ends them")
    else:
        yield warn(
            "unfinished uploads", "no lifecycle rule ends them: parts of killed uploads are billed until a run sweeps them",
            "add a lifecycle rule with AbortIncompleteMultipartUpload, DaysAfterInitiation 7",
        )  # fmt: skip
    for rule in enabled:
        name = rule.get("ID", "?")
        classes = {str(item.get("StorageClass")) for item in rule.get("Transitions", [])}
        if "Days" in rule.get("Expiration", {}) or "Date" in rule.get("Expiration", {}):
            yield warn(
                "lifecycle", f"rule {name!r} deletes objects by age, checkpoints among them if its prefix covers the runs",
                "limit the rule's prefix, and let retention delete checkpoints",
            )  # fmt: skip
        if any("GLACIER" in item or "ARCHIVE" in item for item in classes):
            yield warn(
                "lifecycle", f"rule {name!r} archives objects: an archived checkpoint cannot be restored at once",
                "limit the rule's prefix, or move to a class that is read at once",
            )  # fmt: skip


def _enabled(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rule for rule in rules if rule.get("Status") == "Enabled"]
