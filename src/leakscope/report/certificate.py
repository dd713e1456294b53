"""Say what certificates prove, in the words that the page, the console, SARIF and test reports share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from leakscope.contracts.certificate import Certificate
from leakscope.contracts.reconstruction import RECOVERED
from leakscope.report.words import fixed, short
from leakscope.results.records import NAN, counted
from leakscope.results.strongest import StrongestExample

#: Of a captured update whose examples are all certified, beside which no baseline is needed.
CERTIFIED = (
    "Recovered, certified: every input explains the update as well as rounding or known noise allows, and no other "
    "input near it does."
)
RECOVERED_PSNR = -20 * math.log10(RECOVERED)


def certificate_words(certificate: Certificate | None, psnr: float = NAN) -> str:
    """Say what a certificate proves of one example; empty without one. The truth has the last word, where known.

    >>> proof = Certificate(residual=0.4, tolerance=1.0, free_directions=0, method="masks decoded")
    >>> certificate_words(proof), certificate_words(proof, 12.0)
    ('recovered, certified', 'certified, but the original differs (12.0 dB)')
    >>> certificate_words(Certificate(residual=0.4, tolerance=1.0, free_directions=2304, method="Gauss-Newton"))
    'explains the update, but 2,304 directions of the input are not determined'
    """
    if certificate is None:
        return ""
    if certificate.holds:
        wrong = psnr < RECOVERED_PSNR
        return f"certified, but the original differs ({fixed(psnr)} dB)" if wrong else "recovered, certified"
    if certificate.not_unique:
        free = counted(certificate.free_directions or 0, "direction")
        verb = "is" if certificate.free_directions == 1 else "are"
        return f"explains the update, but {free} of the input {verb} not determined"
    if certificate.explains:
        return "explains the update; free directions were not counted"
    return "does not explain the update"


def certificate_details(certificate: Certificate | None, psnr: float = NAN) -> str:
    """Say the same with the method and the residual."""
    if certificate is None:
        return ""
    residual = f"residual {short(certificate.residual)} (limit {short(certificate.tolerance)})"
    return f"{certificate_words(certificate, psnr)}; {certificate.method}, {residual}"


def shared_words(certificates: Sequence[Certificate | None], psnrs: Sequence[float] = ()) -> list[str]:
    """Say once what several examples share; leave out those that do not explain the update.

    >>> proof = Certificate(residual=0.4, tolerance=1.0, free_directions=0, method="masks decoded")
    >>> shared_words([proof, None, proof])
    ['2 of 3 examples: recovered, certified (masks decoded)']
    """
    if not certificates:
        return []
    known = psnrs or [NAN] * len(certificates)
    told = Counter(
        f"{certificate_words(proof, psnr)} ({proof.method})"
        for proof, psnr in zip(certificates, known, strict=True)
        if proof is not None and proof.explains
    )
    return [f"{count} of {counted(len(certificates), 'example')}: {words}" for words, count in told.items()]


def strongest_words(examples: Sequence[StrongestExample]) -> list[str]:
    """Say what was proved of the strongest reconstruction of each example, beside the truth."""
    return shared_words([example.certificate for example in examples], [example.psnr for example in examples])
