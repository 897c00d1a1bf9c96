"""Background threads: whatever the work raises is in its future."""

import asyncio

import pytest

from nlgrpo.runtime.supervision.threads import event_loop, in_thread


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_any_exception_is_in_the_future(error):
    def fails():
        raise error("why")

    with pytest.raises(error, match="why"):
        in_thread(fails).result(10)
    assert in_thread(lambda: 3).result(10) == 3


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_loop_continues_after_any_exception(error):
    async def fails():
        raise error("why")

    async def works():
        return 3

    loop = event_loop("test")
    with pytest.raises(error, match="why"):
        asyncio.run_coroutine_threadsafe(fails(), loop).result(10)
    assert asyncio.run_coroutine_threadsafe(works(), loop).result(10) == 3
    loop.call_soon_threadsafe(loop.stop)
