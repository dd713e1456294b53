"""How strong attacks are on models as people have them: trained, in batches, with repeated labels.

    python benchmarks/strength.py --models convnet,mlp --states untrained,1,6 --batches 1,4 --out FILE.jsonl
    python benchmarks/strength.py --batches 4 --labels repeated --disturb noise:1e-3,prune:0.9 --out FILE.jsonl
    python benchmarks/strength.py --table FILE.jsonl

A row for each batch and attack, a line of JSON each, appended to FILE as soon as it is measured: what is there is not
run again, so that several runs fill one matrix (--again measures anew; the newest row counts). Images are those of the
test split from number 1000 on, on which no setting was chosen but one that docs/strength.md names.

Times are CPU seconds of one thread, told as ratios to
``inverting-gradients`` with its defaults on the same batch in the same run; where that was measured in another run,
both are taken relative to a forward-backward pass of the same batch in their own.

The tables of docs/strength.md and of the README are made of benchmarks/strength.jsonl by tools/make_docs.py. Needs
LEAKSCOPE_DATA.
"""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from leakscope.federation import FedSGD
from strength_cells import LABELS, NONE, Cell, disturbed, draw, measure, named_attack, observe, pace
from strength_floor import floor_row
from strength_models import UNTRAINED, VICTIMS, data_of, victim
from strength_table import BASELINE, FLOOR, OURS, brief, every_line, key_of, read_rows

#: The first image of the test split that counts; settings are chosen on images before it.
FIRST = 1000


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    if options.table is not None:
        print(every_line(read_rows(options.table)))
        return
    torch.set_num_threads(1)
    cells = list(chosen_cells(options))
    try:
        data = data_of(options.models)
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(f"strength.py needs real data (set LEAKSCOPE_DATA): {error}") from error
    rows = {} if options.again else {key_of(row): row for row in read_rows(options.out)}
    run, broken = secrets.token_hex(4), 0
    warm_up()
    for place, cell in enumerate(cells, start=1):
        examples = data[VICTIMS[cell.model].data]
        count = options.images if cell.batch == 1 else options.batches_per_cell
        batches = draw(examples.y.tolist(), cell.labels, cell.batch, count, options.first)
        attacks = [*options.attacks, *(["sme"] if wants_sme(cell, options.attacks) else [])]
        todo = [
            (number, word)
            for number in range(count)
            for word in attacks
            if key_of({**vars(cell), "number": number, "attack": word}) not in rows
        ]
        print(f"[{place}/{len(cells)}] {cell.describe()}: {len(todo)} of {count * len(attacks)} to do", flush=True)
        net = victim(cell.model, cell.state, examples, options.cache) if todo else None
        for number, word in todo:
            assert net is not None
            seen = observe(cell, net, examples, batches[number], number)
            speed = pace(net, examples, batches[number])
            try:
                if word == FLOOR:
                    row = floor_row(cell, seen, examples, batches[number], number)
                else:
                    row = measure(cell, word, seen, examples, batches[number], number, options.tries)
            except Exception as error:  # noqa: BLE001 - one that breaks does not cost the night; another run tries again
                broken += 1
                print(f"    {number} {word} FAILED: {type(error).__name__}: {error}", flush=True)
                continue
            row |= {"pace": speed, "run": run}
            with options.out.open("a", encoding="utf-8") as stream:  # one write, so that runs side by side do not mix
                stream.write(json.dumps(row, allow_nan=False) + "\n")
            print(f"    {number} {brief(row)}", flush=True)
    if broken:
        raise SystemExit(f"{broken} of the attacks failed; the lines above say why")


def warm_up() -> None:
    """What libraries do once a process is nobody's cost."""
    net, x = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)), torch.rand(1, 1, 2, 2)
    named_attack(f"{BASELINE}:iterations=2")(FedSGD().observe(net, x, torch.tensor([1])))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=words, default=list(VICTIMS), help=", ".join(VICTIMS))
    parser.add_argument("--states", type=words, default=[UNTRAINED, "1", "6"], help="untrained, or epochs of training")
    parser.add_argument("--batches", type=words, default=["1", "4", "8"], help="images in a batch")
    parser.add_argument("--labels", type=words, default=list(LABELS), help=f"{', '.join(LABELS)}; for batches only")
    parser.add_argument("--images", type=int, default=8, help="single images in a cell")
    parser.add_argument("--batches-per-cell", type=int, default=4, help="batches in a cell")
    parser.add_argument(
        "--attacks", type=words, help=f"default: {OURS},{BASELINE}; and sme for fedavg, {FLOOR}: what theory allows"
    )
    parser.add_argument("--attack", action="append", default=[], help="one with settings, NAME:key=value,key=value")
    parser.add_argument(
        "--disturb", type=words, default=[NONE], help="train (BatchNorm), noise:X, clip:X, float16, prune:X, fedavg:N"
    )
    parser.add_argument("--knowledge", default="honest_server", help="a preset; adaptive_server knows the disturbance")
    parser.add_argument("--known-labels", choices=["no", "counts", "yes"], default="no")
    parser.add_argument(
        "--tries", type=int, default=1, help="seeds, as long as the attack's certificate is not reached"
    )
    parser.add_argument("--first", type=int, default=FIRST, help="first image of the test split")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "leakscope-strength")
    parser.add_argument("--out", type=Path, default=Path("strength.jsonl"))
    parser.add_argument("--again", action="store_true", help="measure what is there once more")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the tables of FILE, and run nothing")
    options = parser.parse_args(arguments)
    options.attacks = [*(options.attacks or ([] if options.attack else [OURS, BASELINE])), *options.attack]
    try:
        check(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def words(text: str) -> list[str]:
    """Words between commas.

    >>> words("mlp, vit")
    ['mlp', 'vit']
    """
    return [word.strip() for word in text.split(",") if word.strip()]


def check(options: argparse.Namespace) -> None:
    """ValueError where a word of the options means nothing, before an hour is spent on the others."""
    for name, given, known in (("models", options.models, VICTIMS), ("labels", options.labels, LABELS)):
        unknown = [word for word in given if word not in known]
        if unknown:
            raise ValueError(f"--{name}: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    states = [state for state in options.states if state != UNTRAINED and not state.isdecimal()]
    sizes = [size for size in options.batches if not size.isdecimal() or size == "0"]
    if states or sizes:
        raise ValueError(f"--states, --batches: expected untrained or whole numbers, got {', '.join(states + sizes)}")
    for word in options.attacks if options.table is None else []:
        if word != FLOOR:
            named_attack(word)
    for word in options.disturb:
        disturbed(word, 1)


def chosen_cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Every cell that the options name; a single image has no repeated labels."""
    for model in options.models:
        for state in options.states:
            for size in map(int, options.batches):
                for labels in options.labels if size > 1 else ["distinct"]:
                    for disturbance in options.disturb:
                        facts = (disturbance, options.knowledge, options.known_labels)
                        yield Cell(model, state, size, labels, *facts)


def wants_sme(cell: Cell, attacks: Sequence[str]) -> bool:
    """Weight updates have an attack of their own to be measured beside."""
    given = {word.partition(":")[0] for word in attacks}
    return cell.disturbance.startswith("fedavg") and not given & {"sme", FLOOR}


if __name__ == "__main__":
    main()
