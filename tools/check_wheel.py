"""Whether what is published is whole: builds wheel and sdist, looks into them, installs and runs the wheel.

    python tools/check_wheel.py               build, look inside, run a small audit from an environment with the wheel
    python tools/check_wheel.py --resolve     also resolve the extras under constraints.txt, which needs an index
    python tools/check_wheel.py --full        also install all into an empty environment, and run the embedded audit

Exit code 1 where something is wrong. The first form borrows the libraries of this environment; of leakscope itself
nothing is borrowed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("flower", "opacus", "ray", "pytest")
#: What a build reads.
SOURCES = ("src", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")
SOURCES = (*SOURCES, "CONTRIBUTING.md", "SECURITY.md", "constraints.txt")
#: Where a resolver, and not the way to the index, has failed.
CONFLICT = ("ResolutionImpossible", "conflicting dependencies", "No matching distribution found")
SPEC = """
model: {name: mlp, options: {hidden: [8]}}
data: {name: tiles, limit: 6}
examples: 1
attacks: [linear-layer]
findings: false
workers: 1
"""
LEAKS = 1


def build(folder: Path) -> tuple[Path, Path]:
    """Wheel and sdist of the checkout, made from a copy so that nothing is left in it."""
    copy = folder / "source"
    copy.mkdir(parents=True)
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, copy / name)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(copy)], cwd=folder)
    (wheel,), (sdist,) = (list((folder / "dist").glob(f"*.{ending}")) for ending in ("whl", "tar.gz"))
    return wheel, sdist


def wheel_problems(wheel: Path) -> list[str]:
    """What a wheel lacks of the package's files, and what has no place in it."""
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    files = [path for path in (source / "leakscope").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    wanted = {path.relative_to(source).as_posix() for path in files}
    inside = {name for name in names if ".dist-info/" not in name}
    return [f"lacks {name}" for name in sorted(wanted - inside)] + [f"holds {name}" for name in sorted(inside - wanted)]


def sdist_problems(sdist: Path) -> list[str]:
    """What a source distribution lacks to be built and read, and what has no place in it."""
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    lacking = [f"lacks {name}" for name in SOURCES if name != "src" and name not in names]
    strange = ("tests/", "docs/", "benchmarks/", ".ci/", "build/", "dist/")
    return lacking + [f"holds {name}" for name in sorted(names) if name.startswith(strange) or "__pycache__" in name]


def resolve(wheel: Path) -> str:
    """What is wrong with the extras under the constraints; empty if nothing. OSError where no index can be reached."""
    wanted = f"{wheel}[{','.join(EXTRAS)}]"
    command = [
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "-q",
        "-c",
        str(ROOT / "constraints.txt"),
        wanted,
    ]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    unreachable = any(words in done.stderr for words in ("NewConnectionError", "ConnectTimeout", "Name or service"))
    if unreachable or not any(words in done.stderr for words in CONFLICT):
        raise OSError(f"the index could not be asked: {done.stderr.strip()[-400:]}")
    return done.stderr.strip()


def borrowed_environment(wheel: Path, folder: Path) -> Path:
    """The Python of an environment with the wheel, and the libraries of this one behind it."""
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    run(pip)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path in such a file is only a path: the editable install that may lie there is not followed.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def empty_environment(wheel: Path, folder: Path) -> Path:
    """The Python of an environment into which the wheel was installed with all that it asks for."""
    run([sys.executable, "-m", "venv", str(folder)])
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
    run([*install, "torch"])
    run([*install, str(wheel)])
    run([str(python), "-m", "pip", "check"])
    return python


def audit(python: Path, folder: Path, *arguments: str) -> str:
    """What ``leakscope audit`` says, run by its own command in an empty folder; it is to find a leak."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(python.parent / "leakscope"), "audit", *arguments]
    done = subprocess.run(command, cwd=folder, env=clean(), capture_output=True, text=True, check=False)
    if done.returncode != LEAKS:
        raise RuntimeError(f"{' '.join(command)}: expected exit code {LEAKS}, got {done.returncode}\n{done.stderr}")
    return done.stdout


def clean() -> dict[str, str]:
    """The environment without what would lead Python to the checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def run(command: Sequence[str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, env=clean(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--resolve", action="store_true", help="resolve the extras under constraints.txt")
    parser.add_argument("--full", action="store_true", help="install into an empty environment, run the embedded audit")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="leakscope-wheel-") as name:
        folder = Path(name)
        wheel, sdist = build(folder)
        wrong = [*wheel_problems(wheel), *sdist_problems(sdist)]
        (folder / "spec.yaml").write_text(SPEC)
        audit(borrowed_environment(wheel, folder / "borrowed"), folder / "run", str(folder / "spec.yaml"))
        if asked.resolve:
            wrong += [line for line in [resolve(wheel)] if line]
        if asked.full:
            print(audit(empty_environment(wheel, folder / "empty"), folder / "embedded"))
        print("\n".join(wrong) or f"{wheel.name} and {sdist.name}: whole, and the wheel runs")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
