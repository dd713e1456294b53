"""Wrap strategies of Flower's older interface, ``flwr.server.strategy``: fit instead of train.

Weights are lists of arrays in the model's order there. Put the wrapper around all others: a server drives the strategy,
so it cannot see whether it is the outermost.
"""

from typing import Any

from leakscope.capture.flower import Capture
from leakscope.contracts.errors import UserError
from leakscope.integrations import load_library
from leakscope.integrations.flower_mod import Inline
from leakscope.integrations.flower_strategy import Reply, record_replies, summary_of

_strategies = load_library("flwr.server.strategy", "flower")
_common = load_library("flwr.common", "flower")


class AuditedFitStrategy(_strategies.Strategy):  # type: ignore[name-defined]
    """Record each client's result of ``fit`` before averaging; delegate everything and change no aggregate."""

    def __init__(self, strategy: Any, capture: Capture, *, inline: Inline | None = None, run: str = "0") -> None:
        if not isinstance(strategy, _strategies.Strategy):
            raise UserError(f"strategy: expected one of flwr.server.strategy, got {type(strategy).__name__}")
        self.strategy, self.capture, self.inline, self.run = strategy, capture, inline, run
        self._asked: dict[str, Any] = {}

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        asked = self.strategy.configure_fit(server_round, parameters, client_manager)
        self._asked = {proxy.cid: instructions.parameters for proxy, instructions in asked}
        return asked

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        attacked = self.inline is not None and self.inline.in_round(server_round)
        found = []
        if self.capture.records(server_round) or attacked:
            replies = [
                Reply(
                    client=proxy.cid,
                    run=self.run,
                    before=_arrays(self._asked[proxy.cid]),
                    after=_arrays(result.parameters),
                    examples=result.num_examples,
                )
                for proxy, result in results
                if proxy.cid in self._asked
            ]
            found = record_replies(self.capture, self.inline, server_round, replies)
        parameters, metrics = self.strategy.aggregate_fit(server_round, results, failures)
        if self.inline is not None and self.inline.send:
            metrics = {**metrics, **summary_of(found)}
        return parameters, metrics

    def initialize_parameters(self, client_manager: Any) -> Any:
        return self.strategy.initialize_parameters(client_manager)

    def configure_evaluate(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        return self.strategy.configure_evaluate(server_round, parameters, client_manager)

    def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> Any:
        return self.strategy.aggregate_evaluate(server_round, results, failures)

    def evaluate(self, server_round: int, parameters: Any) -> Any:
        return self.strategy.evaluate(server_round, parameters)


def _arrays(parameters: Any) -> dict[str, Any]:
    return {str(place): array for place, array in enumerate(_common.parameters_to_ndarrays(parameters))}
