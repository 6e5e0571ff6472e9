"""A reward in a process of its own, with another Python environment if it needs one."""

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import (
    AcceptedKind,
    RewardBatch,
    RewardScores,
    all_failed,
    join_rows,
)
from workflow_rl.rewards.remote.base import RemoteReward, in_background
from workflow_rl.rewards.remote.protocol import (
    LENGTH,
    PROTOCOL,
    ProtocolError,
    decode_results,
    encode_request,
    from_json,
    to_json,
)

END_S = 5.0
"""Seconds that a process whose output has ended gets to end."""

MAX_GREETING = 2**20
"""Bytes of what a process says when it is ready; text that was printed reads as a larger number."""

logger = logging.getLogger(__name__)


class _DiedError(Exception):
    """The process ended while it was asked; the message says how."""


class ProcessReward(RemoteReward):
    """A reward that runs in a process of its own.

    The process gets the media as they are, so that the scores are those of the reward in process,
    called with ``batch_size`` samples. After it died it is started again: what it was asked is
    asked again, and sample by sample if it died once more, so that one that kills it fails alone.
    It is killed when a time limit passes, and ends with the run, however that ends.

    Parameters
    ----------
    entry : mapping
        The entry of the configuration, without where it runs.
    name, media_kind, batch_size
        As in :class:`~workflow_rl.rewards.remote.base.RemoteReward`.
    python : path or None
        The interpreter of an environment that has workflow-rl; None is that of the run.
    env : mapping of str to str
        Environment variables, beside those of the run.
    restarts : int
        Times that it is started again while one stage's samples are scored; then what is left
        fails.
    """

    def __init__(
        self,
        entry: Mapping[str, Any],
        *,
        name: str,
        media_kind: AcceptedKind,
        batch_size: int = 8,
        python: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        restarts: int = 5,
    ) -> None:
        super().__init__(name, media_kind, batch_size)
        if python is not None and not os.access(python, os.X_OK):
            raise UserError(
                f"reward {name!r}: {python} is no program: set process.python to the python of an "
                f"environment, such as /venvs/hps/bin/python"
            )
        self._entry = dict(entry)
        self._python = python
        self._env = dict(env or {})
        self._restarts = restarts
        self._left = restarts
        self._death = ""  # of the last request
        self._end = ""  # of the last process
        self._process: Process | None = None
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def load(self) -> None:
        """Start the process if it does not run; allow as many new starts as at first.

        Raises
        ------
        UserError
            It cannot be started, or the reward in it cannot load.
        """
        self._left = self._restarts
        if self._process is None:
            in_background(self._start_locked()).result()

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None

    async def ask(self, batch: RewardBatch) -> RewardScores:
        """Ask for scores: again if the process died, and if it died again, sample by sample."""
        async with self._lock:
            scores = await self._ask_alive(batch)
            if scores is None:
                scores = await self._ask_alive(batch)
            if scores is not None:
                return scores
            if len(batch) == 1 or batch.group_ids:
                return all_failed(len(batch), self._death)
            rows = [await self._ask_alive(batch.row(row)) for row in range(len(batch))]
            return join_rows([all_failed(1, self._death) if r is None else r for r in rows])

    async def _ask_alive(self, batch: RewardBatch) -> RewardScores | None:
        """Ask once; None if the process died of it, or could not be started."""
        try:
            return await self._ask(batch)
        except _DiedError as error:
            self._death = str(error)
            return None

    async def _ask(self, batch: RewardBatch) -> RewardScores:
        """Ask once, of a process that is started if none runs."""
        process = self._process
        if process is None:
            if self._left == 0:
                raise _DiedError(f"{self._end}, and has had its {self._restarts} restarts")
            self._left -= 1
            try:
                process = await self._start()
            except UserError as error:
                raise _DiedError(f"the process does not start again: {error}") from None
        body = await asyncio.to_thread(_request, batch, self.name)
        answer = await self._exchange(process, body)
        document = await asyncio.to_thread(from_json, answer)
        if "error" in document:
            return all_failed(len(batch), str(document["error"]))
        return decode_results(document, batch.sample_ids)

    async def _exchange(self, process: Process, body: bytes) -> bytes:
        """Send a message and read the answer; kill the process if that is given up."""
        try:
            return await _exchange(process, body)
        except (OSError, asyncio.IncompleteReadError):
            self._process = None
            how = await _how_it_ended(process)
            logger.warning("the process of reward %s %s", self.name, how)
            self._end = f"the process {how}"
            raise _DiedError(self._end) from None
        except asyncio.CancelledError:
            self._process = None
            self._end = "the process took too long"
            process.kill()
            raise

    async def _start_locked(self) -> None:
        async with self._lock:
            await self._start()

    async def _start(self) -> Process:
        """Start the process and have the reward in it built and loaded.

        It gets a session of its own: Ctrl-C is for the run, which may want its scores yet.
        """
        python = self._python or sys.executable
        process = await asyncio.create_subprocess_exec(
            python,
            "-m",
            "workflow_rl.rewards.remote.worker",
            stdin=PIPE,
            stdout=PIPE,
            env=os.environ | self._env,
            start_new_session=True,
        )
        path = [os.getcwd()] if self._python else [p or os.getcwd() for p in sys.path]
        first = to_json({"protocol": PROTOCOL, "reward": self._entry, "path": path})
        try:
            greeting = from_json(await _exchange(process, first, MAX_GREETING))
        except ProtocolError:
            process.kill()
            raise UserError(
                f"the process of reward {self.name!r} printed something before it was ready: "
                f"{Path(python)} and what it imports at its start must not write to the standard "
                f"output; let them write to the standard error"
            ) from None
        except (OSError, asyncio.IncompleteReadError):
            how = await _how_it_ended(process)
            raise UserError(
                f"the process of reward {self.name!r} {how} before it was ready: see what it "
                f"printed; {Path(python)} must be able to import workflow_rl, "
                f"torch, numpy, av and PIL"
            ) from None
        except asyncio.CancelledError:
            process.kill()
            raise
        if "error" in greeting:
            raise UserError(f"reward {self.name!r}, in its own process: {greeting['error']}")
        self.media_kind = greeting["media_kind"]
        self._process = process
        return process


def _request(batch: RewardBatch, reward: str) -> bytes:
    return to_json(encode_request(batch, reward, "float32"))


async def _exchange(process: Process, body: bytes, most: int | None = None) -> bytes:
    """Send one message and read one, of ``most`` bytes.

    Raises
    ------
    ProtocolError
        What comes is no message of so many bytes; its length would be waited for in vain.
    """
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process has no pipes")
    process.stdin.write(LENGTH.pack(len(body)))
    process.stdin.write(body)
    await process.stdin.drain()
    head = await process.stdout.readexactly(LENGTH.size)
    length: int = LENGTH.unpack(head)[0]
    if most is not None and length > most:
        raise ProtocolError(f"a message of {length} bytes")
    return await process.stdout.readexactly(length)


async def _how_it_ended(process: Process) -> str:
    """Say how a process ended whose output has ended."""
    try:
        code = await asyncio.wait_for(process.wait(), END_S)
    except TimeoutError:
        process.kill()
        return "closed its output"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"
