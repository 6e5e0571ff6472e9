"""The process of a reward's own: reads requests from its input, writes answers to its output.

Each message is its length (8 bytes, little-endian) and then JSON, see
:mod:`workflow_rl.rewards.remote.protocol`. The first one names the reward. It ends when its input
does, so that it never outlives the run. Needs workflow-rl, torch, numpy, av and Pillow, and what
the reward itself needs.
"""

import os
import sys
import threading
from queue import SimpleQueue
from typing import Any, BinaryIO

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import LoadsWeights, Reward, one_line, score_safely
from workflow_rl.rewards.registry import build_reward, spec_from_mapping
from workflow_rl.rewards.remote.protocol import (
    LENGTH,
    PROTOCOL,
    ProtocolError,
    decode_request,
    encode_results,
    from_json,
    to_json,
)


def serve(requests: "SimpleQueue[bytes]", output: BinaryIO) -> None:
    """Build the reward that the first message describes, then answer all others."""
    try:
        reward, greeting = _greet(from_json(requests.get()))
    except UserError as error:
        _write(output, {"error": str(error)})
        return
    _write(output, greeting)
    while True:
        try:
            _, batch = decode_request(from_json(requests.get()))
        except ProtocolError as error:
            _write(output, {"error": str(error)})
            continue
        _write(output, encode_results(batch, score_safely(reward, batch)))


def _greet(first: dict[str, Any]) -> tuple[Reward, dict[str, Any]]:
    """The reward, ready to score, and what to say of it."""
    if first.get("protocol") != PROTOCOL:
        raise UserError(
            f"the environment's workflow-rl speaks protocol {PROTOCOL}, the run's "
            f"{first.get('protocol')}: install the same version in both"
        )
    sys.path += [path for path in first["path"] if path not in sys.path]
    try:
        term = build_reward(spec_from_mapping(first["reward"]))
        if isinstance(term.reward, LoadsWeights):
            term.reward.load()
    except UserError:
        raise
    except Exception as error:  # whatever an environment made happen; it cannot score
        raise UserError(f"the reward cannot be made ready: {one_line(error)}") from error
    return term.reward, {"protocol": PROTOCOL, "media_kind": term.reward.media_kind}


def _write(output: BinaryIO, document: dict[str, Any]) -> None:
    body = to_json(document)
    output.write(LENGTH.pack(len(body)) + body)
    output.flush()


def _read_all(source: BinaryIO, requests: "SimpleQueue[bytes]") -> None:
    """Queue what comes in; end the process when no more can come, whatever it is doing."""
    while len(head := source.read(LENGTH.size)) == LENGTH.size:
        requests.put(source.read(LENGTH.unpack(head)[0]))
    os._exit(0)


def main() -> None:
    """Serve on the standard streams; what the reward prints goes to the error stream."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests: SimpleQueue[bytes] = SimpleQueue()
    source = os.fdopen(os.dup(0), "rb")
    threading.Thread(target=_read_all, args=(source, requests), daemon=True).start()
    serve(requests, output)


if __name__ == "__main__":
    main()
