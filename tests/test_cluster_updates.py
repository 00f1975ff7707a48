"""Updates of a cluster, without Ray's processes: what holds when new replicas do not start."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sgl.cli.cluster import scale, update
from sgl.errors import BackendError, ConfigError, EngineDead
from sgl.runtime.cluster.config import Options
from sgl.runtime.cluster.link import Link
from sgl.runtime.cluster.placement import Host
from sgl.runtime.cluster.registry import Capabilities, Report
from sgl.runtime.server.serve import listen
from tests.patience import PATIENCE

pytest.importorskip("ray")
from sgl.runtime.cluster import cluster as its
from sgl.runtime.cluster import serve_app
from sgl.runtime.cluster.serve_app import ServeApp

CAPABILITIES = Capabilities("m", 1024, 8192, (), "sgl", False, "cpu", 1, "1")


class App:
    """Ray Serve's part: it notes what it is told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failure: str | None = None
        self.told: list[tuple[int, dict[str, int]]] = []  # generations, and how many of which kind

    def deploy(self, options: Any, placement: Any, counts: Any, arguments: Any, *, surge: bool) -> None:
        self.told.append((arguments["generation"], dict(counts)))

    def scale(self, counts: dict[str, int]) -> None:
        self.told.append((self.told[-1][0], dict(counts)))


def run(monkeypatch: pytest.MonkeyPatch, test: Callable[[its.Cluster, App], Awaitable[None]], **given: Any) -> None:
    """A test of a cluster of two replicas whose first generation serves."""
    monkeypatch.setattr(its, "ServeApp", App)
    monkeypatch.setattr(its, "keep_token", lambda key, token: None)
    ray = SimpleNamespace(
        hosts=lambda: [Host(8, 0)], is_own=True, host="127.0.0.1", address="a", logs="", folder=None
    )

    async def within() -> None:
        with listen("127.0.0.1", 0) as bound:
            options = Options.of({"device": "cpu", "replicas": 2, "port": 0, **given}, "f.yaml")
            cluster = its.Cluster(options, bound, ray)  # type: ignore[arg-type]
            cluster._serve(cluster._placements(options, options.counts), surge=False)
            cluster._deploy()
            for name in "ab":
                hear(cluster, name, 1)
            await test(cluster, cluster._app)  # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(within(), PATIENCE))


def hear(cluster: its.Cluster, name: str, generation: int, state: Any = "ready", reason: str = "") -> None:
    url, now = f"http://{name}", asyncio.get_running_loop().time()
    cluster._registry.hear(Report(name, generation, state, url=url, capabilities=CAPABILITIES, reason=reason), now)


def gone(cluster: its.Cluster, *names: str) -> None:
    for _ in range(2):
        cluster._registry.compare(dict.fromkeys(cluster._registry.workers.keys() - {*names}, "RUNNING"), 0.0)


def new(**given: Any) -> dict[str, Any]:
    return {"device": "cpu", "port": 0, "replicas": 3, "model_path": "/nowhere", **given}


def test_an_update_whose_replicas_do_not_start_is_undone_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cluster: its.Cluster, app: App) -> None:
        assert await cluster.update(new(), "new.yaml") == 2
        await cluster._settle()
        assert (app.told[-1], cluster._options.engine.model_path) == ((2, {"worker": 3, "prefill": 0}), "/nowhere")
        hear(cluster, "c", 2, "failed", "/nowhere is no model")
        await cluster._settle()
        assert app.told[-1] == (1, {"worker": 2, "prefill": 0}), (
            "of a generation that it has, no replica is replaced"
        )
        facts = await cluster.status()
        assert (facts["generation"], facts["replicas"], facts["serving"]) == (1, 2, 2)
        assert facts["undone"] == {"generation": 2, "reason": "/nowhere is no model"}
        await cluster._settle()
        assert len(app.told) == 3, "once"
        assert await cluster.update(new(), "new.yaml") == 3, "another one has a number of its own"

    run(monkeypatch, test)


def test_as_many_replicas_as_were_asked_for_serve_though_the_update_is_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(cluster: its.Cluster, app: App) -> None:
        await cluster.update(new(), "new.yaml")
        await cluster.scale(4)
        assert app.told[-1] == (2, {"worker": 4, "prefill": 0})
        hear(cluster, "c", 2, "failed", "no")
        undoing = asyncio.ensure_future(cluster._settle())
        await asyncio.sleep(0)
        assert cluster._changing.locked()
        await cluster.scale(5)
        await undoing
        assert app.told[-2:] == [(1, {"worker": 4, "prefill": 0}), (1, {"worker": 5, "prefill": 0})]
        assert (await cluster.status())["replicas"] == 5

    run(monkeypatch, test)


def test_a_number_that_the_options_of_before_do_not_allow_is_refused_while_an_update_may_be_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(cluster: its.Cluster, app: App) -> None:
        await cluster.update(new(min_replicas=1, max_replicas=8), "new.yaml")
        with pytest.raises(ConfigError, match=r"the options of before: 5 replicas: .* max_replicas=4"):
            await cluster.scale(5)
        assert app.told[-1] == (2, {"worker": 3, "prefill": 0})
        for name in "cde":
            hear(cluster, name, 2)
        gone(cluster, "a", "b")
        await cluster._settle()
        await cluster.scale(5)
        assert app.told[-1] == (2, {"worker": 5, "prefill": 0})

    run(monkeypatch, test, min_replicas=1, max_replicas=4)


def test_how_many_the_load_asks_for_during_an_update_is_kept_where_load_decided_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def test_of(expected: int) -> Callable[[its.Cluster, App], Awaitable[None]]:
        async def test(cluster: its.Cluster, app: App) -> None:
            await cluster.update(new(min_replicas=1, max_replicas=4), "new.yaml")
            await cluster._scale_by_itself(4)
            assert app.told[-1] == (2, {"worker": 4, "prefill": 0})
            hear(cluster, "c", 2, "failed", "no")
            await cluster._settle()
            assert app.told[-1] == (1, {"worker": expected, "prefill": 0})

        return test

    run(monkeypatch, test_of(4), min_replicas=1, max_replicas=4)
    run(monkeypatch, test_of(2))


def test_what_fails_after_an_update_is_done_undoes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cluster: its.Cluster, app: App) -> None:
        await cluster.update(new(replicas=2), "new.yaml")
        hear(cluster, "c", 2)
        gone(cluster, "a")
        hear(cluster, "b", 1, "failed", "one of before")
        await cluster._settle()
        hear(cluster, "d", 2)
        await cluster._settle()
        assert cluster._before is not None, "one of before is still there"
        gone(cluster, "b")
        await cluster._settle()
        hear(cluster, "d", 2, "failed", "later")
        await cluster._settle()
        assert ([each for each, _ in app.told], (await cluster.status())["undone"]) == ([1, 2], None)

    run(monkeypatch, test)


def test_an_update_within_another_is_undone_to_what_served_before_both(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cluster: its.Cluster, app: App) -> None:
        await cluster.update(new(), "one.yaml")
        await cluster.update(new(), "two.yaml")
        hear(cluster, "c", 2, "failed", "an older one's")
        await cluster._settle()
        assert app.told[-1][0] == 3
        hear(cluster, "d", 3, "failed", "no")
        await cluster._settle()
        assert app.told[-1] == (1, {"worker": 2, "prefill": 0})

    run(monkeypatch, test)


def test_what_ray_serve_gives_up_on_is_undone_but_not_for_what_it_told_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(cluster: its.Cluster, app: App) -> None:
        app.failure = "of long ago"
        await cluster.update(new(), "new.yaml")
        await cluster._settle()
        assert app.told[-1][0] == 2
        app.failure = "no module named x"
        await cluster._settle()
        assert (app.told[-1][0], (await cluster.status())["undone"]["reason"]) == (1, "no module named x")

    run(monkeypatch, test)


def test_an_update_that_does_not_get_on_is_undone_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(its.time, "monotonic", lambda: now)

    async def test(cluster: its.Cluster, app: App) -> None:
        nonlocal now
        await cluster.update(new(start_timeout=60), "new.yaml")
        now += 50
        hear(cluster, "c", 2)
        await cluster._settle()
        now += 50
        await cluster._settle()
        assert app.told[-1][0] == 2, "one was ready meanwhile"
        now += 20
        await cluster._settle()
        assert app.told[-1][0] == 1
        assert "no further replica was ready within 60 s" in (await cluster.status())["undone"]["reason"]

    run(monkeypatch, test)


def test_the_command_says_that_an_update_was_undone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    file = tmp_path / "new.yaml"
    file.write_text("model_path: /nowhere\n")
    facts = {"generation": 1, "serving": 1, "replicas": 1, "workers": [{"generation": 1}]}
    facts["undone"] = {"generation": 2, "reason": "/nowhere is no model"}
    link = SimpleNamespace(get=lambda path: facts, post=lambda *_, **__: {"generation": 2})
    monkeypatch.setattr("sgl.cli.cluster._alive", lambda port: SimpleNamespace(link=lambda: link))
    with pytest.raises(EngineDead, match="the options of before hold: /nowhere is no model"):
        update(SimpleNamespace(port=None, file=str(file)))


def test_a_scaling_lasts_until_an_update_that_fails_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(generation: int, is_updating: bool, *states: str) -> dict[str, Any]:
        workers = [{"id": s, "state": s, "generation": generation, "reason": "no"} for s in states]
        serving = states.count("ready")
        return {
            "workers": workers,
            "serving": serving,
            "replicas": 2,
            "generation": generation,
            "patience": 60.0,
        } | {"is_updating": is_updating}

    told = [facts(2, True, "failed", "ready"), facts(1, False, "ready"), facts(1, False, "ready", "ready")]
    link = SimpleNamespace(get=lambda path: told.pop(0), post=lambda *_, **__: None)
    monkeypatch.setattr("sgl.cli.cluster._alive", lambda port: SimpleNamespace(link=lambda: link))
    asked = SimpleNamespace(port=None, replicas=2, prefill=False)
    assert scale(asked) == 0
    assert not told
    told.append(facts(1, False, "failed", "ready"))
    with pytest.raises(EngineDead, match="a replica does not serve: no"):
        scale(asked)


def test_what_ray_serve_gave_up_on_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = {"status": "DEPLOY_FAILED", "message": "Traceback:\n  here\nTypeError: planted", "replicas": []}
    application: dict[str, Any] = {"status": "DEPLOY_FAILED", "message": "The deployment failed."}
    application["deployments"] = {"worker": deployment}
    app = served(monkeypatch, application)
    assert app.states() == {}
    assert app.failure == "TypeError: planted"
    deployment["status"] = application["status"] = "UPDATING"
    app.states()
    assert app.failure is None
    application |= {"status": "DEPLOY_FAILED", "message": "Traceback:\nImportError: planted", "deployments": {}}
    app.states()
    assert app.failure == "ImportError: planted"


def test_no_replica_is_gone_while_ray_serve_reads_what_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = [{"replica_id": "a", "state": "RUNNING"}]
    application: dict[str, Any] = {"status": "RUNNING", "deployments": {"worker": {"replicas": replicas}}}
    app = served(monkeypatch, application, {**application, "deployments": {"worker": {"replicas": []}}})
    assert app.states() == {"a": "RUNNING"}
    application |= {"status": "DEPLOYING", "deployments": {}}
    assert app.states() is None


def served(monkeypatch: pytest.MonkeyPatch, *applications: Any) -> ServeApp:
    """Of which Ray Serve says so."""
    names = ("app", "app-prefill", "another's")
    details = {"applications": dict(zip(names, applications, strict=False))}
    monkeypatch.setattr(serve_app, "_details", lambda: details)
    return ServeApp("app")


def test_a_cluster_that_ends_says_so_and_starts_nothing_that_nobody_would_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(cluster: its.Cluster, app: App) -> None:
        before, url = list(app.told), (await cluster.status())["url"]
        cluster.stop()
        cluster._bound.close()  # as its router does, whose requests are finished then
        assert (await cluster.status())["url"] == url
        for changed in (cluster.scale(3), cluster.update(new(), "new.yaml")):
            with pytest.raises(EngineDead, match="the cluster is ending"):
                await changed
        assert app.told == before
        async with cluster._controlled():  # what asks from a terminal hears it in words
            link = Link(cluster._control_url, cluster._token)
            with pytest.raises(BackendError, match=r"^the cluster is ending"):
                await asyncio.to_thread(link.post, "/scale", {"replicas": 3, "kind": "worker"})

    run(monkeypatch, test)


class Router:
    """That passes nothing on."""

    restarts, pid = 0, 1

    def __init__(self, *given: Any) -> None:
        """Of whatever."""

    async def keep(self) -> None:
        await asyncio.Event().wait()

    async def stop(self, seconds: float) -> None:
        """At once."""


class SlowApp(App):
    """One whose calls last until `go`, once it `is_slow`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.is_slow = False
        self.began, self.go = threading.Event(), threading.Event()
        self.notes: list[str] = []
        self.is_daemon = False

    def _wait(self) -> None:
        if self.is_slow:
            self.is_daemon = threading.current_thread().daemon
            self.began.set()
            self.go.wait()
            self.notes.append("told")

    def deploy(self, *given: Any, **more: Any) -> None:
        self._wait()
        super().deploy(*given, **more)

    def scale(self, counts: dict[str, int]) -> None:
        self._wait()
        super().scale(counts)

    def states(self) -> None:
        """None are known."""

    def controller_pid(self) -> int:
        return 1

    def delete(self) -> bool:
        self.notes.append("deleted")
        return True


def ended(
    monkeypatch: pytest.MonkeyPatch,
    begin: Callable[[its.Cluster, SlowApp], Awaitable[None]],
    *,
    answers: bool = True,
    is_first: bool = False,
    **given: Any,
) -> list[str]:
    """What happens to a cluster that ends while Ray Serve is told what `begin` has it told. answers: once the end has
    begun, or never. is_first: it is the first call of all."""
    monkeypatch.setattr(its, "ServeApp", SlowApp)
    monkeypatch.setattr(its, "keep_token", lambda key, token: None)
    monkeypatch.setattr(its, "RouterProcess", Router)
    monkeypatch.setattr(its, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(its, "_MUTE_SECONDS", PATIENCE if answers else 0.01)
    monkeypatch.setattr(its.Running, "write", lambda self: None)
    found: list[str] = []

    async def within(bound: Any) -> None:
        def is_there() -> bool:
            if answers:
                threading.Timer(0.2, app.go.set).start()  # had it not been waited for, it would be late
            return True

        ray = SimpleNamespace(
            hosts=lambda: [Host(8, 0)], is_own=False, host="127.0.0.1", address="a", logs="", folder=None
        )
        ray.is_there = is_there
        options = Options.of({"device": "cpu", "replicas": 2, "port": 0, **given}, "f.yaml")
        cluster = its.Cluster(options, bound, ray)  # type: ignore[arg-type]
        app: SlowApp = cluster._app  # type: ignore[assignment]
        monkeypatch.setattr(its.Running, "forget", lambda self: app.notes.append("forgotten"))
        app.is_slow, ready = is_first, asyncio.Event()
        running = asyncio.ensure_future(cluster.run(lambda url: ready.set()))
        try:
            if not is_first:
                while not app.told:
                    await asyncio.sleep(0.01)
                for name in "ab":
                    hear(cluster, name, 1)
                await ready.wait()
            await begin(cluster, app)
            assert await asyncio.to_thread(app.began.wait, PATIENCE)
            cluster.stop()
            await running
            assert app.is_daemon or answers, "the process's end waits for other threads"
            found.extend(app.notes)
        finally:
            app.go.set()

    with listen("127.0.0.1", 0) as bound:
        asyncio.run(asyncio.wait_for(within(bound), PATIENCE))
    return found


async def _by_load(cluster: its.Cluster, app: SlowApp) -> None:
    app.is_slow = True
    cluster._scaler.wanted = lambda *given: 4  # type: ignore[method-assign]


async def _undo(cluster: its.Cluster, app: SlowApp) -> None:
    await cluster.update(new(), "new.yaml")
    app.is_slow = True
    hear(cluster, "c", 2, "failed", "no")


async def _by_hand(cluster: its.Cluster, app: SlowApp) -> None:
    app.is_slow = True
    asked = asyncio.ensure_future(cluster.scale(3))
    asked.add_done_callback(lambda asked: app.notes.append(str(asked.exception())[:21]))


async def _nothing(cluster: its.Cluster, app: SlowApp) -> None:
    """It is being deployed."""


LOAD = {"min_replicas": 1, "max_replicas": 4}


@pytest.mark.parametrize(("begin", "given"), [(_by_load, LOAD), (_undo, {})])
def test_what_ray_serve_is_being_told_while_a_cluster_ends_is_done_before_all_is_deleted(
    monkeypatch: pytest.MonkeyPatch, begin: Any, given: dict[str, Any]
) -> None:
    assert ended(monkeypatch, begin, **given) == ["told", "deleted", "forgotten"]


@pytest.mark.parametrize(
    ("begin", "given"), [(_by_load, LOAD), (_undo, {}), (_by_hand, {}), (_nothing, {"is_first": True})]
)
def test_a_cluster_ends_though_ray_serve_never_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, begin: Any, given: dict[str, Any]
) -> None:
    notes = ended(monkeypatch, begin, answers=False, **given)
    assert notes == [*(["the cluster is ending"] if begin is _by_hand else []), "deleted"]
    assert "Ray Serve has not answered what it was told" in caplog.text, "so it stays known to `sgl cluster down`"
