"""A server that chooses the model: how much it reads off one update, and how a client notices before training."""

import leakscope as ls


def main() -> None:
    tiles = ls.load_data("tiles", limit=16)
    agreed = ls.build_model("convnet", num_classes=tiles.num_classes, filters=8)
    attack = ls.attacks.RobbingTheFed(bins=256)
    sent = attack.prepare(agreed, tiles.shape)  # what the server sends in place of the agreed model

    observation = ls.FedSGD().observe(sent, tiles.x, tiles.y, knowledge=ls.Knowledge.malicious_server)
    found = attack(observation, seed=0)
    print(found.notes[0])

    for name, model in (("the agreed model", agreed), ("the model that came", sent)):
        print(f"{name}: {'suspicious, do not train it' if ls.inspect_model(model).suspicious else 'nothing found'}")


if __name__ == "__main__":
    main()
