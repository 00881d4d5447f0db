"""Rollouts that are coroutines: many at a time in one event loop, and cancelled when their groups are too stale."""

import asyncio
from typing import Any

import pytest
from replaying import WAIT_S, answers, prompts_of, write

from dataplane_core.errors import InvalidRequestError
from dataplane_integrations.errors import CollectorFailedError
from dataplane_integrations.replay import AsyncCollector, ReadyFirstPolicy


def test_every_prompt_is_generated_and_trained_on_once(make_buffer, client, held):
    buffer = make_buffer(num_prompts=9)
    running: list[int] = [0, 0]  # now, and at most
    together = asyncio.Event()

    async def rollout(reservations):
        running[0] += 1
        running[1] = max(running)
        if running[0] > 1:
            together.set()
        await asyncio.wait_for(together.wait(), WAIT_S)  # the first one waits for a second one
        await asyncio.sleep(0.01)
        running[0] -= 1
        return answers(reservations)

    async def train():
        prompts: list[int] = []
        async with AsyncCollector(buffer, rollout, client=client, max_concurrent=3) as collector:
            while (meta := await asyncio.to_thread(buffer.select, 2, timeout_s=WAIT_S)).size:
                async with collector.quiet():
                    assert running[0] == 0
                prompts += prompts_of(meta)
                buffer.consume(meta)
                buffer.set_weight_version(buffer.weight_version + 1)
            await collector.wait()
        assert collector.counts.groups == 9
        return prompts

    assert asyncio.run(train()) == list(range(9))
    assert running[1] > 1
    assert held() == []


@pytest.mark.parametrize("requeue", [False, True])
def test_a_rollout_whose_groups_are_too_stale_is_cancelled(make_buffer, client, held, requeue):
    policy = ReadyFirstPolicy(max_staleness=0, groups_per_version=2)
    buffer = make_buffer(policy, num_prompts=2, requeue_evicted=requeue)
    begun: list[str] = []
    cancelled: list[str] = []

    async def rollout(reservations):
        (reservation,) = reservations
        begun.append(reservation.group)
        if reservation.group == "v0_p1":  # slow, and it has written its rows already
            meta = write(client, reservations)
            try:
                await asyncio.sleep(WAIT_S)
            except asyncio.CancelledError:
                cancelled.append(reservation.group)
                raise
            return meta
        return answers(reservations)

    async def train():
        async with AsyncCollector(
            buffer, rollout, client=client, max_concurrent=2, max_failures=1, abort_poll_s=0.02
        ) as collector:
            meta = await asyncio.to_thread(buffer.select, 1, timeout_s=WAIT_S)
            while len(begun) < 2:
                await asyncio.sleep(0.01)
            buffer.consume(meta)
            buffer.set_weight_version(1)
            rest = await asyncio.to_thread(buffer.select, 1, timeout_s=WAIT_S)
            await collector.wait()
            assert (collector.counts.aborted, collector.counts.failures) == (1, 0)
            return rest.size

    assert asyncio.run(train()) == (2 if requeue else 0)
    assert cancelled == ["v0_p1"]
    assert held() == (["v1_p1r1_g0", "v1_p1r1_g1"] if requeue else [])


def test_a_coroutine_that_fails_is_a_failure_of_the_rollout(make_buffer):
    buffer = make_buffer()

    async def rollout(reservations):
        raise TimeoutError("no answer from the engine")

    async def train():
        async with AsyncCollector(buffer, rollout, max_failures=2):
            with pytest.raises(CollectorFailedError, match="no answer from the engine"):
                await asyncio.to_thread(buffer.select, 1, timeout_s=WAIT_S)

    with pytest.raises(CollectorFailedError):
        asyncio.run(train())
    with pytest.raises(InvalidRequestError, match="abort_poll_s must be above 0"):
        AsyncCollector(buffer, rollout, abort_poll_s=0)


@pytest.mark.parametrize("before_it_starts", [True, False])
def test_a_coroutine_that_others_cancel_gives_its_group_back(make_buffer, client, held, before_it_starts):
    buffer = make_buffer(num_prompts=3)
    made: list[asyncio.Task[Any]] = []

    def make_task(loop, coroutine, **options):
        task = asyncio.Task(coroutine, loop=loop, **options)
        if "generate" in coroutine.__qualname__:
            made.append(task)
            if before_it_starts and len(made) == 1:
                task.cancel()
        return task

    async def rollout(reservations):
        if len(made) == 1 and not before_it_starts:
            made[0].cancel()
        await asyncio.sleep(0)
        return answers(reservations)

    async def train():
        asyncio.get_running_loop().set_task_factory(make_task)
        prompts: list[int] = []
        async with AsyncCollector(buffer, rollout, client=client, max_concurrent=1) as collector:
            while (meta := await asyncio.to_thread(buffer.select, 1, timeout_s=WAIT_S)).size:
                prompts += prompts_of(meta)
                buffer.consume(meta)
                if len(prompts) == 2:  # with the two groups of version 0; all three may have been made with it
                    buffer.set_weight_version(1)
            await collector.wait()
        assert (collector.counts.groups, collector.counts.failures) == (3, 1)
        return prompts

    assert sorted(asyncio.run(train())) == [0, 1, 2]
    assert held() == []
