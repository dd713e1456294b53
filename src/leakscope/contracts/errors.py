"""What can go wrong: mistakes of the caller, and refusals. Anything else that is raised is a defect."""

from leakscope.contracts.printable import printable


class LeakscopeError(Exception):
    """Everything that leakscope raises on purpose. Names from files are in it, so that its text is escaped."""

    def __str__(self) -> str:
        return printable(super().__str__())


class UserError(LeakscopeError, ValueError):
    """A mistake in what the caller gave: what was expected, what came, and how to fix it. Exit code 4."""


class Refusal(LeakscopeError, ValueError):
    """Something that cannot work here, and why; the caller made no mistake."""


class NotApplicable(Refusal):
    """A method cannot work on this model or update."""


class MissingKnowledge(Refusal):
    """The attack needs a fact that the threat model withholds."""
