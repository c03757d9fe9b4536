"""Where a number comes from: every constant a tool uses is printed with this."""

from dataclasses import asdict, dataclass
from enum import Enum


class Kind(str, Enum):
    """Why a constant may be believed."""

    PUBLISHED = "published"
    FITTED = "fitted"
    MEASURED = "measured"
    GIVEN = "given"
    ASSUMED = "assumed"


@dataclass(frozen=True)
class Constant:
    """A number with its origin.

    Attributes:
        name: What it is.
        value: The number or text, in `unit`.
        unit: Its unit, empty for a pure number.
        kind: Published, fitted to runs, measured, given by the user, or assumed.
        source: Paper, file or reason.
    """

    name: str
    value: float | str
    unit: str
    kind: Kind
    source: str

    def as_dict(self) -> dict[str, object]:
        """Returns the fields for JSON."""
        return asdict(self)
