"""Short searches where known noise drowns the update: there is nothing to find, and a longer search fits the noise."""

from __future__ import annotations

import dataclasses

from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.equations.noise_test import drowned
from leakscope.matching import Matcher

#: Steps of a search in noise that drowns the update: enough to show what the search makes of noise.
DROWNED_STEPS = 30
NOTE = f"the known noise drowns the clipped update, so the search ends after at most {DROWNED_STEPS} steps"


def shortened(matcher: Matcher, observation: Observation) -> Matcher:
    """Return the matcher, with fewer steps where the noise drowns the update."""
    if not drowned(observation):
        return matcher
    return dataclasses.replace(matcher, iterations=min(matcher.iterations, DROWNED_STEPS))


def explained_end(result: Reconstruction, observation: Observation) -> Reconstruction:
    """Return the result, with a note in place of the flag where the noise drowns the update.

    That the objective would go on falling does not mean that more steps would find anything.
    """
    if not drowned(observation):
        return result
    flags = tuple(flag for flag in result.flags if flag != "did not converge")
    return dataclasses.replace(result, flags=flags, notes=(*result.notes, NOTE))
