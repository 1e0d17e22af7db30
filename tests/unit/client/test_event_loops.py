"""Where an AsyncClient may be created and used."""

import asyncio

import pytest

from tandem.client import AsyncClient
from tests.unit.client.scripted_router import router


def test_an_async_client_is_created_anywhere_and_refuses_a_second_event_loop() -> None:
    """A second loop failed with an error about futures of asyncio."""

    async def text(client: AsyncClient) -> str:
        return (await client.generate("x").result()).text

    with router() as (_, address):
        client = AsyncClient(address)

        async def calls() -> None:
            assert await text(client) == "ade"
            with pytest.raises(RuntimeError, match="another event loop before; create one for each loop"):
                await asyncio.to_thread(asyncio.run, text(client))
            with pytest.raises(RuntimeError, match="another event loop before"):
                await asyncio.to_thread(asyncio.run, client.models())
            assert await text(client) == "ade"
            await client.close()

        asyncio.run(calls())
