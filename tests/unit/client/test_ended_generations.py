"""Reads of a generation that has ended, or was closed, and calls of a client that was closed."""

import asyncio
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

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


async def test_the_result_of_an_async_generation_that_was_read_to_its_end_stays_after_its_block() -> None:
    with router() as (_, address):
        async with AsyncClient(address) as client, client.generate("x") as generation:
            read = [delta async for delta in generation]
        assert len(read) == 5
        assert (await generation.result()).text == "ade"
        assert [delta async for delta in generation] == []


def test_a_generation_has_one_reading_thread() -> None:
    """gRPC would end the first one's call with an internal error."""
    with (
        router(responses=TWO_CHOICES[:1], hold=True) as (_, address),
        Client(address) as client,
        ThreadPoolExecutor() as threads,
    ):
        generation = client.generate("x", n=2)
        next(generation), next(generation)
        readers = [threads.submit(generation.result) for _ in range(2)]
        refused, rest = wait(readers, timeout=10, return_when=FIRST_COMPLETED)
        with pytest.raises(RuntimeError, match="another thread is reading this generation"):
            refused.pop().result()
        generation.close()
        with pytest.raises(Cancelled, match="this generation was closed"):
            rest.pop().result(timeout=10)


async def test_an_async_generation_has_one_reading_task() -> None:
    with router(responses=TWO_CHOICES[:1], hold=True) as (_, address):
        async with AsyncClient(address) as client:
            generation = client.generate("x", n=2)
            await anext(generation), await anext(generation)
            reader = asyncio.create_task(generation.result())
            await asyncio.sleep(0)  # it waits for a response
            with pytest.raises(RuntimeError, match="another task is reading this generation"):
                await anext(generation)
            generation.close()
            with pytest.raises(Cancelled, match="this generation was closed"):
                await reader


@pytest.mark.parametrize("closes_client", [False, True])
def test_a_read_of_a_closed_generation_says_so(closes_client: bool) -> None:
    with router(responses=TWO_CHOICES[:1], hold=True) as (_, address), Client(address) as client:
        generation = client.generate("x", n=2)
        next(generation), next(generation)
        (client if closes_client else generation).close()
        with pytest.raises(Cancelled, match="this generation was closed"):
            generation.result()


async def test_each_call_of_a_closed_client_is_cancelled() -> None:
    client, asynchronous = Client("127.0.0.1:1"), AsyncClient("127.0.0.1:1")
    for _ in range(2):
        client.close()
        await asynchronous.close()
        for call in (client.models, lambda: client.generate("x"), lambda: asynchronous.generate("x")):
            with pytest.raises(Cancelled, match="this client was closed"):
                call()
        with pytest.raises(Cancelled, match="this client was closed"):
            await asynchronous.models()
