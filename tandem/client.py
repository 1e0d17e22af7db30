"""The client library: ask a router over gRPC, read tokens as they come.

    with Client("127.0.0.1:50051") as client:
        for delta in client.generate("def fibonacci(n):", max_tokens=64):
            print(delta.text, end="")
        result = client.generate(token_ids=[1, 2, 3]).result()
        print(result.text, result.ledger.ttft_s)

`AsyncClient` is the same with `async with`, `async for` and `await`. Calls raise the errors of tandem/errors.py, and
ValueError or TypeError for what cannot be sent. Leaving a generation early (`close`, its `with`, dropping it) cancels
it on every worker. A generation survives its router where the cluster has another one (tandem/progress.py): routers
name the others in their answers, and the addresses of several may be given.
"""

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, Unpack

import grpc

from tandem.channel import open_async_channel, open_channel
from tandem.generation import Asking, AsyncGeneration, Generation, Metadata
from tandem.options import GenerateOptions, Message, generate_request, tokenize_request
from tandem.results import Model, model_from_wire, pack_ids, unpack_ids
from tandem.routers import Channel, Routers, addresses
from tandem.silence import SILENCE_S
from tandem.turn import Turn
from tandem.v1 import inference_pb2
from tandem.watch import Watch

__all__ = ["AsyncClient", "AsyncGeneration", "Client", "Generation"]

_GENERATION_TIMEOUT_S = 600.0


class _Asker(Generic[Channel]):
    """What both clients know: their routers, and what goes with every call."""

    def __init__(self, routers: Routers[Channel], api_key: str | None, timeout_s: float, silence_s: float) -> None:
        self._routers: Routers[Channel] = routers
        self._metadata: Metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._timeout_s = timeout_s
        self._silence_s = silence_s

    def _asking(self, request: inference_pb2.GenerateRequest, timeout_s: float | None) -> Asking:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return Asking(request, self._routers, self._metadata, timeout_s, self._silence_s)


class Client(_Asker[grpc.Channel]):
    """Of one router, or of several of one cluster. Safe to use from several threads; each generation has one reader."""

    def __init__(
        self,
        address: str | Sequence[str],
        api_key: str | None = None,
        *,
        timeout_s: float = _GENERATION_TIMEOUT_S,
        tls_ca: str | None = None,
        secure: bool = False,
        discover: bool = True,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`address` is the router's host:port for gRPC, or several, in a list or with commas between them: the first
        that answers serves, and another one goes on with what it leaves unfinished. `timeout_s` is the deadline of a
        generation that names none. With `tls_ca`, a PEM file, a router must have a certificate of one of its
        authorities; with `secure` alone, a publicly trusted one; else the connection is plaintext. `discover`: routers
        that the given ones name are asked too when one is lost; for addresses behind a load balancer or NAT, whose
        routers cannot be dialled from here, say False. `silence_s`: a router from which not even a sign of life has
        come for so long, while one waits, is left for another. Raises OSError when the file cannot be read, ValueError
        when there is no address."""
        dial = partial(open_channel, tls_ca=tls_ca, secure=secure)
        super().__init__(Routers(addresses(address), dial, discover=discover), api_key, timeout_s, silence_s)
        self._watch = Watch()

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Iterable[Message] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Continues a text, token ids as they are, or a conversation: exactly one of them."""
        request = generate_request(prompt, token_ids, messages, options)
        return Generation(self._asking(request, timeout_s), self._watch)

    def tokenize(self, text: str | None = None, *, messages: Iterable[Message] | None = None) -> tuple[int, ...]:
        request = tokenize_request(text, messages)
        answer = self._ask("Tokenize", request)
        return unpack_ids(answer.token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        request = inference_pb2.DetokenizeRequest(token_ids=pack_ids(token_ids))
        answer = self._ask("Detokenize", request)
        return str(answer.text)

    def models(self) -> tuple[Model, ...]:
        request = inference_pb2.ListModelsRequest()
        answer = self._ask("ListModels", request)
        return tuple(model_from_wire(model) for model in answer.models)

    def close(self) -> None:
        """Cancels what still runs."""
        for channel in self._routers.close():
            channel.close()

    def _ask(self, method: str, request: object) -> Any:
        turn = Turn(self._routers, self._silence_s)
        for stub, timeout_s in turn:
            with turn.passing_over():
                return getattr(stub, method)(request, timeout=timeout_s, metadata=self._metadata)
        raise turn.failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()


class AsyncClient(_Asker[grpc.aio.Channel]):
    """As Client, on one event loop: made and used there."""

    def __init__(
        self,
        address: str | Sequence[str],
        api_key: str | None = None,
        *,
        timeout_s: float = _GENERATION_TIMEOUT_S,
        tls_ca: str | None = None,
        secure: bool = False,
        discover: bool = True,
        silence_s: float = SILENCE_S,
    ) -> None:
        dial = partial(open_async_channel, tls_ca=tls_ca, secure=secure)
        super().__init__(Routers(addresses(address), dial, discover=discover), api_key, timeout_s, silence_s)

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Iterable[Message] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGeneration:
        """As Client.generate. The call starts here, before anything is awaited."""
        request = generate_request(prompt, token_ids, messages, options)
        return AsyncGeneration(self._asking(request, timeout_s))

    async def tokenize(self, text: str | None = None, *, messages: Iterable[Message] | None = None) -> tuple[int, ...]:
        request = tokenize_request(text, messages)
        answer = await self._ask("Tokenize", request)
        return unpack_ids(answer.token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        request = inference_pb2.DetokenizeRequest(token_ids=pack_ids(token_ids))
        answer = await self._ask("Detokenize", request)
        return str(answer.text)

    async def models(self) -> tuple[Model, ...]:
        request = inference_pb2.ListModelsRequest()
        answer = await self._ask("ListModels", request)
        return tuple(model_from_wire(model) for model in answer.models)

    async def close(self) -> None:
        """Cancels what still runs."""
        await asyncio.gather(*(channel.close() for channel in self._routers.close()))

    async def _ask(self, method: str, request: object) -> Any:
        turn = Turn(self._routers, self._silence_s)
        for stub, timeout_s in turn:
            with turn.passing_over():
                return await getattr(stub, method)(request, timeout=timeout_s, metadata=self._metadata)
        raise turn.failure

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        await self.close()
