"""Attack a captured update: write it to a file, read it back as an adversary would, and look what is in it."""

import torch

import leakscope as ls


def main() -> None:
    tiles = ls.load_data("tiles", limit=1)
    net = ls.build_model("mlp", input_shape=tiles.shape, num_classes=tiles.num_classes, hidden=32)

    # A client of yours trains one step and sends its gradient, by parameter name.
    loss = torch.nn.functional.cross_entropy(net(tiles.x), tiles.y)
    gradient = torch.autograd.grad(loss, list(net.parameters()))
    update = {name: value for (name, _), value in zip(net.named_parameters(), gradient, strict=True)}

    captured = ls.Observation.from_update(
        net,
        update,
        input_shape=tiles.shape,
        num_classes=tiles.num_classes,
        num_examples=1,
        value_range=ls.ValueRange(),
    )
    captured.save("captured")  # captured.safetensors and captured.json; no examples in either

    seen = ls.Observation.load("captured", net)
    found = ls.attacks.LinearLayer()(seen)
    print(f"its own opinion: {float(found.scores[0]):.1e} of the update is left unexplained")
    print(f"compared with the truth: {ls.metrics.psnr(tiles.x, found.inputs).item():.0f} dB")


if __name__ == "__main__":
    main()
