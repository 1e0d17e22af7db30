"""A generation that has ended with an error raises it at every later read, and never seems to have ended in order."""

import asyncio

import grpc
import pytest

from tandem.client import AsyncClient, Client
from tandem.errors import Cancelled, InvalidRequest
from tests.unit.client.scripted_router import TWO_CHOICES, aborting, router


async def test_every_read_after_the_error_that_ended_an_async_generation_raises_that_error() -> None:
    failure = aborting(grpc.StatusCode.INVALID_ARGUMENT, "n must be", reason="invalid_request")
    with router(responses=TWO_CHOICES[:1], failure=failure) as (_, address):
        async with AsyncClient(address) as client:
            generation = client.generate("x", n=2)
            with pytest.raises(InvalidRequest, match="n must be"):
                async for _ in generation:
                    pass
            with pytest.raises(InvalidRequest, match="n must be"):
                await generation.result()
            with pytest.raises(InvalidRequest, match="n must be"):
                await anext(generation)
            generation.close()
            with pytest.raises(InvalidRequest, match="n must be"):
                await generation.result()


def test_every_read_after_the_error_that_ended_a_generation_raises_that_error() -> None:
    failure = aborting(grpc.StatusCode.INVALID_ARGUMENT, "n must be", reason="invalid_request")
    with router(responses=TWO_CHOICES[:1], failure=failure) as (servicer, address), Client(address) as client:
        generation = client.generate("x", n=2)
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="n must be"):
                list(generation)
        with pytest.raises(InvalidRequest, match="n must be"):
            generation.result()
        assert len(servicer.seen) == 1


async def test_a_generation_whose_reader_was_cancelled_raises_that_at_each_later_read() -> None:
    """It ended as if its last token had come, because gRPC ends a call with its reader."""
    with router(responses=TWO_CHOICES[:1], hold=True) as (servicer, address):
        async with AsyncClient(address) as client:
            generation = client.generate("x", n=2)
            await anext(generation), await anext(generation)
            reader = asyncio.create_task(generation.result())
            await asyncio.sleep(0)  # it waits for a response
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            assert await asyncio.to_thread(servicer.left.wait, 10)
            with pytest.raises(Cancelled, match="a read of this generation was cancelled"):
                await anext(generation)
            with pytest.raises(Cancelled, match="a read of this generation was cancelled"):
                await generation.result()
