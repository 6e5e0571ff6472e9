"""A server that speaks the protocol, and breaks it in the ways that servers do."""

import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torch import Tensor

from workflow_rl.rewards.base import RewardBatch, RewardScores
from workflow_rl.rewards.remote.client import ServerReward
from workflow_rl.rewards.remote.protocol import PROTOCOL, decode_request

Results = list[dict[str, Any]]
Reply = Callable[[Results], object]
HALF = b"half"
DRIP = b"drip" * 5
HANG_S = 30.0


def mean_of(media: Tensor) -> Tensor:
    """What the server scores: the mean of each sample's values, the same in any batch."""
    return media.flatten(1).double().mean(1).float()


def mean_value(batch: RewardBatch) -> RewardScores:
    """The server's reward, in process."""
    return RewardScores(mean_of(batch.media))


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as address:
        port: int = address.getsockname()[1]
    return port


class ManyConnections(ThreadingHTTPServer):
    """Takes all connections that come at once."""

    request_queue_size = 128
    daemon_threads = True


class FaultyServer:
    """Scores samples by :func:`mean_of`.

    ``reply`` makes of the proper results what is sent: an int is a status, bytes a body, a list
    the results; ``HALF`` closes half-way, ``DRIP`` comes a byte at a time. ``headers`` go with
    every answer; ``connections`` counts those that clients opened; they stay open between requests.
    """

    def __init__(self, port: int = 0) -> None:
        self.reply: Reply = lambda results: results
        self.health: Any = {
            "protocol": PROTOCOL,
            "rewards": {"mean": {"media_kind": "video", "args": {}}},
        }
        self.requests: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.connections = 0
        self.at_once: list[int] = []
        self.ended = threading.Event()
        self._working = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                with outer._lock:
                    outer.connections += 1

            def do_GET(self) -> None:
                self._send(outer.health)

            def do_POST(self) -> None:
                document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer._working += 1
                    outer.at_once.append(outer._working)
                    outer.requests.append(document)
                _, batch = decode_request(document)
                scores = mean_of(batch.media).tolist()
                results = [
                    {"id": sample_id, "score": score}
                    for sample_id, score in zip(batch.sample_ids, scores, strict=True)
                ]
                reply = outer.reply(results)
                with outer._lock:
                    outer._working -= 1
                is_results = isinstance(reply, list)
                self._send({"protocol": PROTOCOL, "results": reply} if is_results else reply)

            def _send(self, answer: object) -> None:
                status = answer if isinstance(answer, int) else 200
                body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body) + 9 * (answer == HALF)))
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.close_connection = self.close_connection or answer == HALF
                try:
                    for part in [DRIP[i : i + 1] for i in range(20)] if answer == DRIP else [body]:
                        self.wfile.write(part)
                        time.sleep(0.1 if answer == DRIP else 0)
                except OSError:  # the client gave up
                    self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = ManyConnections(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def hang(self, results: Results) -> object:
        """A reply that does not come while anyone waits."""
        self.ended.wait(HANG_S)
        return results

    def slow(self, results: Results) -> object:
        """A reply that takes a moment, so that requests meet."""
        time.sleep(0.05)
        return results

    def reward(self, **options: Any) -> ServerReward:
        """A client of it, which asks once."""
        settings: dict[str, Any] = {"name": "mean", "media_kind": "video", "retries": 0}
        return ServerReward(self.url, **settings | options)

    def close(self) -> None:
        """End it; what hangs is let go."""
        self.ended.set()
        self._http.shutdown()
        self._http.server_close()
