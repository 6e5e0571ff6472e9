"""The reward server: the protocol of docs/reward_serving.md over HTTP."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import LoadsWeights, RewardScores
from workflow_rl.rewards.registry import RewardSpec, RewardTerm, build_reward, nearest
from workflow_rl.rewards.remote.protocol import (
    PROTOCOL,
    ProtocolError,
    decode_request,
    encode_results,
    from_json,
    to_json,
)
from workflow_rl.rewards.remote.queue import QueueFullError, ScoringQueue

DISCONNECT_POLL_S = 1.0
MAX_CAUSE = 60
MAX_CONNECTIONS = 128
"""Connections beyond these are answered with 503 at once."""
SHUTDOWN_S = 10
SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


@dataclass(frozen=True)
class ServerSettings:
    """What bounds the server.

    Parameters
    ----------
    batch_size, wait_s, capacity
        See :class:`~workflow_rl.rewards.remote.queue.ScoringQueue`; per reward.
    max_body : int
        Bytes of a request, at most.
    """

    batch_size: int = 8
    wait_s: float = 0.01
    capacity: int = 512
    max_body: int = 2**30


class _RefusedError(Exception):
    """A request that is not scored."""

    def __init__(
        self, status: int, cause: str, message: str, reward: str = "", retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.cause = cause
        self.reward = reward
        self.retry_after_s = retry_after_s


class _Metrics:
    """What Prometheus reads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def about(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            return kind(f"reward_server_{name}", text, labels, registry=self.registry, **options)

        self.requests = about(Counter, "requests", "Requests by status.", "reward", "status")
        self.samples = about(Counter, "samples", "Samples that were scored or failed.", "reward")
        self.failures = about(
            Counter, "failures", "Failed samples, refused requests.", "reward", "cause"
        )
        self.queue = about(Gauge, "queue_samples", "Samples that wait.", "reward")
        self.latency = about(
            Histogram,
            "request_seconds",
            "From the whole request to its answer.",
            "reward",
            buckets=SECONDS,
        )
        self.batch = about(
            Histogram,
            "batch_samples",
            "Samples scored together.",
            "reward",
            buckets=[2**i for i in range(11)],
        )
        self.scoring = about(
            Histogram,
            "batch_seconds",
            "Seconds of a batch in the reward.",
            "reward",
            buckets=SECONDS,
        )

    def count_scores(self, reward: str, scores: RewardScores) -> None:
        """Count samples, and the failed ones by the first words of their reason."""
        self.samples.labels(reward).inc(len(scores.scores))
        for reason in scores.failures.values():
            self.failures.labels(reward, reason.split(":")[0][:MAX_CAUSE]).inc()


class RewardService:
    """Answers requests for the rewards of a configuration.

    Parameters
    ----------
    terms : mapping of str to RewardTerm
        What clients call each reward, and the reward, loaded.
    args : mapping of str to mapping
        The arguments of each, as told to clients that ask.
    """

    def __init__(
        self,
        terms: Mapping[str, RewardTerm],
        args: Mapping[str, Mapping[str, object]],
        settings: ServerSettings,
    ) -> None:
        self.settings = settings
        self.metrics = _Metrics()
        self._terms = dict(terms)
        self._args = args
        self._queues = {label: self._queue(label, term) for label, term in terms.items()}

    def _queue(self, label: str, term: RewardTerm) -> ScoringQueue:
        def on_batch(samples: int, seconds: float) -> None:
            self.metrics.batch.labels(label).observe(samples)
            self.metrics.scoring.labels(label).observe(seconds)

        queue = ScoringQueue(
            term.reward,
            batch_size=self.settings.batch_size,
            wait_s=self.settings.wait_s,
            capacity=self.settings.capacity,
            timeout_s=term.timeout_s,
            on_batch=on_batch,
        )
        self.metrics.queue.labels(label).set_function(lambda: len(queue))
        return queue

    def health(self) -> dict[str, Any]:
        """What clients check before they ask."""
        rewards = {
            label: {"media_kind": term.reward.media_kind, "args": dict(self._args[label])}
            for label, term in self._terms.items()
        }
        return {"status": "ok", "protocol": PROTOCOL, "rewards": rewards}

    async def score(self, request: Request) -> Response:
        """Answer a request to score."""
        try:
            body = await self._body(request)
            began = time.perf_counter()
            label, answer = await self._score(request, body)
            self.metrics.latency.labels(label).observe(time.perf_counter() - began)
            response = _json(200, answer)
        except _RefusedError as refused:
            label = refused.reward
            self.metrics.failures.labels(label, refused.cause).inc()
            response = _json(refused.status, {"error": str(refused)})
            if refused.retry_after_s:
                response.headers["retry-after"] = str(refused.retry_after_s)
        self.metrics.requests.labels(label, response.status_code).inc()
        return response

    async def _body(self, request: Request) -> bytes:
        """The request's body, while it is not too large."""
        limit = self.settings.max_body
        too_large = _RefusedError(413, "too large", f"the request has more than {limit} bytes")
        if int(request.headers.get("content-length", "0")) > limit:
            raise too_large
        chunks, size = [], 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise too_large
                chunks.append(chunk)
        except ClientDisconnect:
            raise _RefusedError(400, "broke off", "the request broke off") from None
        return b"".join(chunks)

    async def _score(self, request: Request, body: bytes) -> tuple[str, dict[str, Any]]:
        try:
            label, batch = await asyncio.to_thread(lambda: decode_request(from_json(body)))
        except ProtocolError as error:
            raise _RefusedError(400, "malformed", str(error)) from None
        if label not in self._queues:
            known = nearest(label, list(self._queues))
            raise _RefusedError(404, "unknown reward", f"no reward {label!r}: {known}")
        try:
            future = self._queues[label].submit(batch)
        except QueueFullError as full:
            raise _RefusedError(503, "queue full", str(full), label, full.retry_after_s) from None
        waiting = asyncio.wrap_future(future)
        while not (await asyncio.wait([waiting], timeout=DISCONNECT_POLL_S))[0]:
            if await request.is_disconnected():
                future.cancel()
                raise _RefusedError(499, "client gone", "the client has gone", label)
        fault = waiting.exception()
        if fault is not None:
            raise _RefusedError(500, "internal", str(fault), label)
        scores = waiting.result()
        self.metrics.count_scores(label, scores)
        return label, encode_results(batch, scores)


def _json(status: int, document: dict[str, Any]) -> Response:
    return Response(to_json(document), status, media_type="application/json")


def build_app(service: RewardService) -> FastAPI:
    """The HTTP interface of a service."""
    app = FastAPI(title="WorkflowRL reward server", openapi_url=None)

    @app.get("/health")
    def health() -> Response:
        return _json(200, service.health())

    @app.get("/metrics")
    def metrics() -> Response:
        text = generate_latest(service.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    app.add_api_route("/score", service.score, methods=["POST"])
    return app


def build_service(entries: Sequence[RewardSpec], settings: ServerSettings) -> RewardService:
    """Build and load the rewards of a configuration, wherever its runs have them computed.

    Raises
    ------
    UserError
        One cannot be built or loaded.
    """
    terms: dict[str, RewardTerm] = {}
    args: dict[str, Mapping[str, object]] = {}
    for entry in entries:
        term = build_reward(replace(entry, server=None))
        if isinstance(term.reward, LoadsWeights):
            term.reward.load()
        label, number = term.reward.name, 1
        while label in terms:
            number += 1
            label = f"{term.reward.name}#{number}"
        terms[label], args[label] = term, entry.args
    return RewardService(terms, args, settings)


def listen(host: str, port: int) -> socket.socket:
    """Take the address, before the rewards are loaded.

    Raises
    ------
    UserError
        It is taken, or not of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        address = socket.socket(family, socket.SOCK_STREAM)
        address.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        address.bind((host, port))
    except (OSError, OverflowError) as error:
        raise UserError(
            f"cannot listen on {host}:{port} ({error}): give another --host or --port"
        ) from None
    return address


def serve(service: RewardService, address: socket.socket, on_ready: Callable[[], None]) -> None:
    """Answer requests until SIGINT or SIGTERM; what is in progress has 10 s to be answered.

    ``on_ready`` is called when connections are no longer refused.
    """
    config = uvicorn.Config(
        build_app(service),
        log_level="warning",
        access_log=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises it again at its end
    with suppress(KeyboardInterrupt):
        address.listen(config.backlog)
        on_ready()
        uvicorn.Server(config).run(sockets=[address])
