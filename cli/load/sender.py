"""Sends the planned requests to a cluster over gRPC."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from cli.load.open_loop import RequestFailed
from cli.load.workload import Arrival
from tandem.client import AsyncClient
from tandem.errors import TandemError


@dataclass(frozen=True, slots=True)
class Sender:
    """`prompts` are the token ids by the request's number. `model`: empty for the cluster's only model."""

    client: AsyncClient
    model: str
    prompts: Sequence[Sequence[int]]
    timeout_s: float  # of one request

    async def send(self, number: int, arrival: Arrival) -> AsyncGenerator[int, None]:
        """Generate exactly the planned number of tokens: greedy, ignoring the end of sequence. Raises RequestFailed."""
        generation = self.client.generate(
            token_ids=self.prompts[number],
            model=self.model,
            max_tokens=arrival.output_tokens,
            ignore_eos=True,
            temperature=0.0,
            timeout_s=self.timeout_s,
        )
        try:
            async with generation:
                async for delta in generation:
                    yield len(delta.token_ids)
        except TandemError as error:
            raise RequestFailed(error.reason) from error
