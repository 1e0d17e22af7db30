"""One question that any router may answer, as its answer changes nothing: asked of each in turn.

Unlike a generation it has no signs of life, so a router that is frozen and one that is slow are not told apart: the
next one is asked as well, and the last one has the time that is left. Owns who is passed over, never the call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tandem.errors import DeadlineExceeded, TandemError, Unavailable
from tandem.generation import told
from tandem.routers import Routers
from tandem.v1 import inference_pb2_grpc

CALL_TIMEOUT_S = 30.0


class Turn:
    """Iterate over what to call, with the seconds to give it, and call it within `passing_over`; `failure` is what to
    raise when nobody is left."""

    def __init__(self, routers: Routers[Any], silence_s: float) -> None:
        self._routers = routers
        self._silence_s = silence_s
        self._router = routers.first
        self._is_last = False
        self.failure: TandemError = Unavailable("there is no router to ask", is_lost=True)

    def __iter__(self) -> Iterator[tuple[inference_pb2_grpc.InferenceStub, float]]:
        routers = list(self._routers.in_turn())
        rest_s = max(self._silence_s, CALL_TIMEOUT_S - self._silence_s * (len(routers) - 1))
        for router in routers:
            self._router = router
            self._is_last = router == routers[-1]
            yield self._routers.stub(router), rest_s if self._is_last else self._silence_s

    @contextmanager
    def passing_over(self) -> Iterator[None]:
        """Swallows that this router cannot be reached, or is silent while there is another one. Raises TandemError."""
        try:
            with told():
                yield
        except Unavailable as error:
            self.failure = error
        except DeadlineExceeded as error:
            if self._is_last:
                raise
            self.failure = error
        else:
            self._routers.first = self._router
