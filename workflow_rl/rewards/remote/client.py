"""A reward behind a server that speaks the protocol of docs/reward_serving.md."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import AcceptedKind, RewardBatch, RewardScores, all_failed
from workflow_rl.rewards.registry import nearest
from workflow_rl.rewards.remote.base import RemoteReward, in_background
from workflow_rl.rewards.remote.protocol import (
    PROTOCOL,
    MediaFormat,
    ProtocolError,
    decode_results,
    encode_request,
    from_json,
    to_json,
)
from workflow_rl.rewards.weights import Lazy, import_extra

if TYPE_CHECKING:
    import httpx

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which another try may end well."""
HEALTH_TIMEOUT_S = 30.0
POLL_S = 1.0
"""Between two looks at whether a server that is waited for answers."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
"""Seconds before the first repeat and, at most, before any; doubled each time, with jitter."""

logger = logging.getLogger(__name__)


class _AskError(Exception):
    """A request got no scores; the message is the reason of the failure."""

    def __init__(self, reason: str, *, again: bool, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.again = again
        self.wait_s = wait_s


class ServerReward(RemoteReward):
    """A reward that a server computes.

    Requests go through one pool of connections, ``in_flight`` at a time. One that cannot connect,
    breaks off, gets no answer in time or is answered with 408, 425, 429 or 5xx is repeated, after
    what the server asks for or with jittered, doubling waits; then its samples fail.

    Parameters
    ----------
    url : str
        Of the server, without a path of the protocol.
    name, media_kind, batch_size
        As in :class:`~workflow_rl.rewards.remote.base.RemoteReward`.
    reward : str or None
        What the server calls it; None: ``name``.
    args : mapping
        Arguments that the server must have given it; empty: whichever it has.
    media : {"png", "mp4", "float32"}
        How media are sent: ``png`` rounds them to 8 bits, ``float32`` is exact and large, ``mp4``
        small and lossy (of videos; images go as PNG).
    in_flight, retries : int
        Requests at a time; repeats of each.
    request_timeout_s : float
        Of one try of one request.
    wait_s : float
        How long :meth:`load` waits for a server that does not answer yet.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        media_kind: AcceptedKind,
        reward: str | None = None,
        args: Mapping[str, object] | None = None,
        media: MediaFormat = "png",
        batch_size: int = 8,
        in_flight: int = 4,
        retries: int = 4,
        request_timeout_s: float = 300.0,
        wait_s: float = 0.0,
    ) -> None:
        super().__init__(name, media_kind, batch_size)
        self.url = url.rstrip("/")
        self._reward = reward or name
        self._args = dict(args or {})
        self._media: MediaFormat = media
        self._retries = retries
        self._in_flight = asyncio.Semaphore(in_flight)
        self._timeout_s = request_timeout_s
        self._wait_s = wait_s
        self._client = Lazy(self._connect)
        self._checked = Lazy(self._check)

    def load(self) -> None:
        """See that the server answers and has the reward; once.

        Raises
        ------
        UserError
            It does not answer, or has no such reward, or one with other arguments.
        """
        self._checked.get()

    def _connect(self) -> Any:
        httpx = import_extra("httpx", "server", f"reward {self.name}")
        import_extra("tenacity", "server", f"reward {self.name}")
        client: Any = httpx.AsyncClient(
            base_url=self.url,
            timeout=self._timeout_s,
            trust_env=False,  # a proxy of the environment knows no server of the cluster
        )
        return client

    def _check(self) -> None:
        client = self._client.get()
        try:
            health = in_background(self._health_in_time(client)).result()
        except _AskError as error:
            raise UserError(
                f"the reward server {self.url} cannot be used ({error}): start it with "
                f"`workflow-rl reward-server CONFIG` and wait until it says that it is ready "
                f"(server.wait_s waits for it), or set server.url"
            ) from None
        rewards = health.get("rewards")
        if (
            health.get("protocol") != PROTOCOL
            or not isinstance(rewards, dict)
            or not all(isinstance(about, dict) for about in rewards.values())
        ):
            raise UserError(
                f"{self.url}/health speaks no protocol {PROTOCOL} of rewards: set server.url to a "
                f"reward server of this version"
            )
        if self._reward not in rewards:
            raise UserError(
                f"the reward server {self.url} has no reward {self._reward!r}: "
                f"{nearest(self._reward, list(rewards))}; set server.reward"
            )
        about = rewards[self._reward]
        if self._args and about.get("args", self._args) != self._args:
            raise UserError(
                f"the reward server {self.url} has {self._reward!r} with args {about['args']}, the "
                f"configuration says {self._args}: make them equal, or leave args out"
            )
        if about.get("media_kind") in ("image", "video", "any"):
            self.media_kind = about["media_kind"]

    async def _health_in_time(self, client: Any) -> dict[str, Any]:
        """Ask until the server answers, for ``wait_s`` at most."""
        deadline = time.monotonic() + self._wait_s
        said = False
        while True:
            try:
                return await self._health(client)
            except _AskError as error:
                if not error.again or time.monotonic() >= deadline:
                    raise
                if not said:
                    logger.warning("waiting %g s for %s: %s", self._wait_s, self.url, error)
                    said = True
                await asyncio.sleep(POLL_S)

    async def _health(self, client: Any) -> dict[str, Any]:
        async with _reasons(HEALTH_TIMEOUT_S):
            return from_json(_body(await client.get("/health", timeout=HEALTH_TIMEOUT_S)))

    async def ask(self, batch: RewardBatch) -> RewardScores:
        """Ask for scores, again where that may help."""
        import tenacity

        async with self._in_flight:
            body = await asyncio.to_thread(self._request, batch)
            retrying = tenacity.AsyncRetrying(
                stop=tenacity.stop_after_attempt(1 + self._retries),
                retry=tenacity.retry_if_exception(
                    lambda error: isinstance(error, _AskError) and error.again
                ),
                wait=_wait,
                reraise=True,
            )
            try:
                answer: dict[str, Any] = await retrying(self._post, body)
            except _AskError as error:
                return all_failed(len(batch), str(error))
        return decode_results(answer, batch.sample_ids)

    def _request(self, batch: RewardBatch) -> bytes:
        return to_json(encode_request(batch, self._reward, self._media))

    async def _post(self, body: bytes) -> dict[str, Any]:
        """One try of a request."""
        client = self._client.get()
        headers = {"content-type": "application/json"}
        async with _reasons(self._timeout_s):
            return from_json(_body(await client.post("/score", content=body, headers=headers)))


def _wait(state: Any) -> float:
    """Seconds before the next try: what the server asked for, or jittered and doubling."""
    import tenacity

    error = state.outcome.exception()
    if isinstance(error, _AskError) and error.wait_s is not None:
        return min(error.wait_s, LONGEST_WAIT_S)
    jittered = tenacity.wait_random_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S)
    return float(jittered(state))


def _body(response: "httpx.Response") -> bytes:
    """The body of an answer that is 200."""
    if response.status_code == 200:
        return response.content
    again = response.status_code in RETRIED
    reason = f"the server answered {response.status_code}"
    if not again:  # the request's own fault: what the server says of it is worth reading
        reason += f": {' '.join(response.text.split())[:200]}"
    asked = response.headers.get("retry-after", "")
    raise _AskError(reason, again=again, wait_s=float(asked) if asked.isdecimal() else None)


@asynccontextmanager
async def _reasons(timeout_s: float) -> AsyncIterator[None]:
    """Turn what goes wrong in a request into a reason that is the same every time."""
    import httpx

    try:
        async with asyncio.timeout(timeout_s):
            yield
    except (TimeoutError, httpx.TimeoutException) as error:
        reason = f"no answer from the server within {timeout_s:g} s"
        raise _AskError(reason, again=True) from error
    except httpx.ConnectError as error:
        raise _AskError("no connection to the server", again=True) from error
    except httpx.TransportError as error:
        reason = "the connection broke off before the answer was whole"
        raise _AskError(reason, again=True) from error
    except (httpx.InvalidURL, httpx.HTTPError) as error:
        raise _AskError("the server's answer cannot be read", again=False) from error
    except ProtocolError as error:
        raise _AskError(f"the server's answer is {error}", again=False) from error
