"""All that rank 0 talks to beside the trainer: reward workers, engines and sinks, on one background loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import aiohttp

from rondo.config import Config
from rondo.engines.bearer import run_token
from rondo.launch.build_observe import build_sinks
from rondo.launch.build_producer import build_scorer
from rondo.launch.fleet import Fleet, open_session
from rondo.launch.waits import watch_pool, watch_requests
from rondo.observe.console import Console
from rondo.observe.diagnosis import Waits
from rondo.observe.sinks import Sinks
from rondo.rewards.runner import RewardRunner
from rondo.rollout.background import Background
from rondo.stream.queue import GroupQueue


@dataclass(frozen=True, kw_only=True)
class Outside:
    background: Background
    session: aiohttp.ClientSession
    scorer: RewardRunner
    sinks: Sinks
    fleet: Fleet  # empty until it is gathered

    def close(self) -> None:
        self.background.call(self.scorer.close())
        self.background.call(self.session.close())
        self.background.close()


def build_outside(config: Config, folder: Path, *, queue: GroupQueue, console: Console, waits: Waits) -> Outside:
    background = Background("producer")
    sinks = build_sinks(config, folder, background, console)
    scorer = build_scorer(config, folder, warn=console.warn)
    background.call(scorer.start())
    session = background.call(open_session())
    watch_requests(session, waits)
    fleet = Fleet(config, folder, session=session, queue=queue, warn=console.warn, token=run_token(folder))
    watch_pool(fleet.pool, waits)
    return Outside(background=background, session=session, scorer=scorer, sinks=sinks, fleet=fleet)
