"""Prefixes in files with what others need to go on there: all of it comes back, or nothing does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sgl.runtime.cache import segments as segments_module
from sgl.runtime.scheduler.request import Phase
from tests import test_tiers, test_tiers_states, test_tiers_windows
from tests.scheduler_driver import Driver, make_request
from tests.test_page_files import MOMENTS, killed
from tests.test_tiers import PROMPTS, settle

SCHEDULERS: dict[str, Callable[..., Driver]] = {
    "plain": test_tiers.tiered,
    "states": test_tiers_states.tiered,
    "windows": test_tiers_windows.tiered,
}
KINDS = pytest.mark.parametrize("kind", list(SCHEDULERS))


def run_one(driver: Driver, uid: int, prompt: list[int]) -> int:
    """How many of the prompt's tokens were cached. The answer is right."""
    return test_tiers.run_one(driver, uid, prompt).cached_len


def end(driver: Driver) -> None:
    """As an engine ends: all that is cached is written."""
    assert driver.tiers is not None
    driver.tiers.saves.save_all_later()
    settle(driver)
    driver.check()
    driver.tiers.close()


def written(kind: str, folder: Path, prompts: list[list[int]], **fields: object) -> None:
    """What an engine leaves that has seen these prompts."""
    driver = SCHEDULERS[kind](folder=folder, **fields)
    for uid, prompt in enumerate(prompts):
        run_one(driver, uid, prompt)
    end(driver)


@KINDS
def test_the_next_engine_goes_on_from_files(kind: str, tmp_path: Path) -> None:
    written(kind, tmp_path, PROMPTS)
    driver = SCHEDULERS[kind](folder=tmp_path)
    assert [run_one(driver, uid, [*prompt, 1]) for uid, prompt in enumerate(PROMPTS)] == [
        36 if kind == "states" else 40
    ] * len(PROMPTS)
    end(driver)


@KINDS
def test_the_next_engine_goes_on_where_prompts_part(kind: str, tmp_path: Path) -> None:
    shared, *others = PROMPTS
    written(kind, tmp_path, [[*shared[:21], *other[:9]] for other in others[:2]])
    driver = SCHEDULERS[kind](folder=tmp_path)
    assert run_one(driver, 0, [*shared[:21], *others[3][:9]]) == 20
    end(driver)


@KINDS
@pytest.mark.parametrize("damage", ["first", "last"])
def test_what_is_damaged_is_computed(kind: str, damage: str, tmp_path: Path) -> None:
    written(kind, tmp_path, [PROMPTS[0]])
    for path in sorted(tmp_path.rglob("*.pages")):
        data = bytearray(path.read_bytes())
        data[{"first": 56 + 40, "last": -1}[damage]] ^= 1
        path.write_bytes(data)
    driver = SCHEDULERS[kind](folder=tmp_path)
    assert run_one(driver, 0, [*PROMPTS[0], 1]) <= (36 if kind == "plain" and damage == "last" else 0)
    assert driver.files is not None
    assert driver.files.num_bad > 0
    end(driver)
    again = SCHEDULERS[kind](folder=tmp_path)
    assert run_one(again, 0, [*PROMPTS[0], 1]) >= 36
    end(again)


@pytest.mark.costly
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ["states", "windows"])
def test_a_kill_at_any_write_leaves_all_of_a_prefix_or_nothing(kind: str, moment: str, tmp_path: Path) -> None:
    for number in range(40):
        folder = tmp_path / str(number)
        if not killed(lambda folder=folder: written(kind, folder, PROMPTS[:1]), number, moment):  # type: ignore[misc]
            assert number > 11, "there are pages and what goes with them to write"
            return
        driver = SCHEDULERS[kind](folder=folder)
        run_one(driver, 0, [*PROMPTS[0], 1])
        end(driver)
        again = SCHEDULERS[kind](folder=folder)
        assert run_one(again, 0, [*PROMPTS[0], 1]) >= 36, "what was missing is written"
        end(again)
    raise AssertionError("it writes without end")


def test_a_prefix_longer_than_what_is_written_at_once_is_written(tmp_path: Path) -> None:
    written("plain", tmp_path, PROMPTS, num_pages=100, host_pages=24)
    driver = SCHEDULERS["plain"](folder=tmp_path)
    assert [run_one(driver, uid, [*prompt, 1]) for uid, prompt in enumerate(PROMPTS)].count(40) >= 2
    end(driver)


def test_files_of_weights_before_are_not_read_for_those_who_wait(tmp_path: Path) -> None:
    """Whoever waits for room has the names of its pages from before."""
    written("plain", tmp_path, PROMPTS[:1])
    driver = SCHEDULERS["plain"](folder=tmp_path)
    long, waiting = make_request(1, PROMPTS[1], 36), make_request(2, PROMPTS[0], 2)
    long.stop_ids = waiting.stop_ids = frozenset()
    driver.scheduler.add(long)
    while len(long.output_ids) < 20:
        driver.step()
    driver.scheduler.add(waiting)
    for _ in range(3):
        driver.step()
    assert waiting.phase is Phase.WAITING
    driver.copies.settle()
    driver.scheduler.memory.outdate()
    driver.run()
    assert waiting.phase is Phase.DONE
    assert waiting.cached_len == 0
    end(driver)


@pytest.mark.parametrize("kind", ["states", "windows"])
def test_a_state_or_window_that_cannot_be_written_leaves_pages_unread(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full behind the pages."""
    write_all, sizes, num_pages = segments_module.write_all, [], 9 if kind == "states" else 10

    def full(file: int, data: bytes) -> None:
        sizes.append(len(data))
        if len(sizes) > num_pages + 1:
            raise OSError(28, "No space left on device")
        write_all(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(segments_module, "write_all", full)
        written(kind, tmp_path, PROMPTS[:1])
    driver = SCHEDULERS[kind](folder=tmp_path)
    assert driver.files is not None
    assert len(driver.files) == num_pages
    assert run_one(driver, 0, [*PROMPTS[0], 1]) == 0
    end(driver)
