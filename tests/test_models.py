"""Third-party models, as their authors wrote them."""

from __future__ import annotations

import warnings

import mindspore as ms
import numpy as np
import pytest
from helpers import bits, both, is_deferred, names, seed, stream
from mindspore import Tensor, nn

import lazycell

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mindcv

MODELS = ("resnet18", "mobilenet_v2_100", "vit_b_32_224")


def make(name: str, base: type[nn.Cell]) -> nn.Cell:
    """A model of mindcv in a net of its own."""

    class Model(base):
        def __init__(self) -> None:
            super().__init__()
            self.model = mindcv.create_model(name, num_classes=10, pretrained=False)

        def construct(self, x: Tensor) -> Tensor:
            return self.model(x)

    return Model()


@pytest.mark.parametrize("name", MODELS)
def test_values_outputs_and_gradients_are_the_eager_ones(name: str) -> None:
    """Models that re-initialize in ``__init__``: nothing differs but what is held before the first call."""
    eager, net = both(lambda base: make(name, base))
    before = stream()
    registry = lazycell.registry(net)
    assert registry.deferred_nbytes > 0.99 * registry.nbytes
    image = Tensor(np.random.default_rng(0).random((1, 3, 224, 224), np.float32))
    live = net.trainable_params()
    for cell in (eager, net):
        cell.set_train(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", lazycell.LazyCellWarning)
        value, gradients = ms.value_and_grad(lambda x: net(x).sum(), None, live)(image)
    expected, expected_gradients = ms.value_and_grad(lambda x: eager(x).sum(), None, eager.trainable_params())(image)
    assert names(live) == names(eager.trainable_params())
    assert registry.deferred_nbytes == 0
    assert before == stream()
    assert bits(value) == bits(expected)
    assert [bits(g) for g in gradients] == [bits(g) for g in expected_gradients]
    assert all(bits(a) == bits(b) for a, b in zip(eager.get_parameters(), net.get_parameters(), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_unused_models_hold_nothing(name: str) -> None:
    """A whole model that is never called keeps no storage, and is named in one line."""

    class Model(lazycell.LazyCell):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Dense(4, 4)
            self.teacher = mindcv.create_model(name, num_classes=10, pretrained=False)

        def construct(self, x: Tensor) -> Tensor:
            return self.body(x)

    net = Model()
    with pytest.warns(lazycell.UnusedLayerWarning) as caught:
        net(ms.ops.ones((1, 4)))
    (layer,) = caught[0].message.layers
    assert layer.name == "teacher" and layer.nbytes == lazycell.registry(net.teacher).nbytes
    assert lazycell.registry(net).deferred_nbytes > 0.99 * layer.nbytes


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["PyNative", "Graph"])
@pytest.mark.parametrize("name, size, options", [("googlenet", 224, {"aux_logits": True}), ("inception_v3", 299, {})])
def test_auxiliary_heads(name: str, size: int, options: dict[str, bool], mode: int) -> None:
    """In evaluation, what is unused is exactly the auxiliary heads."""

    class Model(lazycell.LazyCell):
        def __init__(self) -> None:
            super().__init__()
            self.model = mindcv.create_model(name, num_classes=10, pretrained=False, **options)

        def construct(self, x):
            return self.model(x)

    net = Model()
    net.set_train(False)
    ms.set_context(mode=mode)
    with pytest.warns(lazycell.UnusedLayerWarning) as caught:
        net(Tensor(np.zeros((1, 3, size, size), np.float32)))
    (entry,) = caught
    heads = {child for child in net.model.name_cells() if "aux" in child}
    assert heads and {layer.name for layer in entry.message.layers} == {f"model.{head}" for head in heads}
    assert {name for name, p in net.parameters_and_names() if is_deferred(p)} == {
        name for name, _ in net.parameters_and_names() if name.split(".")[1] in heads
    }


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2_100", "vit_b_32_224", "googlenet"])
def test_dry_run_touches_what_a_forward_pass_touches(name: str) -> None:
    """Before anything ran, and with the eager values."""
    eager, net = both(lambda base: make(name, base))
    for cell in (eager, net):
        cell.set_train(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lazycell.UnusedLayerWarning)
        assert lazycell.dry_run(net, lazycell.spec(1, 3, 224, 224)) == lazycell.spec(1, 10)
    used = lazycell.track(eager)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lazycell.UnusedLayerWarning)
        used(Tensor(np.zeros((1, 3, 224, 224), np.float32)))
    assert names(net.trainable_params()) == names(lazycell.trainable_params(eager))
    assert lazycell.registry(net).untouched == lazycell.registry(eager).untouched


def train(name: str, size: int) -> tuple[nn.Cell, list[bytes]]:
    """Two steps of a model of mindcv, by a script that knows nothing of lazycell; auxiliary heads are trained, too."""
    seed()
    net = mindcv.create_model(name, num_classes=10, pretrained=False)
    net.set_train()
    loss_fn = nn.CrossEntropyLoss()
    optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9, weight_decay=1e-4)

    def forward_fn(x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        outputs, weights = (out, (1.0, 0.3, 0.3)) if isinstance(out, tuple) else ((out,), (1.0,))
        return sum(weight * loss_fn(each, y) for weight, each in zip(weights, outputs))

    grad_fn = ms.value_and_grad(forward_fn, None, optimizer.parameters)
    random = np.random.default_rng(0)
    losses = []
    for _ in range(2):
        image = Tensor(random.random((2, 3, size, size), np.float32))
        loss, gradients = grad_fn(image, Tensor(random.integers(0, 10, 2), ms.int32))
        optimizer(gradients)
        losses.append(loss.asnumpy().tobytes())
    return net, losses


@pytest.mark.parametrize(
    "name, size", [("resnet18", 64), ("mobilenet_v2_100", 64), ("vit_b_32_224", 224), ("googlenet", 224)]
)
def test_training_under_the_patch_is_the_same(name: str, size: int) -> None:
    """Losses, weights and random streams are those without the patch, bit for bit."""
    eager, expected = train(name, size)
    after = stream()
    with lazycell.patch():
        net, losses = train(name, size)
        assert len(net.trainable_params()) == len(eager.trainable_params())
    assert losses == expected and stream() == after
    for one, other in zip(eager.get_parameters(), net.get_parameters(), strict=True):
        assert (one.name, bits(one)) == (other.name, bits(other))
