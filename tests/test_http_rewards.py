"""The rewards `remote` and `judge` against servers on loopback that answer, refuse, fail, dawdle and hang up."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from milepost.tasks.judge_reward import judge, read_score
from milepost.tasks.remote_reward import remote
from milepost.tasks.rewards import grade
from milepost.tasks.verdict import Sample, Verdict

Answer = tuple[int, Any] | None
PATIENT = {"deadline_seconds": 30.0, "retries": 2}


class Served:
    """A server that answers each request as `answer` says: a status and JSON, or None for a connection that closes."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.busy = self.most = 0
        self.answer: Callable[[Any], Answer] = lambda body: (200, 1.0)
        served, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    served.asked.append(body)
                    served.headers.append(dict(self.headers))
                    served.busy += 1
                    served.most = max(served.most, served.busy)
                answer = served.answer(body)
                with lock:
                    served.busy -= 1
                if answer is None:
                    return
                text = answer[1] if isinstance(answer[1], bytes) else json.dumps(answer[1]).encode()
                self.send_response(answer[0])
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    thread = threading.Thread(target=found.http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield found
    found.http.shutdown()
    found.http.server_close()
    thread.join()


def samples(count: int = 1) -> list[Sample]:
    return [Sample("q", f"r{at}", at, {"k": 1}) for at in range(count)]


def ask(served: Served, count: int = 1, **options: Any) -> list[Verdict]:
    return asyncio.run(remote(samples(count), url=served.url, **{**PATIENT, **options}))


def test_a_sample_is_asked_about_with_all_that_is_known_of_it(served: Served) -> None:
    (verdict,) = ask(served, api_key="Zq")
    assert verdict == Verdict(1.0)
    assert served.asked == [{"prompt": "q", "response": "r0", "label": 0, "metadata": {"k": 1}}]
    assert served.headers[0]["Authorization"] == "Bearer Zq"


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (0.5, Verdict(0.5)),
        (True, Verdict(1.0)),
        ({"score": 2, "parts": {"a": 1}, "extracted": "x"}, Verdict(2.0, {"a": 1.0}, extracted="x")),
        ({"score": None, "reason": "too long"}, Verdict(None, reason="too long")),
        (None, Verdict(None, reason="the server gave no score")),
        ("1.0", Verdict(None, reason="unparsable: '1.0' is no score")),
        ({"score": 1, "parts": [1]}, Verdict(None, reason="unparsable: \"{'score': 1, 'parts': [1]}\" is no score")),
        (b"<html>", Verdict(None, reason="unparsable: '<html>' is not JSON")),
    ],
)
def test_what_a_server_may_answer(served: Served, answer: Any, verdict: Verdict) -> None:
    served.answer = lambda body: (200, answer)
    assert ask(served) == [verdict]


def test_several_travel_in_one_request_where_that_is_asked_for(served: Served) -> None:
    served.answer = lambda body: (200, {"results": [sample["label"] for sample in body["samples"]]})
    assert [verdict.score for verdict in ask(served, 5, batch_size=2)] == [0, 1, 2, 3, 4]
    assert sorted(len(body["samples"]) for body in served.asked) == [1, 2, 2]  # they come in any order
    served.answer = lambda body: (200, [1.0])
    reasons = [verdict.reason for verdict in ask(served, 2, batch_size=2)]
    assert reasons == ["unparsable: '[1.0]' has not 2 results"] * 2


def test_only_what_may_pass_is_tried_again(served: Served) -> None:
    served.answer = lambda body: (503, "busy") if len(served.asked) < 3 else (200, 1.0)
    assert ask(served)[0].score == 1.0 and len(served.asked) == 3
    served.answer = lambda body: (400, "no such label")
    assert ask(served)[0].reason == 'refused: 400 "no such label"' and len(served.asked) == 4
    served.answer = lambda body: None if len(served.asked) < 6 else (200, 0.0)
    assert ask(served)[0].score == 0.0 and len(served.asked) == 6
    served.answer = lambda body: (500, "broken")
    assert ask(served)[0].reason == 'unreachable: 500 "broken" after 3 attempts' and len(served.asked) == 9


def test_a_server_that_is_not_there_or_not_in_time_costs_a_score(served: Served) -> None:
    served.answer = lambda body: (threading.Event().wait(4.0), (200, 1.0))[1] if body["label"] == 1 else (200, 1.0)
    found = ask(served, 3, deadline_seconds=1.5)
    assert [verdict.score for verdict in found] == [1.0, None, 1.0]
    assert found[1].reason == "timeout"
    nowhere = asyncio.run(remote(samples(), url="http://127.0.0.1:9", retries=0))
    assert nowhere[0].reason.startswith("unreachable: ClientConnectorError")
    assert asyncio.run(remote(samples(), url="nowhere", retries=0))[0].reason.startswith("refused: InvalidUrl")


def test_no_more_requests_are_on_the_way_than_allowed(served: Served) -> None:
    served.answer = lambda body: (threading.Event().wait(0.05), (200, 1.0))[1]
    assert len(ask(served, 12, concurrency=3)) == 12
    assert 1 < served.most <= 3


@pytest.mark.slow
def test_the_grader_of_a_remote_reward_has_the_network(served: Served) -> None:
    assert grade("remote", "r", 1, url=served.url).score == 1.0
    assert grade("tests.rewards_for_tests:connects", "r", 1, url=served.url).reason.startswith("error: ")
    assert grade("tests.rewards_for_tests:connects", "r", 1, url=served.url, network=True).score == 1.0


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("Score: 7", 0.7),
        ("score: 3\nNo, better.\nScore: 8", 0.8),
        ("**Score:** 10", 1.0),
        ("**Score: 10**", 1.0),
        ("The score is 5.", 0.5),
        ("Score = 2.5/10", 0.25),
        ("[[4]]", 0.4),
        ("Score: [[6]]", 0.6),
        ('{"score": 9}', 0.9),
        ("Score: 0", 0.0),
        ("<think>Score: 9</think>Score: 1", 0.1),
        ("score 7", None),
        ("7", None),
        ("Score: 11", None),
        ("Score: -1", None),
        ("Score: high", None),
        ("underscore: 7", None),
        ("", None),
        ("<think>Score: 9</think>I cannot say.", None),
    ],
)
def test_a_judges_score_is_the_last_that_it_gives(said: str, score: float | None) -> None:
    verdict = read_score(said, 0.0, 10.0)
    assert verdict.score == (None if score is None else pytest.approx(score))
    assert verdict.extracted == said
    assert score is not None or verdict.reason.startswith("unparsable: ")


def test_a_judge_is_asked_by_the_rubric_and_in_one_pass(served: Served) -> None:
    served.answer = lambda body: (200, {"choices": [{"message": {"content": "Fine. Score: 5"}}]})
    sample = Sample([{"role": "user", "content": "why {response}"}], "{label}", "because", {})
    options = {"model": "m", "rubric": "{prompt}|{response}|{label}|{highest}", "system": "be fair"}
    (verdict,) = asyncio.run(judge([sample], url=f"{served.url}/", **PATIENT, **options))
    assert (verdict.score, verdict.parts, verdict.extracted) == (0.5, {"raw": 5.0}, "Fine. Score: 5")
    (asked,) = served.asked
    texts = [message["content"] for message in asked["messages"]]
    assert texts == ["be fair", "user: why {response}|{label}|because|10"]
    assert (asked["model"], asked["temperature"]) == ("m", 0.0)


def test_a_judge_that_says_nothing_to_the_point_gives_no_score(served: Served) -> None:
    served.answer = lambda body: (200, {"choices": []})
    (verdict,) = asyncio.run(judge(samples(), url=served.url, model="m", **PATIENT))
    assert verdict == Verdict(None, reason="unparsable: \"{'choices': []}\" is no chat completion")
    with pytest.raises(ValueError, match="highest 0.0 must be above lowest 0.0"):
        asyncio.run(judge(samples(), url=served.url, model="m", highest=0.0))
