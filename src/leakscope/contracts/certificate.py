"""A certificate: the proof, without the truth, that a reconstructed example is the client's own."""

from dataclasses import dataclass
from typing import Self

#: What rounding to float32 leaves of an update, as a share of it.
ROUNDING = 2.0**-23
#: A share of the update up to which rounding explains what is left, after it has passed through some layers.
EXPLAINED = 1e-6


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Say what was proved of one example. Explaining the update is not enough: nothing else may explain it.

    ``residual`` is what the inputs leave of the update, in units of what rounding (or known noise) leaves by itself; up
    to ``tolerance`` the update counts as explained. ``free_directions`` counts the directions in which this example can
    move without a trace in the equations that were solved; None where they were not counted.

    >>> Certificate(residual=0.4, tolerance=1.0, free_directions=0, method="masks decoded").holds
    True
    >>> Certificate(residual=0.4, tolerance=1.0, free_directions=12, method="masks decoded").holds
    False
    """

    residual: float
    tolerance: float
    free_directions: int | None
    method: str

    @classmethod
    def of_share(cls, share: float, free_directions: int | None, method: str, tolerance: float = EXPLAINED) -> Self:
        """Certify inputs that leave this ``share`` of an update whose entries were rounded to float32."""
        units = {"residual": share / ROUNDING, "tolerance": tolerance / ROUNDING}
        return cls(**units, free_directions=free_directions, method=method)

    @property
    def explains(self) -> bool:
        """Whether the example explains the update; a residual of NaN does not."""
        return self.residual <= self.tolerance

    @property
    def holds(self) -> bool:
        """Whether the example explains the update and nothing near it does."""
        return self.explains and self.free_directions == 0

    @property
    def not_unique(self) -> bool:
        """Whether the example explains the update, and so do others."""
        return self.explains and bool(self.free_directions)
