"""The period, as events: engines decode, rewards score, the trainer trains what has arrived, steps, publishes.

Three stages, each a function of the one before: `generate` (engines do not wait for the trainer within a period),
`train` (the loader's rules: work-conserving rounds under a token budget) and `simulate`, which adds publication.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from rondo.plan.decoder import Amount, Decoder
from rondo.plan.records import Arrival, Bound, Costs, EngineCost, Generation, Outcome, Setting, Task
from rondo.plan.training import Training, train


def seconds_of(amount: Amount, cost: EngineCost) -> float:
    return (
        amount.steps * cost.step
        + amount.rows * cost.row
        + amount.keys * cost.key
        + amount.prefills * cost.prefill
        + amount.prompt_tokens * cost.prompt_token
    )


def has_room(*, slots: int, in_flight: int, n: int) -> bool:
    """The pool's rule: a little more than the slots is kept in flight."""
    return in_flight == 0 or slots - in_flight + max(n, slots // 4) >= n


class _Seat:
    """One engine in time: a stretch of decode steps is under way, and ends with a sample or with a new request."""

    def __init__(self, slots: int, cost: EngineCost) -> None:
        self.decoder = Decoder(slots)
        self.in_flight = 0
        self.ticket = 0  # of the newest event; older ones are void
        self.busy = 0.0
        self.drained = 0.0  # when the last sample in line got its slot
        self._cost = cost
        self._began = 0.0  # the stretch
        self._steps = 0

    def plan(self, now: float) -> float | None:
        """Fill the slots and start the next stretch; when it ends, or None where there is nothing to do."""
        had_line = self.decoder.waiting
        prefill = seconds_of(self.decoder.admit(), self._cost)
        if had_line and not self.decoder.waiting:
            self.drained = now
        if not self.decoder.running:
            return None
        self.busy += prefill
        self._began, self._steps = now + prefill, self.decoder.next_end()
        return self._began + seconds_of(self.decoder.ahead(self._steps), self._cost)

    def finish(self) -> list[int]:
        self.busy += seconds_of(self.decoder.ahead(self._steps), self._cost)
        return self.decoder.run(self._steps)

    def interrupt(self, now: float) -> float:
        """A request came and there are free slots: end the stretch with the step under way; when that is."""
        whole = seconds_of(self.decoder.ahead(self._steps), self._cost)
        if not self._steps or not whole:
            return max(now, self._began)
        done = min(max(0, -int(-(now - self._began) / whole * self._steps // 1)), self._steps - 1)
        spent = seconds_of(self.decoder.ahead(done), self._cost)
        self.busy += spent
        self.decoder.run(done)
        return self._began + spent


class _Generation:
    def __init__(self, tasks: Sequence[Task], setting: Setting, cost: EngineCost) -> None:
        self._tasks = tasks
        self._seats = [_Seat(setting.slots, cost) for _ in range(setting.engines)]
        self._roomy = [(-setting.slots, number) for number in range(setting.engines)]  # heap: -free, seat; some stale
        self._holder: dict[int, int] = {}
        self._next = 0
        self._events: list[tuple[float, int, int]] = []  # heap: when, seat, ticket
        self.answered: list[tuple[float, int]] = []
        self._setting = setting
        self._cost = cost

    def run(self) -> None:
        heapify(self._roomy)
        for number in sorted(self._dispatch()):
            self._schedule(number, self._seats[number].plan(self._cost.request))
        while self._events:
            now, number, ticket = heappop(self._events)
            seat = self._seats[number]
            if ticket != seat.ticket:
                continue
            touched = {number}
            for task in seat.finish():
                self.answered.append((now, task))
                self._leave(self._holder.pop(task), len(self._tasks[task].lengths))
                touched |= self._dispatch()
            self._go_on(touched, number, now)

    def _go_on(self, touched: set[int], ended: int, now: float) -> None:
        self._schedule(ended, self._seats[ended].plan(now))
        for number in touched - {ended}:
            seat = self._seats[number]
            if not seat.decoder.running:
                self._schedule(number, seat.plan(now))
            elif seat.decoder.running < seat.decoder.slots:
                self._schedule(number, seat.plan(seat.interrupt(now)))

    def _schedule(self, number: int, when: float | None) -> None:
        seat = self._seats[number]
        seat.ticket += 1
        if when is not None:
            heappush(self._events, (when, number, seat.ticket))

    def _dispatch(self) -> set[int]:
        """Groups in their order, each to the engine with the most free slots, while there is room."""
        touched = set()
        while self._next < len(self._tasks):
            task = self._tasks[self._next]
            n = len(task.lengths)
            number = self._roomiest()
            seat = self._seats[number]
            if not has_room(slots=self._setting.slots, in_flight=seat.in_flight, n=n):
                break
            seat.in_flight += n
            heapreplace(self._roomy, (seat.in_flight - self._setting.slots, number))
            seat.decoder.submit(self._next, task.prompt, task.lengths)
            self._holder[self._next] = number
            touched.add(number)
            self._next += 1
        return touched

    def _roomiest(self) -> int:
        while True:
            free, number = self._roomy[0]
            if -free == self._setting.slots - self._seats[number].in_flight:
                return number
            heappop(self._roomy)

    def _leave(self, number: int, n: int) -> None:
        seat = self._seats[number]
        seat.in_flight -= n
        heappush(self._roomy, (seat.in_flight - self._setting.slots, number))

    @property
    def busy(self) -> float:
        return sum(seat.busy for seat in self._seats)

    @property
    def drained(self) -> float:
        return max(seat.drained for seat in self._seats)


def generate(tasks: Sequence[Task], setting: Setting, costs: Costs) -> Generation:
    """When every group is whole and scored."""
    engines = _Generation(tasks, setting, costs.engine)
    engines.run()
    workers = deque([0.0] * setting.reward_workers)  # free at; each takes the next group in line
    arrivals = []
    for answered, index in engines.answered:
        scored = max(answered, workers.popleft()) + costs.reward
        workers.append(scored)
        arrivals.append(Arrival(index, answered, scored))
    return Generation(
        arrivals=tuple(arrivals),
        drained=engines.drained,
        ended=engines.answered[-1][0],
        busy=engines.busy,
        tokens=sum(sum(task.lengths) for task in tasks),
    )


def simulate(tasks: Sequence[Task], setting: Setting, costs: Costs) -> Outcome:
    """One period of these groups."""
    return finish(tasks, generate(tasks, setting, costs), setting, costs)


def finish(tasks: Sequence[Task], generation: Generation, setting: Setting, costs: Costs) -> Outcome:
    """The period of which this was generated: the same under both schedules."""
    training = train(tasks, generation, setting, costs)
    states: dict[Bound, float] = {
        "training": training.training,
        "stepping": training.stepping,
        **_waits(training, generation),
        "publishing": costs.publish,
        "rest": costs.rest,
    }
    seconds = sum(states.values())
    return Outcome(
        seconds=seconds,
        states=states,
        engine_share=generation.busy / setting.engines / seconds,
        trainer_share=(training.training + training.stepping) / seconds,
        samples=sum(len(task.lengths) for task in tasks if task.trained),
        tokens=generation.tokens,
        start=(start := generation.arrivals[0].answered),
        tail=generation.ended - max(generation.drained, start),
        generating=generation.ended,
    )


def _waits(training: Training, generation: Generation) -> dict[Bound, float]:
    """The trainer's waits by what it waited for: a reward, the first group, full engines, or the last few samples."""
    waits: dict[Bound, float] = {"first group": 0.0, "generation": 0.0, "tail": 0.0, "rewards": 0.0}
    for since, arrival, first in training.waits:
        answered = min(max(arrival.answered, since), arrival.scored)
        waits["rewards"] += arrival.scored - answered
        if first:
            waits["first group"] += answered - since
            continue
        full = min(max(generation.drained, since), answered)
        waits["generation"] += full - since
        waits["tail"] += answered - full
    return waits
