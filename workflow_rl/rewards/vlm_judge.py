"""A vision-language model as a judge, behind any server that speaks OpenAI's API."""

import asyncio
import base64
import io
import math
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeVar

import torch
from PIL import Image

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import AcceptedKind, RewardBatch, RewardScores, one_line
from workflow_rl.rewards.judge_answers import Token, answer_schema, expected_labels, parse_answer
from workflow_rl.rewards.pixels import to_pil
from workflow_rl.rewards.remote.base import RemoteReward, in_background
from workflow_rl.rewards.weights import Lazy, import_extra

T = TypeVar("T")

CRITERIA = {
    "alignment": "Does it show what the text asks for: subjects, attributes, actions, setting?",
    "quality": "Is every frame clear, natural and free of artefacts?",
    "motion": "Is the motion smooth, physically plausible and more than none?",
}
RUBRIC = (
    "You judge media made by a generative model from a text. Judge each criterion on its own, by "
    "what you see, with a whole number from {lowest} (worst) to {highest} (best).\n{criteria}\n"
    "Answer with JSON only: one number for each criterion."
)
TOP_LOGPROBS = 20
"""The most that servers allow."""


class VlmJudge(RemoteReward):
    """Mean grade of a vision-language model over the criteria, in [0, 1]; higher is better.

    The model sees the prompt and ``frames`` frames, evenly spaced, as images, and answers in JSON
    with a grade for each criterion. Each criterion is a component, in [0, 1]. An answer of any
    other form, or none, fails its sample. Samples are asked about as they are made.

    Parameters
    ----------
    model : str or None
        Its name at the server; required.
    base_url : str
        Of the server, with ``/v1``.
    criteria : mapping of str to str or None
        Name (small letters and ``_``) and question of each. None: alignment, quality and motion.
    method : {"logprob", "average"}
        ``logprob``: the expected grade under the model's token probabilities, from one answer at
        temperature 0 (after G-Eval, Liu et al. 2023, arXiv 2303.16634). ``average``: the mean over
        ``samples`` answers at ``temperature``; for servers that give no probabilities.
    lowest, highest : int
        Grades, single digits.
    frames, max_side : int
        Frames shown of a video; the longer side of each in pixels, at most.
    rubric : str or None
        The system message, in which ``{lowest}``, ``{highest}`` and ``{criteria}`` are filled in;
        None: a plain one.
    api_key_env : str
        Environment variable with the key; unset means that the server asks for none.
    concurrency, retries : int
        Requests in flight; repeats of one after time-outs, lost connections and statuses 408, 409,
        429 and 5xx, with jittered back-off.
    request_timeout_s : float
        That a server may be silent, in seconds. A sample whose answer is not there after
        ``retries + 1`` times as long has failed, whatever trickles in. The term's own
        ``timeout_s`` limits all samples together: keep it larger.
    use_proxy : bool
        Go through the proxy that the environment names.
    extra_body : mapping or None
        Further keys of the request, such as ``chat_template_kwargs``.
    """

    name = "vlm_judge"
    media_kind: AcceptedKind = "any"

    def __init__(
        self,
        model: str | None = None,
        base_url: str = "http://localhost:8000/v1",
        criteria: Mapping[str, str] | None = None,
        method: Literal["logprob", "average"] = "logprob",
        samples: int = 4,
        temperature: float = 0.7,
        lowest: int = 1,
        highest: int = 5,
        frames: int = 8,
        max_side: int = 512,
        rubric: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        concurrency: int = 16,
        retries: int = 3,
        request_timeout_s: float = 60.0,
        use_proxy: bool = False,
        extra_body: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(self.name, self.media_kind, batch_size=1)
        self.criteria = _read_criteria(CRITERIA if criteria is None else criteria)
        if method not in ("logprob", "average"):
            raise UserError(f"method is {method!r}: give logprob or average")
        _check_whole(1, samples=samples, frames=frames, max_side=max_side, concurrency=concurrency)
        _check_whole(0, retries=retries)
        if not (_is_real(request_timeout_s) and request_timeout_s > 0):
            raise UserError(f"request_timeout_s is {request_timeout_s!r}: give seconds above 0")
        if not (_is_real(temperature) and temperature >= 0):
            raise UserError(f"temperature is {temperature!r}: give a number of 0 or more")
        if not (type(lowest) is int and type(highest) is int and 0 <= lowest < highest <= 9):
            raise UserError(
                f"grades go from {lowest!r} to {highest!r}: give single digits, low to high"
            )
        self.labels = range(lowest, highest + 1)
        self.model = model
        self.base_url = base_url
        self.method = method
        self.samples = samples
        self.temperature = temperature
        self.frames = frames
        self.max_side = max_side
        self.rubric = RUBRIC if rubric is None else rubric
        self.api_key_env = api_key_env
        self.in_flight = asyncio.Semaphore(concurrency)
        self.retries = retries
        self.request_timeout_s = request_timeout_s
        self.use_proxy = use_proxy
        self.extra_body = dict(extra_body or {})
        self.client = Lazy(self._connect)

    def load(self) -> None:
        """Connect to the server."""
        self.client.get()

    def _connect(self) -> Any:
        """A client of a server that answers and accepts the key."""
        if not self.model:
            raise UserError("vlm_judge needs args.model: the model's name at the server")
        openai = import_extra("openai", "judge", f"reward {self.name}")
        client = openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=os.environ.get(self.api_key_env) or "none",
            timeout=self.request_timeout_s,
            max_retries=self.retries,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=self.use_proxy),
        )
        try:
            in_background(self._in_time(client.models.list)).result()
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise UserError(
                f"{self.base_url} refuses the key in {self.api_key_env}: {one_line(error)[:200]}"
            ) from error
        except (openai.APIConnectionError, TimeoutError) as error:
            raise UserError(
                f"{self.base_url} does not answer ({one_line(error)[:200]}): start the server, or "
                f"set args.base_url"
            ) from error
        except openai.APIError:
            pass  # it answers, but lists no models: not every server does
        return client

    async def ask(self, batch: RewardBatch) -> RewardScores:
        """Grade one sample, in [0, 1] by each criterion."""
        what = "the image" if batch.media_kind == "image" else "frames of the video, in order"
        text = f"The text: {batch.prompts[0]}\nBelow: {what}."
        failures: dict[int, str] = {}
        try:
            grades = await self.answer(lambda: [{"type": "text", "text": text}, *self.shown(batch)])
        except Exception as error:  # noqa: BLE001  whatever a foreign server made happen
            failures[0] = judge_failure(error)
            grades = dict.fromkeys(self.criteria, torch.nan)
        components = {name: torch.tensor([grade]) for name, grade in grades.items()}
        return RewardScores(torch.stack([*components.values()]).mean(0), failures, components)

    async def answer(self, content: Callable[[], list[dict[str, Any]]]) -> dict[str, float]:
        """Ask about what ``content`` tells and shows, when one of the requests in flight is over.

        Returns
        -------
        dict of str to float
            By criterion, the label as a share of the way from ``lowest`` to ``highest``.

        Raises
        ------
        Exception
            Whatever the server made happen; no proper answer is a ValueError.
        """
        async with self.in_flight:
            return await self._in_time(lambda: self._answer(content))

    async def _in_time(self, work: Callable[[], Awaitable[T]]) -> T:
        """Wait for what a server is asked, for as long as all repeats may take together."""
        limit_s = (self.retries + 1) * self.request_timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await work()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"timed out after {limit_s:g} s") from error

    async def _answer(self, content: Callable[[], list[dict[str, Any]]]) -> dict[str, float]:
        """Ask once about what ``content`` tells and shows."""
        shown = await asyncio.to_thread(content)
        by_logprob = self.method == "logprob"
        ask = {"temperature": 0.0, "logprobs": True, "top_logprobs": TOP_LOGPROBS}
        reply = await self.client.get().chat.completions.create(
            model=self.model,
            messages=[
                {"role": "system", "content": self._instructions()},
                {"role": "user", "content": shown},
            ],
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "grades",
                    "strict": True,
                    "schema": answer_schema(list(self.criteria), self.labels),
                },
            },
            seed=0,
            extra_body=self.extra_body,
            **(ask if by_logprob else {"temperature": self.temperature, "n": self.samples}),
        )
        wanted = 1 if by_logprob else self.samples
        choices = list(reply.choices or ())
        if len(choices) != wanted:
            raise ValueError(
                f"the judge gave {len(choices)} of {wanted} answers: where its server knows no n, "
                "use samples 1"
            )
        read = self._expected if by_logprob else self._written
        answers = [read(choice) for choice in choices]
        span = self.labels[-1] - self.labels[0]
        return {
            name: (sum(answer[name] for answer in answers) / wanted - self.labels[0]) / span
            for name in self.criteria
        }

    def _written(self, choice: Any) -> dict[str, float]:
        return parse_answer(choice.message.content, list(self.criteria), self.labels)

    def _expected(self, choice: Any) -> dict[str, float]:
        if choice.logprobs is None or not choice.logprobs.content:
            raise ValueError("the server gave no token probabilities: use method average")
        tokens = [
            Token(item.token, [(other.token, other.logprob) for other in item.top_logprobs])
            for item in choice.logprobs.content
        ]
        return expected_labels(tokens, list(self.criteria), self.labels)

    def _instructions(self) -> str:
        """The rubric with its places filled in."""
        questions = "\n".join(f"- {name}: {text}" for name, text in self.criteria.items())
        rubric = self.rubric
        for place, filling in (
            ("{lowest}", str(self.labels[0])),
            ("{highest}", str(self.labels[-1])),
            ("{criteria}", questions),
        ):
            rubric = rubric.replace(place, filling)
        return rubric

    def shown(self, sample: RewardBatch) -> list[dict[str, Any]]:
        """The image or the frames of a batch of one, as parts of a message."""
        return [
            {"type": "image_url", "image_url": {"url": data_url(image, self.max_side)}}
            for image in self._pictures(sample)
        ]

    def _pictures(self, sample: RewardBatch) -> list[Image.Image]:
        """The image, or evenly spaced frames with the first and the last."""
        if sample.media_kind == "image":
            return to_pil(sample.media)
        length = sample.media.shape[2]
        count = min(self.frames, length)
        positions = torch.linspace(0, length - 1, count).round().long()
        return to_pil(sample.media[0][:, positions].movedim(1, 0))


def _read_criteria(criteria: object) -> dict[str, str]:
    """Name and question of each criterion."""
    if not isinstance(criteria, Mapping):
        raise UserError(f"criteria are {criteria!r}: give a mapping of names to questions")
    names = [str(name) for name in criteria]
    if not names or not all(re.fullmatch("[a-z_]+", name) for name in names):
        raise UserError(
            f"criteria are called {', '.join(names) or 'nothing'}: name one or more in small "
            f"letters and _"
        )
    return {str(name): str(question) for name, question in criteria.items()}


def _check_whole(least: int, **settings: object) -> None:
    for key, value in settings.items():
        if type(value) is not int or value < least:
            raise UserError(f"{key} is {value!r}: give a whole number of {least} or more")


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def judge_failure(error: Exception) -> str:
    """Why a judge's answer is none, on one line."""
    return one_line(error)[:300]


def data_url(image: Image.Image, max_side: int) -> str:
    """An image as a ``data:`` URL of a JPEG whose longer side is at most ``max_side``."""
    image.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=95)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
