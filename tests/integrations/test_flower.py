"""The Flower integration against the installed Flower, without a network: a grid that runs the client app in place."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import leakscope as ls
from leakscope.capture.recordings import PLACES, Origin
from leakscope.contracts.channel import Channel
from leakscope.contracts.observation import LocalTraining
from leakscope.integrations.flower_mod import _next_number

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'leakscope[flower]'")

from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAdam, FedAvg, FedMedian, Strategy

from leakscope.integrations import flower
from leakscope.integrations.flower_mod import NOT_INNERMOST
from leakscope.integrations.flower_strategy import INNER
from leakscope.integrations.leakage import UNTOLD, measure

NODES = (11, 22, 33)
RATE = 0.05
TILES = ls.load_data("tiles", limit=99)


def small_net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(3072, 16), nn.ReLU(), nn.Linear(16, 9))


def capture(folder: Path, **changes: Any) -> flower.Capture:
    facts: dict[str, Any] = {
        "folder": folder,
        "model": small_net(),
        "input_shape": TILES.shape,
        "num_classes": 9,
        "value_range": TILES.value_range,
        "training": LocalTraining(epochs=1, batch_size=1, learning_rate=RATE, optimizer="sgd"),
    }
    return flower.Capture(**{**facts, **changes})


def client_app(mods: Iterable[Any], *, examples: int = 1, fails: int | None = None) -> ClientApp:
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if context.node_id == fails:
            return Message(Error(code=1, reason="asked to fail"), reply_to=message)
        net = small_net()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        place = NODES.index(context.node_id)
        x, y = TILES.x[place : place + examples], TILES.y[place : place + examples]
        flower.hold_truth(x, y)
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        torch.optim.SGD(net.parameters(), lr=RATE).step()
        # Unequal weights, so that the order in which an aggregate adds up would show.
        metrics = MetricRecord({"loss": loss.item(), "num-examples": examples})
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"loss": 1.0, "num-examples": 1})}), reply_to=message)

    return app


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages carry the run and node of their process, which Flower sets as it starts one."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 5)


class InPlaceGrid:
    """As much of Flower's grid as strategies use; replies come back in the order asked, or another."""

    def __init__(self, app: ClientApp, order: Callable[[list[Message]], list[Message]] = list) -> None:
        self.app, self.order = app, order

    def get_node_ids(self) -> list[int]:
        return list(NODES)

    def send_and_receive(self, messages: Iterable[Message], **_: Any) -> Iterable[Message]:
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            context = Context(run_id=5, node_id=node, node_config={}, state=RecordDict(), run_config={})
            replies.append(self.app(message, context))
        return iter(self.order(replies))  # once only, as a stream


def run(strategy: Strategy, app: ClientApp, rounds: int = 2, **options: Any) -> Any:
    random.seed(0)  # Flower samples nodes from the global generator
    np.random.seed(0)
    return strategy.start(InPlaceGrid(app, **options), ArrayRecord(small_net().state_dict()), num_rounds=rounds)


def arrays_of(result: Any) -> dict[str, bytes]:
    return {key: array.numpy().tobytes() for key, array in result.arrays.items()}


def server_side_privacy() -> Strategy:
    return DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.1, 0.05, 3)


class OwnStart(FedAvg):
    """As users write it: a start of one's own that calls the parent's, and an attribute that it keeps."""

    def start(self, *args: Any, **options: Any) -> Any:
        self.started = True
        return super().start(*args, **options)


@pytest.mark.parametrize("make", [FedAvg, FedAdam, FedMedian, server_side_privacy, OwnStart], ids=lambda f: f.__name__)
@pytest.mark.parametrize("order", [list, lambda replies: replies[::-1]], ids=["in-order", "reversed"])
def test_the_wrapper_changes_no_aggregate(make: Callable[[], Strategy], order: Any, tmp_path: Path) -> None:
    plain = run(make(), client_app([]), order=order)
    inner = make()
    wrapped = flower.AuditedStrategy(inner, capture(tmp_path), inline=flower.Inline())
    audited = run(wrapped, client_app([]), order=order)
    assert arrays_of(audited) == arrays_of(plain)
    for number, metrics in plain.train_metrics_clientapp.items():
        after = audited.train_metrics_clientapp[number]
        assert {key: after[key] for key in metrics} == dict(metrics)
    assert audited.evaluate_metrics_clientapp == plain.evaluate_metrics_clientapp
    assert not {"configure_train", "aggregate_train"} & set(vars(inner))
    if isinstance(inner, OwnStart):
        assert wrapped.started  # what the strategy keeps is the strategy's, and is found through the wrapper
    assert len(flower.recordings(tmp_path)) == 6


def test_the_mods_change_no_answer(tmp_path: Path) -> None:
    noise = LocalDpMod(clipping_norm=0.05, sensitivity=0.01, epsilon=1.0, delta=1e-5)
    plain = run(FedAvg(), client_app([noise]))
    channel = flower.channel_of_local_dp(noise)
    mods = flower.audited_mods(
        [noise],
        raw=flower.AuditMod(capture(tmp_path), position="raw", inline=flower.Inline()),
        as_sent=flower.AuditMod(capture(tmp_path, channel=channel), position="as_sent", inline=flower.Inline()),
    )
    audited = run(FedAvg(), client_app(mods))
    assert arrays_of(audited) == arrays_of(plain)
    assert audited.train_metrics_clientapp[2]["loss"] == plain.train_metrics_clientapp[2]["loss"]


def test_raw_leaks_as_sent_does_not_and_both_say_where_they_stood(tmp_path: Path) -> None:
    noise = LocalDpMod(clipping_norm=0.05, sensitivity=0.01, epsilon=1.0, delta=1e-5)
    mods = flower.audited_mods(
        [noise],
        raw=flower.AuditMod(capture(tmp_path / "clients"), position="raw", inline=flower.Inline()),
        as_sent=flower.AuditMod(
            capture(tmp_path / "clients", channel=flower.channel_of_local_dp(noise)),
            position="as_sent",
            inline=flower.Inline(),
        ),
    )
    server = flower.AuditedStrategy(FedAvg(), capture(tmp_path / "server"), inline=flower.Inline(every_client=3))
    metrics = run(server, client_app(mods)).train_metrics_clientapp[1]
    assert metrics["leakscope.raw.psnr.worst_client"] > 100
    assert metrics["leakscope.raw.psnr"] > 100  # the average, which FedAvg itself makes
    assert metrics["leakscope.as_sent.psnr.worst_client"] < 20
    assert metrics["leakscope.raw.unexplained.worst_client"] < 1e-3 < metrics["leakscope.as_sent.unexplained"]
    # The server knows no truth, and claims no PSNR.
    assert metrics["leakscope.server.audited"] == 1
    assert not [key for key in metrics if key.startswith("leakscope.server") and ("psnr" in key or "lift" in key)]
    assert flower.altered_on_the_way(tmp_path / "clients", tmp_path / "server") == []

    later = flower.audit_recordings(tmp_path / "clients", model=small_net(), attack="linear-layer")
    places = {place: [one for one in later if one.origin.place == place] for place in ("raw", "as_sent")}
    assert [len(found) for found in places.values()] == [6, 6]
    assert all(min(one.lift or ()) > 80 for one in places["raw"])
    assert all(max(one.lift or ()) < 6 for one in places["as_sent"])
    assert all(UNTOLD not in one.notes for one in later)  # nothing acts on the raw update; as sent the channel is told
    at_server = flower.audit_recordings(tmp_path / "server", model=small_net(), attack="linear-layer")
    assert all(one.psnr is None and UNTOLD in one.notes for one in at_server)


def test_positions_the_wrong_way_round_are_refused(tmp_path: Path) -> None:
    raw = flower.AuditMod(capture(tmp_path), position="raw")
    sent = flower.AuditMod(capture(tmp_path), position="as_sent")
    with pytest.raises(ValueError, match="'raw' stands before 'as_sent'"):
        run(FedAvg(), client_app([raw, sent]), rounds=1)
    with pytest.raises(ValueError, match="position='raw', got 'as_sent'"):
        flower.audited_mods([], raw=sent)
    with pytest.raises(ValueError, match="has passed no defence yet"):
        flower.AuditMod(capture(tmp_path, channel=Channel(noise=1.0)), position="raw")
    with pytest.raises(ValueError, match="expected 'raw' or 'as_sent'"):
        flower.AuditMod(capture(tmp_path), position="outer")  # type: ignore[arg-type]


def test_raw_that_is_not_the_innermost_is_told_though_it_looks_safe(tmp_path: Path) -> None:
    noise = LocalDpMod(clipping_norm=0.05, sensitivity=0.01, epsilon=1.0, delta=1e-5)
    raw = flower.AuditMod(capture(tmp_path), position="raw")
    app = ClientApp(mods=[raw])
    inner = client_app([])
    app.train(mods=[noise])(inner._registered_funcs["train.default"])  # a function's mods stand inside the app's
    app.evaluate()(inner._registered_funcs["evaluate.default"])
    with pytest.warns(UserWarning, match="another mod stands inside position 'raw'"):
        run(FedAvg(), app, rounds=1)
    found = flower.audit_recordings(tmp_path, model=small_net(), attack="linear-layer", controls=False)
    for one in found:
        assert NOT_INNERMOST in one.notes
        assert any("of the client's own update unexplained" in note for note in one.notes)  # the truth tells it as well


def test_as_sent_in_the_wrong_place_is_found_out_by_comparing_with_the_server(tmp_path: Path) -> None:
    noise = LocalDpMod(clipping_norm=0.05, sensitivity=0.01, epsilon=1.0, delta=1e-5)
    inner = flower.AuditMod(capture(tmp_path / "clients"), position="as_sent")
    run(flower.AuditedStrategy(FedAvg(), capture(tmp_path / "server")), client_app([noise, inner]), rounds=1)
    lines = flower.altered_on_the_way(tmp_path / "clients", tmp_path / "server")
    assert len(lines) == 3
    assert "1.weight" in lines[0]
    with pytest.raises(ValueError, match="nothing to compare"):
        flower.altered_on_the_way(tmp_path / "server", tmp_path / "server")


def test_a_wrapper_inside_another_strategy_says_that_it_saw_altered_replies(tmp_path: Path) -> None:
    outer = DifferentialPrivacyServerSideFixedClipping(
        flower.AuditedStrategy(FedAvg(), capture(tmp_path / "inner")), 0.1, 0.001, 3
    )
    with pytest.warns(UserWarning, match="put the wrapper outermost"):
        run(outer, client_app([]), rounds=1)
    assert all(INNER in one.origin.notes for one in flower.recordings(tmp_path / "inner"))
    outermost = flower.AuditedStrategy(server_side_privacy(), capture(tmp_path / "outer"))
    run(outermost, client_app([]), rounds=1)
    assert all(one.origin.notes == () for one in flower.recordings(tmp_path / "outer"))
    inside, outside = (flower.recordings(tmp_path / name)[0].update() for name in ("inner", "outer"))
    assert float(inside["1.weight"].norm()) < 0.1 * float(outside["1.weight"].norm())


def test_what_is_recorded_is_the_update_and_belongs_to_its_owner(tmp_path: Path) -> None:
    mod = flower.AuditMod(capture(tmp_path / "new" / "folder", every=2), position="raw")
    run(FedAvg(), client_app([mod]), rounds=3)
    found = flower.recordings(tmp_path / "new" / "folder")
    assert sorted({one.origin.number for one in found}) == [1, 3]
    assert {one.origin.client for one in found} == {"11", "22", "33"}
    assert all(one.origin.library.startswith("flwr 1.") for one in found)
    for path in (tmp_path / "new" / "folder").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new" / "folder").stat().st_mode) == 0o700
    first = next(one for one in found if one.origin.client == "11" and one.origin.number == 1)
    seen = first.observation(small_net())
    own = ls.FedAvg(epochs=1, batch_size=1, lr=RATE).observe(small_net(), TILES.x[:1], TILES.y[:1])
    for name, value in own.message.update.items():
        assert torch.allclose(seen.message.update[name], value, atol=1e-7)
    assert seen.message.kind == "weight_delta"
    truth = first.truth()
    assert truth is not None
    assert torch.equal(truth[0], TILES.x[:1])
    # The server's folder has no truth in it, whatever the clients do.
    run(flower.AuditedStrategy(FedAvg(), capture(tmp_path / "server")), client_app([mod]), rounds=1)
    assert not list((tmp_path / "server").glob("*truth*"))


def test_every_reply_has_the_same_keys_though_not_every_client_is_attacked(tmp_path: Path) -> None:
    inline = flower.Inline(every_client=2, every_round=2, controls=False)  # of 11, 22 and 33 only 22 is even
    mod = flower.AuditMod(capture(tmp_path), position="raw", inline=inline)
    result = run(flower.AuditedStrategy(FedAvg(), capture(tmp_path)), client_app([mod]))
    first, second = result.train_metrics_clientapp[1], result.train_metrics_clientapp[2]
    assert first["leakscope.raw.audited"] == pytest.approx(1 / 3)
    assert np.isnan(first["leakscope.raw.psnr"])  # an average over clients of whom some were not attacked
    assert first["leakscope.raw.psnr.worst_client"] > 100
    assert set(second) == {"loss"}


def test_findings_stay_at_home_where_they_are_not_to_be_sent(tmp_path: Path) -> None:
    mod = flower.AuditMod(capture(tmp_path), position="raw", inline=flower.Inline(send=False))
    assert set(run(FedAvg(), client_app([mod]), rounds=1).train_metrics_clientapp[1]) == {"loss"}


def test_failed_clients_and_other_messages_pass_through(tmp_path: Path) -> None:
    mod = flower.AuditMod(capture(tmp_path / "clients"), position="raw")
    strategy = flower.AuditedStrategy(FedAvg(), capture(tmp_path / "server"))
    result = run(strategy, client_app([mod], fails=22), rounds=1)
    assert len(result.arrays) == 4
    for side in ("clients", "server"):
        assert {one.origin.client for one in flower.recordings(tmp_path / side)} == {"11", "33"}


def test_truth_hooks_and_clients_without_truth(tmp_path: Path) -> None:
    def hook(message: Any, context: Any) -> Any:
        place = NODES.index(context.node_id)
        return (TILES.x[place : place + 1], TILES.y[place : place + 1]) if place else None

    mod = flower.AuditMod(capture(tmp_path), position="raw", truth=hook)
    run(FedAvg(), client_app([mod]), rounds=1)
    found = flower.audit_recordings(tmp_path, model=small_net(), attack="linear-layer", others=TILES.x[9:])
    assert [one.psnr is None for one in found] == [True, False, False]
    assert found[0].metrics()["leakscope.raw.psnr"] != found[0].metrics()["leakscope.raw.psnr"]
    assert found[1].identified == (True,)
    flower.hold_truth(TILES.x, TILES.y)  # outside of a mod: nothing is held, nothing happens


def test_a_recipe_or_truth_that_is_not_the_clients_is_found_out(tmp_path: Path) -> None:
    """A wrong learning rate, wrong steps or wrong examples let attacks fail, which must not look like safety."""
    x, y = TILES.x[:4], TILES.y[:4]
    origin = Origin(place="raw", client="1", number=1)
    before = {name: value.numpy() for name, value in small_net().state_dict().items()}
    # With a coarse rate the order of the batches, which nobody tells, decides where the client ends.
    several = LocalTraining(epochs=3, batch_size=2, learning_rate=1e-3, optimizer="sgd")
    own = ls.FedAvg(epochs=3, batch_size=2, lr=1e-3).observe(small_net(), x, y)
    after = {name: before[name] - value.numpy() for name, value in own.message.update.items()}

    def notes(training: LocalTraining, truth: Any) -> str:
        seen = capture(tmp_path, training=training).observation(before, after, 4)
        found = measure(seen, origin, "linear-layer", truth=truth, controls=False)
        return " ".join(note for note in found.notes if "span" not in note)

    assert notes(several, (x, y)) == ""
    assert "is the learning rate right" in notes(LocalTraining(**{**vars(several), "learning_rate": 1.4e-3}), (x, y))
    assert "of the client's own update unexplained" in notes(several, (TILES.x[20:24], TILES.y[20:24]))
    assert "3 examples were held, 4 were told" in notes(several, (x[:3], y[:3]))


def test_noise_is_not_called_a_leak_and_divergence_is_told(tmp_path: Path) -> None:
    """Negative controls: an update of nothing, and one with NaN."""
    before = {name: value.numpy() for name, value in small_net().state_dict().items()}
    draws = torch.Generator().manual_seed(0)
    after = {n: v + 0.01 * torch.randn(v.shape, generator=draws).numpy() for n, v in before.items()}
    origin = Origin(place="as_sent", client="1", number=1)
    seen = capture(tmp_path).observation(before, after, 1)
    found = measure(seen, origin, "linear-layer", truth=(TILES.x[:1], TILES.y[:1]), others=TILES.x[9:])
    assert found.lift is not None
    assert found.lift[0] < 3
    assert found.unexplained is not None
    assert found.unexplained > 0.9
    broken = capture(tmp_path).observation(before, {n: v * np.nan for n, v in after.items()}, 1)
    told = measure(broken, origin, "linear-layer")
    assert told.reconstruction is None
    assert "diverge" in str(told.refusal)
    assert told.metrics()["leakscope.as_sent.audited"] == 0


def test_the_wrong_sign_explains_nothing(tmp_path: Path) -> None:
    """A client that sends new minus old, taken for one that sends old minus new."""
    own = ls.FedAvg(epochs=1, batch_size=1, lr=RATE).observe(small_net(), TILES.x[:1], TILES.y[:1])
    before = {name: value.numpy() for name, value in small_net().state_dict().items()}
    difference = {name: -value.numpy() for name, value in own.message.update.items()}
    origin = Origin(place="server", client="1", number=1)
    right = capture(tmp_path, sends="difference").observation(before, difference, 1)
    wrong = capture(tmp_path, sends="gradient").observation(before, difference, 1)
    assert [seen.made and seen.made.sign for seen in (right, wrong)] == ["right", "wrong"]
    good, bad = (measure(seen, origin, "linear-layer").unexplained for seen in (right, wrong))
    assert good is not None
    assert bad is not None
    assert good < 1e-3
    assert bad > 0.5


def test_arrays_are_aligned_by_name_or_order_and_misfits_are_told(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    facts = {"model": net, "input_shape": (2,), "num_classes": 2, "value_range": None}
    observe = capture(tmp_path, **facts).observation
    state = {name: value.numpy() for name, value in net.state_dict().items()}
    moved = {name: value + 1 for name, value in state.items()}
    numbered = [{str(n): value for n, value in enumerate(one.values())} for one in (state, moved)]
    only = [{name: one[name] for name, _ in net.named_parameters()} for one in (state, moved)]
    for before, after in [(state, moved), numbered, only, [dict(zip("012345", o.values(), strict=True)) for o in only]]:
        seen = observe(before, after, 4)
        assert set(seen.message.update) == {name for name, _ in net.named_parameters()}
        assert all(torch.allclose(value, -torch.ones(())) for value in seen.message.update.values())
    with pytest.raises(ValueError, match=r"(?s)missing: 0.bias.*extra: other"):
        observe({"0.weight": state["0.weight"], "other": state["0.bias"]}, moved, 4)
    with pytest.raises(ValueError, match=r"0.weight: expected shape \(3, 2\), got \(2, 3\)"):
        observe(state, {**moved, "0.weight": moved["0.weight"].T}, 4)


def test_buffers_of_one_step_tell_the_batch(tmp_path: Path) -> None:
    """They are no parameters; the statistics of the only batch follow from them, as most clients send them."""
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    before = {name: value.numpy().copy() for name, value in net.state_dict().items()}
    x = torch.rand((4, 2), generator=torch.Generator().manual_seed(0))
    net.train()
    loss = nn.functional.cross_entropy(net(x), torch.tensor([0, 1, 0, 1]))
    loss.backward()
    inputs = net[0](x).detach()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1 * parameter.grad
    after = {name: value.numpy().copy() for name, value in net.state_dict().items()}
    facts = {"model": net, "input_shape": (2,), "num_classes": 2, "value_range": None, "training": LocalTraining()}
    seen = capture(tmp_path, **facts).observation(before, after, 4)
    assert seen.batchnorm == "train"
    statistics = seen.message.batchnorm_statistics
    assert statistics is not None
    assert torch.allclose(statistics["1.mean"].float(), inputs.mean(0), atol=1e-5)
    assert torch.allclose(statistics["1.var"].float(), inputs.var(0, unbiased=False), atol=1e-5)
    still = capture(tmp_path, **facts).observation(
        before, {**after, **{n: before[n] for n in before if "1.r" in n or "tracked" in n}}, 4
    )
    assert still.batchnorm == "eval"
    assert still.message.batchnorm_statistics is None


def test_strategies_of_the_older_interface_are_wrapped_too(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.server.strategy import FedAvg as FitFedAvg

    from leakscope.integrations.flower_legacy import AuditedFitStrategy

    before = [value.numpy() for value in small_net().state_dict().values()]
    own = ls.FedAvg(epochs=1, batch_size=1, lr=RATE).observe(small_net(), TILES.x[:1], TILES.y[:1])
    after = [b - u.numpy() for b, u in zip(before, own.message.update.values(), strict=True)]
    proxies = [SimpleNamespace(cid=name) for name in ("b", "a")]

    class Asks(FitFedAvg):
        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
            return [(proxy, FitIns(parameters, {})) for proxy in proxies]

    done = Status(Code.OK, "")
    results = [
        (proxy, FitRes(done, ndarrays_to_parameters([v * share for v in after]), examples, {}))
        for proxy, share, examples in zip(proxies, (1.0, 1.01), (1, 3), strict=True)
    ]
    plain, wrapped = Asks(), AuditedFitStrategy(Asks(), capture(tmp_path), inline=flower.Inline(controls=False))
    wrapped.configure_fit(1, ndarrays_to_parameters(before), None)
    expected, _ = plain.aggregate_fit(1, results, [])
    got, metrics = wrapped.aggregate_fit(1, results, [])
    assert expected is not None
    for a, b in zip(parameters_to_ndarrays(expected), parameters_to_ndarrays(got), strict=True):
        assert a.tobytes() == b.tobytes()
    assert metrics["leakscope.server.audited"] == 2
    found = {one.origin.client: one for one in flower.recordings(tmp_path)}
    assert sorted(found) == ["a", "b"]
    seen = found["b"].observation(small_net())
    for name, value in own.message.update.items():
        assert torch.allclose(seen.message.update[name], value, atol=1e-7)
    with pytest.raises(ValueError, match=r"expected one of flwr\.server\.strategy"):
        AuditedFitStrategy(FedAvg(), capture(tmp_path))


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"every: expected a whole number(?s:.*)sends"):
        capture(tmp_path, every=0, sends="pigeons")
    with pytest.raises(ValueError, match="every_client"):
        flower.Inline(every_client=0)
    with pytest.raises(ValueError, match=r"expected one of flwr.serverapp.strategy, got int"):
        flower.AuditedStrategy(3, capture(tmp_path))
    with pytest.raises(ValueError, match="no recordings"):
        flower.audit_recordings(tmp_path, model=small_net())
    with pytest.raises(ValueError, match="expected a folder"):
        flower.recordings(tmp_path / "none")
    with pytest.raises(ValueError, match="place: expected one of raw"):
        Origin(place="nowhere", client="1", number=1)
    (tmp_path / "x.origin.json").write_text("[]")
    with pytest.raises(ValueError, match="not the origin of a recording"):
        flower.recordings(tmp_path)
    assert set(PLACES) == {"raw", "as_sent", "server", "dp_step"}


@pytest.mark.slow
def test_nothing_loads_flower_unasked_and_its_absence_is_told() -> None:
    code = (
        "import sys, leakscope, leakscope.integrations; assert not {'flwr', 'torch'} & set(sys.modules)\n"
        "sys.modules['flwr'] = None\n"
        "try:\n    import leakscope.integrations.flower\n"
        "except ImportError as error:\n    assert \"pip install 'leakscope[flower]'\" in str(error), error\n"
        "else:\n    raise SystemExit('imported')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


def test_exchanges_are_counted_where_the_server_tells_no_round(tmp_path: Path) -> None:
    """Recorded or not, and in whatever process: otherwise every second round would be the first for ever."""
    numbers = [_next_number(tmp_path, "7", "1", "raw") for _ in range(3)]
    assert [*numbers, _next_number(tmp_path, "8", "1", "raw")] == [1, 2, 3, 1]
