"""What every part of a configuration has in common."""

from pydantic import BaseModel, ConfigDict


class ConfigModel(BaseModel):
    """A frozen part of a configuration that refuses keys it does not know."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )
