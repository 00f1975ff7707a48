"""The engine's loop on the mock model: outputs, run-ahead, aborts, timeouts, and what happens when it dies."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks import host_overhead
from sgl.errors import EngineDead, QueueFull, RequestAborted, RequestTimeout
from sgl.grammar.vocabulary.token_table import TokenTable
from sgl.runtime.batch import Batch, StepResult
from sgl.runtime.cache.pages import PagePool
from sgl.runtime.loop.loop import EngineLoop
from sgl.runtime.loop.submission import Output, Submission
from sgl.runtime.loop.thread import EngineThread
from sgl.runtime.sampling_params import SamplingParams
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.scheduler import Scheduler
from sgl.runtime.scheduler.step import Limits
from sgl.runtime.text.detokenizer import ByteDetokenizer
from sgl.runtime.text.output import TextOutput
from sgl.runtime.text.stop import StopMatcher
from tests.mock_runner import VOCAB, MockRunner, expected_output
from tests.patience import PATIENCE, wait_until

STOPS = frozenset({3})
TABLE = TokenTable([f"<{i}>".encode() for i in range(VOCAB)], frozenset(), first="keep", invalid="replace")
SECONDS = PATIENCE


class SlowRunner(MockRunner):
    """A mock runner that can be made slow, or broken, and stands still before the step behind `most_steps`."""

    delay = 0.0
    failure: Exception | None = None
    num_steps = 0
    most_steps = 1 << 60

    def forward(self, batch: Batch) -> tuple[Batch, StepResult]:
        wait_until(lambda: self.num_steps < self.most_steps)
        self.num_steps += 1
        if self.failure is not None:
            raise self.failure
        time.sleep(self.delay)
        return super().forward(batch)


class Harness:
    """A running loop and a queue of what it delivers."""

    def __init__(self, *, run_ahead: bool = True, depth: int = 1, **limits: int) -> None:
        pool = PagePool(200, 4)
        settings = {"max_running_requests": 4, "context_length": 400, "step_tokens": 16, **limits}
        self.scheduler = Scheduler(Limits(**settings), pool, depth=depth)  # type: ignore[arg-type]
        self.runner = SlowRunner(200, 4, settings["max_running_requests"], 100)
        self.outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self.loop = EngineLoop(
            EngineThread(),
            self.scheduler,
            self.runner,
            self._deliver,
            run_ahead=run_ahead,
            depth=depth,
            check_ledger=True,
        )
        self.loop.start()
        self.uid = 0

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.outputs.put(output)

    def submission(self, prompt: list[int], max_new: int = 10, **options: object) -> Submission:
        self.uid += 1
        fields = {key: options.pop(key) for key in ("deadline", "queue_deadline") if key in options}
        stops = options.pop("stop", ())
        stream = bool(options.pop("stream", False))
        stop_ids = options.pop("stop_ids", STOPS)
        params = SamplingParams(max_new_tokens=max_new, stop=stops, **options)  # type: ignore[arg-type]
        ids = np.array(prompt, np.int32)
        request = Request(
            self.uid,
            ids,
            params,
            seed=1,
            max_new_tokens=max_new,
            stop_ids=stop_ids,
            **fields,  # type: ignore[arg-type]
        )
        matcher = StopMatcher(params.stop) if params.stop else None
        text = TextOutput(
            ByteDetokenizer(TABLE, ids), matcher, keep_match=params.no_stop_trim, min_tokens=params.min_new_tokens
        )
        return Submission(request, text, stream=stream)

    def collect(self, count: int) -> dict[int, list[Output]]:
        """Outputs by request until `count` requests have ended."""
        by_uid: dict[int, list[Output]] = {}
        while count:
            output = self.outputs.get(timeout=SECONDS)
            by_uid.setdefault(output.uid, []).append(output)
            count -= output.finish_reason is not None
        return by_uid


@pytest.fixture(params=["run-ahead", "synchronous", "three stages"])
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    harness = Harness(run_ahead=request.param == "run-ahead", depth=3 if request.param == "three stages" else 1)
    yield harness
    harness.loop.stop()


def text_of(ids: list[int]) -> str:
    return "".join(f"<{i}>" for i in ids)


def test_streams_join_to_what_one_output_says(harness: Harness) -> None:
    prompts = [[1, 2, 3, 4, 5, k] for k in range(6)]
    streamed = [harness.submission(prompt, 30, stream=True) for prompt in prompts]
    whole = [harness.submission(prompt, 30) for prompt in prompts]
    harness.loop.submit([*streamed, *whole])
    outputs = harness.collect(12)
    for prompt, one, other in zip(prompts, streamed, whole, strict=True):
        expected = expected_output(prompt, 30, 1, STOPS)
        parts = outputs[one.request.uid]
        [single] = outputs[other.request.uid]
        visible = expected[:-1] if expected[-1] in STOPS else expected
        assert [i for part in parts for i in part.token_ids] == single.token_ids == expected
        assert "".join(part.text for part in parts) == single.text == text_of(visible)
        assert parts[-1].finish_reason == single.finish_reason


def test_a_stop_string_ends_the_text_before_it_and_the_request_at_it(harness: Harness) -> None:
    prompt = [9, 8, 7]
    expected = expected_output(prompt, 60, 1, frozenset())
    stop = text_of(expected[5:7])[1:-1]
    for stream in (True, False):
        submission = harness.submission(prompt, 60, stop=(stop,), stop_ids=frozenset(), stream=stream)
        harness.loop.submit([submission])
        outputs = harness.collect(1)[submission.request.uid]
        assert "".join(output.text for output in outputs) == text_of(expected[:5]) + "<"
        assert sum(len(output.token_ids) for output in outputs) == 7
        assert outputs[-1].finish_reason is not None
        assert outputs[-1].finish_reason.matched == stop


def test_a_kept_stop_is_part_of_the_text(harness: Harness) -> None:
    prompt = [9, 8, 7]
    expected = expected_output(prompt, 60, 1, frozenset())
    stop = text_of(expected[5:6])
    by_text = harness.submission(prompt, 60, stop=(stop,), stop_ids=frozenset(), no_stop_trim=True)
    by_token = harness.submission(prompt, 60, stop_ids=frozenset({expected[5]}), no_stop_trim=True)
    harness.loop.submit([by_text, by_token])
    outputs = harness.collect(2)
    wanted = text_of(expected[:6])
    first = expected.index(expected[5])
    assert outputs[by_text.request.uid][0].text.startswith(wanted[: wanted.index(stop)] + stop)
    assert outputs[by_token.request.uid][0].text == text_of(expected[: first + 1])


def test_an_abort_is_answered_once_and_nothing_follows(harness: Harness) -> None:
    harness.runner.most_steps = 10
    long = harness.submission([5, 6], 380, stop_ids=frozenset(), stream=True)
    other = harness.submission([7, 8], 20, stop_ids=frozenset())
    harness.loop.submit([long, other])
    assert harness.outputs.get(timeout=SECONDS).uid == long.request.uid
    harness.loop.abort([long.request.uid, 12345])
    harness.loop.abort([long.request.uid])
    harness.runner.most_steps = 1 << 60
    harness.loop.call(lambda: None)
    outputs = harness.collect(2)
    last = outputs[long.request.uid][-1].finish_reason
    assert last is not None
    assert last.type == "abort"
    assert isinstance(last.error, RequestAborted)
    assert outputs[other.request.uid][0].token_ids == expected_output([7, 8], 20, 1, frozenset())
    with pytest.raises(queue.Empty):
        harness.outputs.get(timeout=0.1)
    assert harness.loop.call(harness.scheduler.memory.check) == []
    assert harness.scheduler.memory.rows.num_free == 4


def test_a_late_request_ends_with_a_timeout_and_the_others_finish(harness: Harness) -> None:
    harness.runner.most_steps = 10
    late = harness.submission([5, 6], 380, stop_ids=frozenset(), deadline=time.monotonic() + PATIENCE)
    fine = harness.submission([7, 8], 60, stop_ids=frozenset())
    harness.loop.submit([late, fine])
    wait_until(lambda: harness.runner.num_steps == 10)
    harness.scheduler._clock = lambda: time.monotonic() + PATIENCE
    harness.runner.most_steps = 1 << 60
    outputs = harness.collect(2)
    reason = outputs[late.request.uid][-1].finish_reason
    assert reason is not None
    assert isinstance(reason.error, RequestTimeout)
    assert "running" in str(reason.error)
    assert len(outputs[fine.request.uid][-1].token_ids) == 60


def test_a_full_queue_answers_the_one_too_many() -> None:
    harness = Harness(max_running_requests=1, max_queued_requests=2)
    harness.runner.delay = 0.01
    submissions = [harness.submission([k + 1], 5, stop_ids=frozenset()) for k in range(3)]
    harness.loop.submit(submissions)
    outputs = harness.collect(3)
    refused = [out[-1] for out in outputs.values() if isinstance(out[-1].finish_reason.error, QueueFull)]  # type: ignore[union-attr]
    assert len(refused) == 1
    harness.loop.stop()


def test_a_runner_that_fails_answers_everybody_and_refuses_the_next(harness: Harness) -> None:
    harness.runner.most_steps = 10
    submissions = [harness.submission([k + 1], 300, stop_ids=frozenset()) for k in range(6)]
    harness.loop.submit(submissions)
    wait_until(lambda: harness.runner.num_steps == 10)
    harness.runner.failure = ZeroDivisionError("the device is gone")
    harness.runner.most_steps = 1 << 60
    outputs = harness.collect(6)
    for submission in submissions:
        reason = outputs[submission.request.uid][-1].finish_reason
        assert reason is not None
        assert isinstance(reason.error, EngineDead)
        assert isinstance(reason.error.__cause__, ZeroDivisionError)
    with pytest.raises(EngineDead, match="the device is gone"):
        harness.loop.submit([harness.submission([1])])
    with pytest.raises(EngineDead):
        harness.loop.call(lambda: 1)


def test_stopping_answers_those_who_wait_and_may_be_repeated(harness: Harness) -> None:
    harness.runner.delay = 0.005
    harness.loop.submit([harness.submission([k + 1], 300, stop_ids=frozenset()) for k in range(6)])
    harness.loop.stop()
    harness.loop.stop()
    outputs = harness.collect(6)
    assert all(isinstance(out[-1].finish_reason.error, EngineDead) for out in outputs.values())  # type: ignore[union-attr]
    with pytest.raises(EngineDead, match="shut down"):
        harness.loop.submit([harness.submission([1])])


def test_an_idle_loop_computes_nothing_and_wakes_up(harness: Harness) -> None:
    harness.loop.submit([harness.submission([1, 2], 4)])
    harness.collect(1)
    wait_until(lambda: harness.loop._round_began is None)  # the turn that delivered is over
    turns = []
    expire = harness.scheduler.expire
    harness.scheduler.expire = lambda: turns.append(1) or expire()  # type: ignore[method-assign,func-returns-value]
    time.sleep(0.2)
    assert not turns
    harness.loop.submit([harness.submission([1, 2, 3], 4)])
    harness.collect(1)


def test_a_function_called_in_the_loop_returns_or_raises_there(harness: Harness) -> None:
    assert harness.loop.call(lambda: 41 + 1) == 42
    with pytest.raises(KeyError):
        harness.loop.call(lambda: {}["missing"])
    assert harness.loop.is_alive


def test_timers_go_off_in_order_also_when_idle_and_cancelled_ones_do_not(harness: Harness) -> None:
    loop, now = harness.loop, time.monotonic()
    heard: queue.SimpleQueue[int] = queue.SimpleQueue()

    def arm() -> None:
        timers = [loop.timers.call_at(now + 0.01 * i, lambda i=i: heard.put(i)) for i in (5, 1, 3, 0)]  # type: ignore[misc]
        loop.timers.cancel(timers[2])
        loop.timers.cancel(timers[2])

    loop.call(arm)
    assert [heard.get(timeout=SECONDS) for _ in range(3)] == [0, 1, 5]


def test_cancelled_timers_take_no_memory(harness: Harness) -> None:
    loop, far = harness.loop, time.monotonic() + 1000
    heard: queue.SimpleQueue[int] = queue.SimpleQueue()

    def arm() -> int:
        loop.timers.call_at(far - 999.99, lambda: heard.put(1))
        for _ in range(10_000):
            loop.timers.cancel(loop.timers.call_at(far, lambda: None))
        return len(loop.timers._heap)

    assert loop.call(arm) < 200
    assert heard.get(timeout=SECONDS) == 1


def test_actions_without_end_keep_no_request_from_its_steps(harness: Harness) -> None:
    loop, is_over = harness.loop, []

    def again() -> None:
        if not is_over:
            loop.post(again)

    loop.post(again)
    submission = harness.submission([1, 2, 3], 5)
    loop.submit([submission])
    harness.collect(1)
    is_over.append(True)


def test_the_benchmark_of_the_hosts_part_of_a_step_runs() -> None:
    assert host_overhead.measure(2, 10, 4, stops=True)["median_ms"] > 0
