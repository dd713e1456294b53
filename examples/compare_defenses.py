"""What each defence buys and costs: attacked by who knows it, and trained with, side by side."""

import torch

import leakscope as ls


def main() -> None:
    draws = torch.Generator().manual_seed(0)
    x, y = torch.rand(200, 1, 6, 6, generator=draws), torch.arange(200) % 2
    x[y == 1, :, :3] *= 0.6  # what there is to learn: the upper half of one class is darker
    audit = ls.audit(
        model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 2)),
        data=(x, y),
        examples=2,
        knowledge="informed_server",
        attacks=["standard", "learning-to-invert"],
        defenses=[
            "none",
            {"gradient-pruning": {"fraction": 0.5}},
            {"gradient-noise": {"sigma": 0.1}},
            {"gradient-noise": {"sigma": 1.0}},
        ],
        findings=False,
        utility={"rounds": 60, "batch_size": 16, "learning_rates": [0.3], "seeds": 2},
    )
    print(f"{'defence':50} {'outcome':14} {'leakage':>9} {'accuracy':>9}")
    for row in audit.study.rows:
        print(f"{row.defense:50} {row.outcome:14} {row.leakage:6.1f} dB {row.utility:9.0%}")


if __name__ == "__main__":
    main()
