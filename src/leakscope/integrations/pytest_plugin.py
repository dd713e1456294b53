"""Run audits as tests: a fixture, a marker, and ``leakscope.yaml`` as a test of its own; see ``docs/ci.md``.

pytest loads this file whenever it starts, so nothing of the audit is imported here before one runs. Only a verdict
within policy passes, or leaks that the baseline accepts. A test that asks for an audit and runs none fails.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from leakscope.audit import Audit

MARKER = "leakscope"
FIXTURE = "leakscope_audit"
#: Properties of tests, which reports and JUnit files hold and which reach the main process from every worker.
OUTCOME, PSNR, REMARK, SPEC = "leakscope_outcome", "leakscope_worst_psnr", "leakscope_remark", "leakscope_spec"
CERTIFIED = "leakscope_certified"
_CALLS: pytest.StashKey[int] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("leakscope", "what federated-learning updates leak")
    group.addoption(
        "--leakscope-update-baseline",
        action="store_true",
        help="accept the leaks of the audits that run: write them into the baseline file",
    )
    group.addoption(
        "--leakscope-baseline", metavar="FILE", help="file of accepted leaks (default: that of the ini file)"
    )
    group.addoption(
        "--leakscope-report", metavar="DIR", help="write page, JSON and SARIF of each audit into this folder"
    )
    parser.addini("leakscope_specs", "names of specs that are tests of their own", "args", ["leakscope.yaml"])
    parser.addini("leakscope_baseline", "file of accepted leaks", default="leakscope-baseline.json")
    parser.addini("leakscope_accept_inconclusive", "inconclusive audits pass, and are told", "bool", False)


def pytest_configure(config: pytest.Config) -> None:
    text = f"{MARKER}(spec, **settings): defaults of {FIXTURE}; selects audits (-m {MARKER})"
    config.addinivalue_line("markers", text)


# -- leakscope.yaml as a test --


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    names = parent.config.getini("leakscope_specs")
    if not any(fnmatch.fnmatch(file_path.name, name) for name in names):
        return None
    return SpecCollector.from_parent(parent, path=file_path)


class SpecCollector(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        yield SpecItem.from_parent(self, name="audit")


class SpecItem(pytest.Item):
    """Run the audit of a spec in the folder that it lies in."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_marker(MARKER)

    def runtest(self) -> None:
        with tempfile.TemporaryDirectory(prefix="leakscope-") as folder, contextlib.chdir(self.path.parent):
            AuditRunner(self, Path(folder))(self.path)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from leakscope.audit import ExecutorError, SpecError

        if excinfo.errisinstance((pytest.fail.Exception, SpecError, ExecutorError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, f"leakscope: {self.path.name}"


# -- tests that ask for audits --


@pytest.fixture
def leakscope_audit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AuditRunner:
    """Run an audit and fail the test unless it is within policy: a spec's path, or the arguments of ``ls.audit``."""
    request.node.stash[_CALLS] = 0  # a test that is run again is the same test
    return AuditRunner(request.node, tmp_path_factory.mktemp("leakscope", numbered=True))


class AuditRunner:
    def __init__(self, item: pytest.Item, folder: Path) -> None:
        self._item, self._folder, self._config = item, folder, item.config

    def __call__(
        self,
        spec: str | Path | None = None,
        /,
        *,
        check: bool = True,
        accept_inconclusive: bool | None = None,
        **settings: Any,
    ) -> Audit:
        """Audit ``spec`` (default: the marker's, or leakscope.yaml) with ``settings`` changed, or what they alone say.

        ``check`` False returns the audit whatever came out. ``accept_inconclusive`` lets doubts pass, with a remark.
        """
        number = self._item.stash.get(_CALLS, 0) + 1
        self._item.stash[_CALLS] = number
        path, wanted, accept = self._asked(spec, settings, accept_inconclusive)
        audit = self._run(path, wanted, self._folder / f"audit-{number}")
        name = self._item.nodeid if number == 1 else f"{self._item.nodeid}#{number}"
        self._record(audit, path)
        page = self._write_reports(audit, name, path)
        if check:
            self._judge(audit, name, accept, page)
        return audit

    def _asked(
        self, spec: str | Path | None, settings: dict[str, Any], accept: bool | None
    ) -> tuple[Path | None, dict[str, Any], bool]:
        """Return spec, settings, and whether doubts pass: as called, else as marked, else as configured."""
        marker = self._item.get_closest_marker(MARKER)
        marked = {} if marker is None else dict(marker.kwargs)
        if marker is not None and len(marker.args) > 1:
            raise pytest.UsageError(f"{MARKER}: expected at most a spec beside settings, got {marker.args!r}")
        if spec is None and marker is not None and marker.args:
            spec = marker.args[0]
        wanted = {**marked, **settings}
        told = accept if accept is not None else wanted.pop("accept_inconclusive", None)
        wanted.pop("accept_inconclusive", None)
        if "out" in wanted:
            raise pytest.UsageError("out: a test's audit is always run anew; its page: --leakscope-report DIR")
        if spec is None and "model" not in wanted:
            spec = self._config.getini("leakscope_specs")[0]
        path = None if spec is None else self._config.rootpath / spec
        ini = bool(self._config.getini("leakscope_accept_inconclusive"))
        return path, wanted, ini if told is None else bool(told)

    def _run(self, path: Path | None, settings: dict[str, Any], folder: Path) -> Audit:
        import leakscope.audit as room

        # What a baseline accepts is all that leaks, not the first of it.
        if path is None:
            return room.audit(**{"data": None, "stop_on_leak": False, **settings}, out=folder)
        from leakscope.audit.spec import spec_with

        # pytest imports what lies in the repository anyway; a spec from elsewhere is data, as on the command line.
        trusted = path.resolve().is_relative_to(self._config.rootpath.resolve())
        progress = settings.pop("progress", None)
        spec = spec_with(path, settings, allow_code=trusted)
        if spec.stop_on_leak is None:
            spec = spec.model_copy(update={"stop_on_leak": False})
        return room.run_spec(spec, folder, progress)

    def _record(self, audit: Audit, path: Path | None) -> None:
        told = self._item.user_properties
        told.append((OUTCOME, audit.verdict.outcome))
        if audit.worst is not None:
            told.append((PSNR, f"{audit.worst.psnr:.1f}"))
            certified = sum(example.certified for setting in audit.verdict.settings for example in setting.examples)
            told.append((CERTIFIED, str(certified)))
        if path is not None:
            told.append((SPEC, _relative(path, self._config.rootpath)))

    def _write_reports(self, audit: Audit, name: str, path: Path | None) -> Path | None:
        """Write page, JSON and SARIF where a folder is asked for; without a spec, findings point to the test."""
        folder = self._config.getoption("--leakscope-report")
        if not folder:
            return None
        from leakscope.contracts.disk import atomic_write
        from leakscope.report import sarif_log
        from leakscope.report.export import json_text
        from leakscope.report.sarif import Source, place_of

        _, line, _ = self._item.location
        place = place_of(self._item.path, (line or 0) + 1) if path is None else None
        stem = Path(self._config.invocation_params.dir, folder, re.sub(r"[^\w.-]+", "-", name).strip("-"))
        stem.parent.mkdir(parents=True, exist_ok=True)
        page = audit.report(f"{stem}.html")
        log = sarif_log(audit.store, audit.verdict, None if place is None else Source(whole=place))
        atomic_write(Path(f"{stem}.sarif"), json_text(log).encode())
        atomic_write(Path(f"{stem}.json"), audit.to_json().encode())
        return page

    def _judge(self, audit: Audit, name: str, accept_inconclusive: bool, page: Path | None) -> None:
        from leakscope.report.accepted_leaks import AcceptedLeaks, judge_against, read_accepted
        from leakscope.report.sentences import strongest_words

        file = baseline_file(self._config)
        now = AcceptedLeaks.of(audit.store, audit.verdict)
        if self._config.getoption("--leakscope-update-baseline"):
            self._say(_update(file, name, now))
        judgement = judge_against(now, audit.verdict, read_accepted(file).get(name), accept_doubts=accept_inconclusive)
        for remark in judgement.remarks:
            self._say(remark)
        if judgement.problems:
            lines = [str(audit.verdict), *(f"  - {problem}" for problem in judgement.problems)]
            for setting in audit.verdict.settings:
                lines += [f"{setting.name}, {line}" for line in strongest_words(setting.examples)]
            lines.append("Page: run with --leakscope-report DIR" if page is None else f"Page: {page}")
            if now.settings:
                lines.append("Known leaks are accepted by --leakscope-update-baseline")
            pytest.fail("\n".join(lines), pytrace=False)

    def _say(self, remark: str) -> None:
        self._item.user_properties.append((REMARK, f"{self._item.nodeid}: {remark}"))


def baseline_file(config: pytest.Config) -> Path:
    """Return the file of accepted leaks, from an ini file relative to the root, as an option to the current folder."""
    typed = config.getoption("--leakscope-baseline")
    if typed:
        return config.invocation_params.dir / typed
    return config.rootpath / str(config.getini("leakscope_baseline"))


def _update(file: Path, name: str, now: Any) -> str:
    from filelock import FileLock

    from leakscope.report.accepted_leaks import read_accepted, write_accepted

    mark = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]
    with FileLock(Path(tempfile.gettempdir()) / f"leakscope-baseline-{mark}.lock"):
        audits = read_accepted(file)
        known = audits.pop(name, None)
        if now.settings:
            audits[name] = now
        if now.settings or known is not None:
            write_accepted(file, audits)
    leaks = sum(len(setting.examples) or 1 for setting in now.settings)
    return f"baseline updated, {leaks} accepted leaks in {len(now.settings)} settings"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield
    if isinstance(item, SpecItem) or item.stash.get(_CALLS, 0):
        return
    asked = item.get_closest_marker(MARKER) is not None or FIXTURE in getattr(item, "fixturenames", ())
    if asked:
        pytest.fail(f"the test asks for an audit and ran none: call the fixture {FIXTURE}", pytrace=False)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reports = [report for group in terminalreporter.stats.values() for report in group]
    told = [pair for report in reports for pair in getattr(report, "user_properties", ())]
    remarks = list(dict.fromkeys(str(value) for name, value in told if name == REMARK))
    audited = {value for name, value in told if name == SPEC}
    for name in config.getini("leakscope_specs"):
        here = sorted(_relative(path, config.rootpath) for path in config.rootpath.glob(name))
        remarks += [f"{spec} was not audited in this run" for spec in here if spec not in audited]
    if remarks and not config.getoption("collectonly", default=False):
        terminalreporter.section("leakscope")
        for remark in remarks:
            terminalreporter.line(remark)


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
