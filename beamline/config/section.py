"""What all sections of a configuration are made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Bound = Annotated[float, Field(gt=0, le=1e6)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are immutable, docstrings are the documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
