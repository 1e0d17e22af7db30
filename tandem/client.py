"""The client library: call a router over gRPC and read tokens while they are generated.

    with Client("127.0.0.1:50051") as client:
        for delta in client.generate("def fibonacci(n):", max_tokens=64):
            print(delta.text, end="")
        result = client.generate(token_ids=[1, 2, 3]).result()
        print(result.text, result.ledger.ttft_s)

`AsyncClient` is the same with `async with`, `async for` and `await`. Calls raise the errors of tandem/errors.py, and
ValueError or TypeError for parameters that cannot be sent. `close`, leaving the `with` block of a generation, or
dropping it cancels it on every worker. If a router is lost, its generations continue at another router of the cluster
(tandem/progress.py): routers name the others in their responses, and a client may be given several addresses. In a
program that uses OpenTelemetry, a generation belongs to the trace of the span in which it was started.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from types import TracebackType
from typing import Any, Generic, Self, Unpack

import grpc

from tandem.channel import channel_credentials, open_async_channel, open_channel
from tandem.errors import DeadlineExceeded, TandemError, Unavailable
from tandem.generation import AsyncGeneration, CallParameters, Generation, Metadata, trace_context, translated_errors
from tandem.keepalive import KEEPALIVE_TIMEOUT_S
from tandem.keepalive_watch import KeepAliveWatch
from tandem.options import AllOptions, Message, generate_request, token_ids_message, tokenize_request
from tandem.results import Model, model_from_wire
from tandem.routers import Channel, Routers, addresses
from tandem.v1 import inference_pb2, inference_pb2_grpc

__all__ = ["AsyncClient", "AsyncGeneration", "Client", "Generation"]

_GENERATION_TIMEOUT_S = 600.0
_CONNECT_TIMEOUT_S = 30.0  # of a generation without a timeout of its own
_CALL_TIMEOUT_S = 30.0  # of a call that is no generation
_LONGEST_S = 1e9  # an infinite timeout: gRPC takes a deadline that it cannot represent for one that has passed


class _BaseClient(Generic[Channel]):
    """The parts of both clients: the routers, and the metadata and timeouts of every call."""

    _open_channel: Callable[..., Channel]

    def __init__(
        self,
        address: str | Sequence[str],
        api_key: str | None = None,
        *,
        timeout_s: float | None = None,
        connect_timeout_s: float | None = None,
        tls_ca: str | None = None,
        tls_server_name: str | None = None,
        secure: bool = False,
        discover: bool = True,
        keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S,
    ) -> None:
        """Parameters:

        - `address`: host:port of a router's gRPC port, or several in a list or separated by commas. The first one that
          responds serves; if it is lost, another one continues its generations.
        - `timeout_s`: the deadline of a generation that has no `timeout_s` of its own. Default: 600 s. `inf`: none.
        - `connect_timeout_s`: how long a generation tries to reach a router while none has ever responded to this
          client. Default: until the generation's deadline if `timeout_s` was given, otherwise 30 s. With 0 each address
          is tried once.
        - `tls_ca`: a PEM file with the authorities that may sign a router's certificate. `secure` without it: TLS with
          the publicly trusted authorities. Neither: plaintext.
        - `tls_server_name`: the name that every router's certificate has, where it does not name the hosts of their
          addresses.
        - `discover`: also use the routers that the given ones name. Set it to False if these addresses cannot be
          dialled from here, for example behind a load balancer or NAT.
        - `keepalive_timeout_s`: a router that sends no message for this long while a reader waits counts as lost.

        Raises OSError if the file cannot be read, and ValueError or TypeError for a value that cannot be used."""
        channel_credentials(tls_ca, secure)  # each channel reads the file again
        dial = partial(self._open_channel, tls_ca=tls_ca, tls_server_name=tls_server_name, secure=secure)
        self._routers: Routers[Channel] = Routers(addresses(address), dial, discover=discover)
        self._metadata: Metadata = authorization(api_key)
        self._timeout_s = None if timeout_s is None else _checked_s("timeout_s", timeout_s)
        self._connect_timeout_s = (
            None if connect_timeout_s is None else _checked_s("connect_timeout_s", connect_timeout_s)
        )
        self._keepalive_timeout_s = _checked_s("keepalive_timeout_s", keepalive_timeout_s)
        if self._keepalive_timeout_s <= 0:
            raise ValueError(f"keepalive_timeout_s must be positive, not {keepalive_timeout_s:g}")
        self._watch = KeepAliveWatch()  # of blocking generations; its thread runs only while one of them is read

    def _parameters(self, request: inference_pb2.GenerateRequest, timeout_s: float | None) -> CallParameters:
        timeout_s = self._timeout_s if timeout_s is None else _checked_s("timeout_s", timeout_s)
        connect_s = self._connect_timeout_s
        if connect_s is None:
            connect_s = timeout_s if timeout_s is not None else _CONNECT_TIMEOUT_S
        return CallParameters(
            request,
            self._routers,
            metadata=(*self._metadata, *trace_context()),
            timeout_s=timeout_s if timeout_s is not None else _GENERATION_TIMEOUT_S,
            connect_timeout_s=connect_s,
            keepalive_timeout_s=self._keepalive_timeout_s,
        )


class Client(_BaseClient[grpc.Channel]):
    """A blocking client of one cluster. Several threads may use it; each generation has one reader."""

    _open_channel = staticmethod(open_channel)

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Iterable[Message] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[AllOptions],
    ) -> Generation:
        """Start a generation from exactly one of a text (`prompt`), token ids, which are used unchanged, and a
        conversation (`messages`). `timeout_s` is its deadline in seconds.

        Raises ValueError or TypeError for parameters that cannot be sent. Errors of the cluster are raised while the
        generation is read."""
        request = generate_request(prompt, token_ids, messages, options)
        return Generation(self._parameters(request, timeout_s), self._watch)

    def tokenize(self, text: str | None = None, *, messages: Iterable[Message] | None = None) -> tuple[int, ...]:
        request = tokenize_request(text, messages)
        answer = self._ask("Tokenize", request)
        return tuple(answer.token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        request = inference_pb2.DetokenizeRequest(token_ids=token_ids_message(token_ids).ids)
        answer = self._ask("Detokenize", request)
        return str(answer.text)

    def models(self) -> tuple[Model, ...]:
        request = inference_pb2.ListModelsRequest()
        answer = self._ask("ListModels", request)
        return tuple(model_from_wire(model) for model in answer.models)

    def close(self) -> None:
        """Cancel the generations that still run, and close all connections."""
        for channel in self._routers.close():
            channel.close()

    def _ask(self, method: str, request: object) -> Any:
        turn = _Turn(self._routers, self._keepalive_timeout_s)
        for stub, timeout_s in turn:
            with turn.next_on_failure():
                return getattr(stub, method)(request, timeout=timeout_s, metadata=self._metadata)
        raise turn.failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()


class AsyncClient(_BaseClient[grpc.aio.Channel]):
    """A client like Client for asyncio. It may be created anywhere and is used on one event loop."""

    _open_channel = staticmethod(open_async_channel)
    _loop: asyncio.AbstractEventLoop | None = None  # of the first call

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Iterable[Message] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[AllOptions],
    ) -> AsyncGeneration:
        """Start a generation as Client.generate does. The call starts at once, before the generation is awaited.

        Raises RuntimeError outside an event loop, or on another one than the client's earlier calls."""
        self._require_loop()
        request = generate_request(prompt, token_ids, messages, options)
        return AsyncGeneration(self._parameters(request, timeout_s))

    async def tokenize(self, text: str | None = None, *, messages: Iterable[Message] | None = None) -> tuple[int, ...]:
        request = tokenize_request(text, messages)
        answer = await self._ask("Tokenize", request)
        return tuple(answer.token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        request = inference_pb2.DetokenizeRequest(token_ids=token_ids_message(token_ids).ids)
        answer = await self._ask("Detokenize", request)
        return str(answer.text)

    async def models(self) -> tuple[Model, ...]:
        request = inference_pb2.ListModelsRequest()
        answer = await self._ask("ListModels", request)
        return tuple(model_from_wire(model) for model in answer.models)

    async def close(self) -> None:
        """Cancel the generations that still run, and close all connections."""
        await asyncio.gather(*(channel.close() for channel in self._routers.close()))

    def _require_loop(self) -> None:
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if loop is not self._loop:
            raise RuntimeError("this AsyncClient was used on another event loop before; create one for each loop")

    async def _ask(self, method: str, request: object) -> Any:
        self._require_loop()
        turn = _Turn(self._routers, self._keepalive_timeout_s)
        for stub, timeout_s in turn:
            with turn.next_on_failure():
                return await getattr(stub, method)(request, timeout=timeout_s, metadata=self._metadata)
        raise turn.failure

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        await self.close()


def authorization(api_key: str | None) -> Metadata:
    """Return the metadata with an API key; None or an empty one: none. Raises ValueError and TypeError."""
    if not api_key:
        return ()
    if not isinstance(api_key, str):
        raise TypeError(f"an API key must be a str, not {type(api_key).__name__}")
    if not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("an API key must consist of printable ASCII characters; this one may have a line break")
    return (("authorization", f"Bearer {api_key}"),)


def _checked_s(name: str, seconds: float) -> float:
    """Return a timeout that gRPC can represent. Raises ValueError for NaN and TypeError for a value of another type."""
    if not isinstance(seconds, Real):
        raise TypeError(f"{name} must be a number of seconds, not {type(seconds).__name__}")
    if math.isnan(seconds):
        raise ValueError(f"{name} must be a number of seconds, not nan")
    return min(float(seconds), _LONGEST_S)


class _Turn:
    """A call without side effects, which is tried at each router in turn.

    Such a call has no keep-alive messages, so a frozen router cannot be told from a slow one: the next router is called
    after `keepalive_timeout_s`, and the last one has the remaining time and is called again if its connection broke.
    Iterate over (stub, timeout in seconds) and call within `next_on_failure`; `failure` is the error to raise when no
    router is left.
    """

    def __init__(self, routers: Routers[Any], keepalive_timeout_s: float) -> None:
        self._routers = routers
        self._keepalive_timeout_s = keepalive_timeout_s
        self._router = routers.first
        self._is_last = False
        self.failure: TandemError = Unavailable("no router is known", is_lost=True)

    def __iter__(self) -> Iterator[tuple[inference_pb2_grpc.InferenceStub, float]]:
        routers = list(self._routers.in_turn())
        rest_s = max(self._keepalive_timeout_s, _CALL_TIMEOUT_S - self._keepalive_timeout_s * (len(routers) - 1))
        for router in routers:
            self._router = router
            self._is_last = router == routers[-1]
            yield self._routers.stub(router), rest_s if self._is_last else self._keepalive_timeout_s
        if self.failure.is_lost:  # perhaps the connection's age ended it as the call began
            yield self._routers.stub(self._router), rest_s

    @contextmanager
    def next_on_failure(self) -> Iterator[None]:
        """Suppress a failure to reach this router, and its timeout if another router is left. Raises TandemError."""
        try:
            with translated_errors():
                yield
        except Unavailable as error:
            self.failure = error
        except DeadlineExceeded as error:
            if self._is_last:
                raise
            self.failure = error
        else:
            self._routers.on_response(self._router)
