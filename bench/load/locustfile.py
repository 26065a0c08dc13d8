"""The same server under a public load generator: locust (PyPI).

    locust -f bench/load/locustfile.py --headless -u 64 -r 64 -t 60s --host http://127.0.0.1:8080 --csv canopy-load
"""

import itertools
import json
import time

from locust import HttpUser, task

from load import cases

NEXT = itertools.cycle(cases())


class Reader(HttpUser):
    """Streams completions and reports time to first token and between chunks as entries of their own."""

    @task
    def completion(self):
        body = {**next(NEXT), "stream": True}
        started = last = time.perf_counter()
        first = True
        with self.client.post("/v1/completions", json=body, stream=True, name="completion", catch_response=True) as answer:
            if answer.status_code != 200:
                answer.failure(str(answer.status_code))
                return
            done = False
            for line in answer.iter_lines():
                if line == b"data: [DONE]":
                    done = True
                elif line.startswith(b"data: ") and json.loads(line[6:])["choices"][0]["text"]:
                    now = time.perf_counter()
                    name = "first token" if first else "between chunks"
                    gap = 1e3 * (now - (started if first else last))
                    self.environment.events.request.fire(request_type="SSE", name=name, response_time=gap, response_length=0, exception=None)
                    first, last = False, now
            if done:
                answer.success()
            else:
                answer.failure("a stream ended without [DONE]")
