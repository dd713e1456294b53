"""Reference victims, one family a file, and the door for models of the user's own.

>>> parameter_count(build_model("convnet"))
113738
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from leakscope.contracts.checks import BYTES, FLOAT, MAX_AXES, PARAMETERS, brief
from leakscope.contracts.errors import UserError
from leakscope.contracts.protocol import own_randomness
from leakscope.contracts.registry import Entry, Registry, import_object
from leakscope.contracts.task import Shape
from leakscope.models import classic
from leakscope.models.common import ACTIVATIONS, positive_int
from leakscope.models.resnet import resnet8, resnet18
from leakscope.models.split import cafe_cnn, vertical_mlp
from leakscope.models.vit import StandardVisionTransformer, VisionTransformer


@dataclass(frozen=True, kw_only=True)
class ModelEntry(Entry):
    """A model of the table: how to build it, and the shapes it has when none are given."""

    input_shape: Shape
    num_classes: int

    def options(self) -> tuple[str, ...]:
        """Return the names of the options beside input_shape and num_classes.

        >>> MODELS["one-layer-cnn"].options()
        ('filters', 'activation')
        """
        names = inspect.signature(self.target).parameters
        return tuple(name for name in names if name not in ("input_shape", "num_classes"))


def _entry(
    name: str, summary: str, factory: Callable[..., nn.Module], shape: tuple[int, ...], classes: int
) -> ModelEntry:
    return ModelEntry(name, factory, summary, input_shape=shape, num_classes=classes)


_CIFAR = (3, 32, 32)
_MNIST = (1, 28, 28)
_ENTRIES = (
    _entry("convnet", "three ReLU convolutions, pooling, one linear layer (default)", classic.convnet, _CIFAR, 10),
    _entry("dlg-lenet", "sigmoid LeNet of Deep Leakage from Gradients", classic.dlg_lenet, _CIFAR, 100),
    _entry("lenet-tanh", "tanh LeNet of Surrogate Model Extension, softmax output", classic.LeNetTanh, _MNIST, 62),
    _entry("one-layer-cnn", "one convolution and one linear layer, sigmoid", classic.one_layer_cnn, _CIFAR, 100),
    _entry("femnist-cnn", "two convolutions, two linear layers, for FEMNIST", classic.femnist_cnn, _MNIST, 62),
    _entry("cifar-cnn", "two convolutions, two linear layers, for CIFAR-100", classic.cifar_cnn, _CIFAR, 100),
    _entry("resnet8", "three residual blocks with BatchNorm", resnet8, _MNIST, 62),
    _entry("resnet18", "ResNet18 with a stem for small images, BatchNorm", resnet18, _CIFAR, 10),
    _entry("vit", "standard pre-norm vision transformer, 4x4 patches", StandardVisionTransformer, _CIFAR, 10),
    _entry("s3-vit", "small vision transformer that sees one patch", VisionTransformer, _MNIST, 62),
    _entry("mlp", "fully connected layers of chosen sizes", classic.mlp, _CIFAR, 10),
    _entry("s3-mlp", "784-1000-1000-62 with ReLU on the logits too", classic.s3_mlp, _MNIST, 62),
    _entry("logistic", "multinomial logistic regression", classic.logistic, _CIFAR, 10),
    _entry("signal-cnn", "three one-dimensional convolutions, for signals", classic.signal_cnn, (1, 256), 5),
    *(_entry(name, summary, net, _CIFAR, 10) for name, summary, net in classic.chain_cnns()),
    _entry("cafe-cnn", "vertical: workers of two convolutions and dense layers, of CAFE", cafe_cnn, _CIFAR, 10),
    _entry("vertical-mlp", "vertical: workers of dense layers, for tables", vertical_mlp, (16,), 2),
    _entry("fcn3", "LeakyReLU net of R-GAP: linear layers of 1000 and 100, no bias", classic.fcn3, _MNIST, 10),
)
MODELS: Registry[ModelEntry] = Registry("model", _ENTRIES)


def build_model(
    spec: str,
    *,
    input_shape: Shape | None = None,
    num_classes: int | None = None,
    seed: int = 0,
    most: int | None = None,
    **options: Any,
) -> nn.Module:
    """Build the model called ``spec``: a name in :data:`MODELS`, or ``package.module:factory``.

    One of the table is built only if it has at most ``most`` parameters. The same arguments give the same weights, and
    the global random state is left as it was. A factory of the user's own is given ``input_shape``, ``num_classes``
    and ``seed`` only where its signature names them.

    >>> build_model("mlp", input_shape=(4,), num_classes=2, hidden=(3,)).fc2
    Linear(in_features=3, out_features=2, bias=True)
    """
    if not isinstance(spec, str):
        raise UserError(f"build_model: expected the name of a model, got {type(spec).__name__}")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed.bit_length() > 63:
        raise UserError(f"build_model: seed: expected an integer of at most 63 bits, got {brief(seed)}")
    if input_shape is not None:
        input_shape = _checked_shape(input_shape)
    if num_classes is not None:
        num_classes = positive_int(num_classes, "build_model: num_classes")
    if ":" in spec:
        facts = {"input_shape": input_shape, "num_classes": num_classes, "seed": seed}
        factory = model_factory(spec, seed)
        if isinstance(factory, nn.Module):
            raise UserError(
                f"model {spec!r}: it is a model already, expected a function or class that builds one. "
                "Wrap it in a function that returns it."
            )
        with own_randomness(seed):
            return call_factory(spec, factory, facts, options)
    entry = MODELS.find(spec)
    _refuse_unknown(spec, options, entry.options())
    shape = entry.input_shape if input_shape is None else input_shape
    classes = entry.num_classes if num_classes is None else num_classes
    with torch.device("meta"):  # shapes without numbers
        size = parameter_count(entry.target(input_shape=shape, num_classes=classes, **options))
    PARAMETERS.check(f"model {spec!r}", size, "Choose smaller options or smaller inputs.")
    if most is not None and size > most:
        raise UserError(f"model {spec!r}: expected at most {most:,} parameters, got {size:,}")
    with own_randomness(seed):  # initial weights come from torch's default generator
        return entry.target(input_shape=shape, num_classes=classes, **options)


def parameter_count(model: nn.Module) -> int:
    """Count trainable and frozen weights; buffers such as running means are not counted.

    >>> parameter_count(nn.Linear(3, 2))
    8
    """
    return sum(parameter.numel() for parameter in model.parameters())


def model_factory(spec: str, seed: int = 0) -> Any:
    """Import what ``package.module:factory`` names. Importing may draw random numbers; they come from ``seed``."""
    with own_randomness(seed):
        return import_object("model", spec)


def _checked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    try:
        sizes = tuple(shape)
    except TypeError:
        sizes = ()
    if not sizes or isinstance(shape, str) or len(sizes) > MAX_AXES:
        wanted = f"up to {MAX_AXES} sizes without the batch such as (3, 32, 32)"
        raise UserError(f"build_model: input_shape: expected {wanted}, got {brief(shape)}")
    checked = tuple(positive_int(size, "build_model: input_shape") for size in sizes)
    BYTES.check("build_model: input_shape: one example", FLOAT * math.prod(checked))
    return checked


def _refuse_unknown(spec: str, options: Iterable[str], known: Sequence[str]) -> None:
    if unknown := sorted(set(options) - set(known)):
        raise UserError(f"model {spec!r} has no option {', '.join(unknown)}; it takes {', '.join(known) or 'none'}")


def call_factory(
    spec: str, factory: Callable[..., Any], facts: Mapping[str, Any], options: Mapping[str, Any]
) -> nn.Module:
    """Call ``factory`` with the ``options``, all of which it must take, and with ``facts`` that its signature names."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]  # built-in callables may have no signature
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    keywords = sorted(name for name, p in parameters.items() if p.kind in named)
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        _refuse_unknown(spec, options, keywords)
    arguments = {name: value for name, value in facts.items() if name in keywords and value is not None}
    try:
        model = factory(**arguments, **options)
    except Exception as error:
        given = ", ".join(f"{k}={v!r}" for k, v in {**arguments, **options}.items())
        raise UserError(f"model {spec!r}: calling it with ({given}) raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model {spec!r}: expected it to return a torch.nn.Module, got {type(model).__name__}")
    return model
