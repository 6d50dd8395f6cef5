"""Settings under `PREFECT_INTEGRATIONS_CKPT_*`: from the environment, `.env`, a profile, or `prefect.toml`, as Prefect's own."""

from __future__ import annotations

from typing import Annotated

from prefect.settings.base import PrefectBaseSettings, build_settings_config
from pydantic import BeforeValidator, Field

PREFIX = "PREFECT_INTEGRATIONS_CKPT_"


def _parts(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class CkptSettings(PrefectBaseSettings):
    """What holds for every run of a place; read anew each time."""

    model_config = build_settings_config(("integrations", "ckpt"))

    allowed_functions: Annotated[str | list[str], BeforeValidator(_parts)] = Field(
        default_factory=list,
        description="Prefixes of modules whose functions may be named in a form, separated by commas.",
    )
    concurrency_limit: str | None = Field(
        default=None, description="The global concurrency limit of runs whose configuration names none."
    )
    storage_path: str | None = Field(
        default=None, description="Where runs are kept: what `ckpt doctor` looks at if no storage is named."
    )
