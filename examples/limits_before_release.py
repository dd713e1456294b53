"""What theory says before any attack: may an example be read at all, and how much noise hides it?"""

import leakscope as ls
from leakscope.limits import cramer_rao, gradient_map_at, limits


def main() -> None:
    net = ls.build_model("one-layer-cnn", input_shape=(3, 8, 8), num_classes=9, filters=6)

    print(limits(net, (3, 8, 8), batch=1).conclusion)

    mapping, flat = gradient_map_at(net, (3, 8, 8), batch=1, num_classes=9)
    for sigma in (1e-5, 1e-4, 1e-3, 1e-2):
        floor = cramer_rao(mapping, flat, ls.Channel(noise=sigma))
        print(f"noise {sigma:g}: no unbiased attack errs by less than {floor.rmse:.4f} of the value range")


if __name__ == "__main__":
    main()
