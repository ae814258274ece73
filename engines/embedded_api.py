"""SGLang's native HTTP API over an embedded backend. A client that goes away takes its request with it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from milepost.engines.embedded_backend import EmbeddedBackend
from milepost.engines.embedded_request import (
    CompletionRequest,
    GenerateCall,
    SamplingParams,
    parse_generate,
)
from milepost.engines.embedded_scheduler import EngineFailed
from milepost.engines.embedded_sequence import Sequence
from milepost.engines.embedded_update import add_updates

PAUSE_MODES = ("retract", "in_place", "abort")
HEALTH_SECONDS = 20.0


def build_app(backend: EmbeddedBackend) -> FastAPI:
    """The application over `backend`; the caller owns and closes it."""
    app = FastAPI(title="Milepost embedded rollout engine", docs_url=None, redoc_url=None)
    _add_errors(app)
    _add_generation(app, backend)
    _add_information(app, backend)
    _add_control(app, backend)
    add_updates(app, backend)
    return app


def completion(sequence: Sequence, backend: EmbeddedBackend) -> dict[str, Any]:
    """The state of a sequence as SGLang answers it."""
    request, count = sequence.request, len(sequence.logprobs)
    ids = sequence.output_ids[:count]
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": sequence.finish_reason,
        "prompt_tokens": len(request.input_ids),
        "completion_tokens": count,
        "cached_tokens": sequence.cached_tokens,
        "weight_version": sequence.version_last or backend.label,
        "sampling_seed": request.params.sampling_seed,
    }
    if sequence.version_first != sequence.version_last:
        meta["weight_version_first"] = sequence.version_first
    if request.return_logprob:
        meta["output_token_logprobs"] = [[value, id, None] for value, id in zip(sequence.logprobs, ids, strict=False)]
    return {"text": sequence.text(backend.text.decode), "output_ids": ids, "meta_info": meta}


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ValueError)
    async def refuse(request: Request, error: ValueError) -> JSONResponse:
        return _error(str(error), 400)

    @app.exception_handler(EngineFailed)
    async def fail(request: Request, error: EngineFailed) -> JSONResponse:
        return _error(str(error), 503)


def _add_generation(app: FastAPI, backend: EmbeddedBackend) -> None:
    async def generate(request: Request) -> Response:
        call = parse_generate(await _body(request), backend.limits)
        if failure := backend.scheduler.failure():
            raise EngineFailed(failure)
        if call.stream:
            return StreamingResponse(_events(call, backend), media_type="text/event-stream")
        sequences = await _complete(call.requests, backend, request)
        answers = [completion(sequence, backend) for sequence in sequences]
        return JSONResponse(answers if call.is_batch else answers[0])

    app.add_route("/generate", generate, methods=["POST", "PUT"])  # the hot path does without dependency injection

    @app.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        body = await _body(request)
        if body.get("abort_all"):
            backend.scheduler.abort(lambda sequence: True)
        elif isinstance(rid := body.get("rid"), str) and rid:
            backend.scheduler.abort(lambda sequence: rid in (sequence.request.rid, sequence.request.batch_rid))
        else:
            raise ValueError("give the rid of the request to abort, or abort_all: true")
        return Response()


def _add_information(app: FastAPI, backend: EmbeddedBackend) -> None:
    @app.get("/health")
    async def health() -> Response:
        failure = backend.scheduler.failure()
        return _error(failure, 503) if failure else Response()

    @app.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        """Generates one token; 503 when that takes too long, as it does while generation is paused."""
        probe = CompletionRequest("health", (0,), SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True))
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                (sequence,) = await _complete([probe], backend, request)
        except TimeoutError:
            return _error(f"no token within {HEALTH_SECONDS:g} s", 503)
        reason = sequence.finish_reason or {}
        return Response() if reason["type"] == "length" else _error(reason["message"], 503)

    @app.get("/get_model_info")
    @app.get("/model_info")
    async def get_model_info() -> dict[str, Any]:
        return {
            "model_path": backend.model_dir,
            "tokenizer_path": backend.model_dir,
            "is_generation": True,
            "weight_version": backend.label,
            "vocab_size": backend.limits.vocab_size,
            "context_length": backend.limits.context_length,
        }

    @app.get("/get_load")
    async def get_load() -> list[dict[str, int]]:
        running, waiting = backend.scheduler.load()
        return [{"dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting}]


def _add_control(app: FastAPI, backend: EmbeddedBackend) -> None:
    @app.post("/update_weights_from_disk")
    async def update_weights_from_disk(request: Request) -> JSONResponse:
        body = await _body(request)
        path, label = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not path or not isinstance(label, str | None):
            raise ValueError("give model_path, the folder of the weights, and optionally weight_version, a string")
        try:
            await run_in_threadpool(backend.load_folder, path, label)
        except ValueError as error:
            return JSONResponse({"success": False, "message": str(error), "error": {"message": str(error)}}, 400)
        message = f"weights are now {backend.label}"
        return JSONResponse({"success": True, "message": message, "num_paused_requests": 0})

    @app.post("/pause_generation")
    async def pause_generation(request: Request) -> dict[str, str]:
        mode = (await _body(request)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise ValueError(f"pause mode is {mode!r}, expected one of {list(PAUSE_MODES)}")
        await run_in_threadpool(backend.scheduler.pause, mode)
        return {"status": "ok", "message": f"generation is paused ({mode})"}

    @app.post("/continue_generation")
    async def continue_generation() -> dict[str, str]:
        await run_in_threadpool(backend.scheduler.resume)
        return {"status": "ok", "message": "generation continues"}

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> Response:
        return PlainTextResponse("Cache flushed: no prefix outlives its request here.\n")

    @app.post("/release_memory_occupation")
    async def release_memory_occupation() -> Response:
        await run_in_threadpool(backend.release_memory)
        return Response()

    @app.post("/resume_memory_occupation")
    async def resume_memory_occupation() -> Response:
        await run_in_threadpool(backend.resume_memory)
        return Response()


def _error(message: str, status: int) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status)


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object a request carries; none is an empty one."""
    text = await request.body()
    try:
        body = json.loads(text) if text else {}
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError("the body is not a JSON object")
    return body


async def _complete(requests: list[CompletionRequest], backend: EmbeddedBackend, client: Request) -> list[Sequence]:
    """The finished sequences. When the client goes away or the caller is cancelled, they are aborted first."""
    loop = asyncio.get_running_loop()
    pending = len(requests)
    finished = asyncio.Event()

    def count_down() -> None:
        nonlocal pending
        pending -= 1
        if not pending:
            finished.set()

    def tell(sequence: Sequence) -> None:
        loop.call_soon_threadsafe(count_down)

    sequences = [backend.submit(item, tell) for item in requests]
    tasks = [asyncio.ensure_future(finished.wait()), asyncio.ensure_future(_disconnected(client))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        if pending:
            backend.scheduler.abort(_one_of(sequences))
    await finished.wait()
    return sequences


def _one_of(sequences: list[Sequence]) -> Callable[[Sequence], bool]:
    wanted = set(map(id, sequences))
    return lambda sequence: id(sequence) in wanted


async def _disconnected(client: Request) -> None:
    """Return when the client has gone."""
    while (await client.receive())["type"] != "http.disconnect":
        pass


async def _events(call: GenerateCall, backend: EmbeddedBackend) -> AsyncIterator[str]:
    """Server-sent events with the text so far, one sequence each; closing the stream aborts what still runs."""
    loop = asyncio.get_running_loop()
    changed: asyncio.Queue[Sequence] = asyncio.Queue()

    def tell(sequence: Sequence) -> None:
        loop.call_soon_threadsafe(changed.put_nowait, sequence)

    sequences = [backend.submit(item, tell, tell) for item in call.requests]
    running = set(map(id, sequences))
    try:
        while running:
            sequence = await changed.get()
            answer = completion(sequence, backend)
            if answer["meta_info"]["finish_reason"] is not None:
                if id(sequence) not in running:
                    continue  # it finished while earlier progress was on its way, and has been told
                running.discard(id(sequence))
            else:
                answer["text"] = answer["text"].rstrip("\ufffd")  # a character whose other bytes are still to come
            if call.is_batch:
                answer["index"] = sequences.index(sequence)
            yield f"data: {json.dumps(answer)}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        if running:
            backend.scheduler.abort(_one_of(sequences))
