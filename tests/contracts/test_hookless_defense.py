"""A defence that changes nothing is a mistake, and a misspelt hook is named."""

from __future__ import annotations

import pytest

from leakscope.contracts.defense import HOOKS, Chain, Defense


def test_a_defence_without_a_hook_lists_them_all() -> None:
    class Idle(Defense):
        def channel(self, *, examples=1, reduction="mean"):
            return None

    with pytest.raises(ValueError, match="Idle: expected a defence that overrides at least one of") as told:
        Idle()
    assert all(hook in str(told.value) for hook in HOOKS)
    assert "did you mean" not in str(told.value)


def test_a_misspelt_hook_is_told_and_inherited_or_fitted_ones_count() -> None:
    class Misspelt(Defense):
        def protect_gradients(self, gradient, generator):
            return gradient

    class Acting(Defense):
        def protect_message(self, update, generator):
            return update

    class Heir(Acting):
        pass

    class Fitted(Defense):
        def for_model(self, model, input_shape, output_shape):
            return Acting()

    with pytest.raises(ValueError, match=r"protect_gradients is none of them; did you mean protect_gradient\?"):
        Misspelt()
    assert Heir().hooks == ("protect_message",)
    assert [Fitted(), Defense(), Chain(parts=())]
