"""The real OpenAI client against the real server with the embedded pair.

Starts the binary on a free port, checks completions, chat, streams, the asynchronous client, errors, and that drafted
and undrafted text are equal, then stops the server with SIGTERM and expects exit code 0.

    python openai_client.py --binary PATH/canopy-server
"""

import argparse
import asyncio
import inspect
import re
import signal
import subprocess
import time

import openai

PROMPTS = ["def fibonacci(n):", "import os\nimport sys\n", "class Stack:", 'def is_prime(n):\n    """']
QUESTION = [{"role": "user", "content": "Write a function that reverses a string."}]
MODES = [{"draft": False}] + [{"speculation": {"mode": mode}} for mode in ("ar", "chain", "tree", "auto")]
MODES += [{"speculation": {"mode": "tree", "budget": budget}} for budget in (0, 1, 7, 63)]


def expect(holds, what):
    if not holds:
        raise AssertionError(what)


def equal(got, want, what):
    expect(got == want, f"{what}: expected {want!r}, got {got!r}")


# Parameters of the client that are served; every other one must be refused by its name, whatever its value.
SERVED = {
    "completions": "model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream "
    "stream_options temperature top_p user",
    "chat": "model messages frequency_penalty logit_bias logprobs max_completion_tokens max_tokens metadata n presence_penalty "
    "response_format seed stop stream stream_options temperature tool_choice tools top_logprobs top_p user",
}
ODD = {"best_of": 2, "suffix": "x", "modalities": ["audio"], "store": True, "service_tier": "flex", "parallel_tool_calls": False}
# `auto` drafts by measured times: equal twice in the text, not in the number of drafts.
TREE = {"speculation": {"mode": "tree"}}


def parameters(client, model):
    tool = {"type": "function", "function": {"name": "f"}}
    endpoints = {
        "completions": (client.completions.create, {"prompt": "x"}),
        "chat": (client.chat.completions.create, {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}),
    }
    for name, (create, body) in endpoints.items():
        others = set(inspect.signature(create).parameters) - set(SERVED[name].split())
        others -= {"extra_headers", "extra_query", "extra_body", "timeout"}
        expect(len(others) >= (2 if name == "completions" else 15), f"{name}: parameters that are not served: {others}")
        for parameter in sorted(others):
            try:
                create(model=model, max_tokens=1, **body, **{parameter: ODD.get(parameter, {})})
            except openai.BadRequestError as error:
                equal(error.param, parameter, f"{name}: the parameter that is refused")
            else:
                raise AssertionError(f"{name}: {parameter} is dropped in silence")


def completions(client, model):
    answer = client.completions.create(model=model, prompt=PROMPTS[0], max_tokens=32, extra_body=TREE)
    expect(len(answer.choices) == 1 and answer.choices[0].text, "a completion has text")
    expect(answer.choices[0].finish_reason in ("stop", "length"), answer.choices[0].finish_reason)
    equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens, "usage")
    stream = client.completions.create(
        model=model, prompt=PROMPTS[0], max_tokens=32, stream=True, stream_options={"include_usage": True}, extra_body=TREE
    )
    chunks = list(stream)
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    equal(text, answer.choices[0].text, "streamed text")
    equal(chunks[-1].usage, answer.usage, "streamed usage")
    details = answer.usage.completion_tokens_details
    expect(0 < details.accepted_prediction_tokens < answer.usage.completion_tokens, f"accepted drafts: {details}")
    expect(details.rejected_prediction_tokens > 0 and details.reasoning_tokens == 0, f"rejected drafts: {details}")
    for tokens in (1, 7, 8, 9, 15, 16, 17):
        short = client.completions.create(
            model=model, prompt=PROMPTS[1], max_tokens=tokens, extra_body={"ignore_eos": True}
        )
        equal((short.usage.completion_tokens, short.choices[0].finish_reason), (tokens, "length"), "max_tokens")
    stop = answer.choices[0].text[5:8]
    stopped = client.completions.create(model=model, prompt=PROMPTS[0], max_tokens=32, stop=["never-said", stop])
    equal(stopped.choices[0].text, answer.choices[0].text[: answer.choices[0].text.index(stop)], "text before stop")
    equal(stopped.choices[0].finish_reason, "stop", "finish reason at a stop string")
    several = client.completions.create(model=model, prompt=PROMPTS[0], max_tokens=8, n=2)
    equal([choice.index for choice in several.choices], [0, 1], "choices")
    equal(several.choices[0].text, several.choices[1].text, "greedy choices are alike")
    echoed = client.completions.create(model=model, prompt=PROMPTS[0], max_tokens=8, echo=True)
    equal(echoed.choices[0].text, PROMPTS[0] + several.choices[0].text, "text with the prompt before it")
    told = client.completions.create(model=model, prompt=PROMPTS[0], max_tokens=8, logprobs=3)
    equal(len(told.choices[0].logprobs.tokens), told.usage.completion_tokens, "one log-probability per token")
    expect(all(value <= 0 for value in told.choices[0].logprobs.token_logprobs), "log-probabilities are <= 0")


def chat(client, model):
    answer = client.chat.completions.create(model=model, messages=QUESTION, max_completion_tokens=48)
    equal(answer.choices[0].message.role, "assistant", "role")
    expect(answer.choices[0].message.content, "an answer has text")
    stream = client.chat.completions.create(model=model, messages=QUESTION, max_completion_tokens=48, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    equal(text, answer.choices[0].message.content, "streamed text")
    said = [*QUESTION, answer.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "Again."}]}]
    again = client.chat.completions.create(model=model, messages=said, max_tokens=8)
    expect(again.usage.prompt_tokens > answer.usage.total_tokens, "the conversation is in the prompt")
    told = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=4, logprobs=True, top_logprobs=2)
    content = told.choices[0].logprobs.content
    equal([len(token.top_logprobs) for token in content], [2] * told.usage.completion_tokens, "alternatives")
    expect(content[0].logprob == content[0].top_logprobs[0].logprob, "greedy takes the most likely token")


def drafted_is_undrafted(client, model):
    for sampling in ({}, {"temperature": 0.8, "seed": 7}, {"temperature": 1, "top_p": 0.9, "seed": 8}):
        for prompt in PROMPTS:
            texts = {}
            for mode in MODES:
                answer = client.completions.create(
                    model=model, prompt=prompt, max_tokens=48, extra_body={**mode, "canopy": True}, **sampling
                )
                texts[str(mode)] = answer.choices[0].text
            equal(set(texts.values()), {texts[str(MODES[0])]}, f"{prompt!r} with {sampling}: text of every mode")
    drafted = client.completions.create(
        model=model, prompt=PROMPTS[0], max_tokens=64, extra_body={"speculation": {"mode": "tree"}, "canopy": True}
    )
    statistics = drafted.model_extra["canopy"]
    expect(statistics["acceptance_length"] > 1.5, f"drafting gains tokens: {statistics}")
    expect(statistics["drafted_tokens"] > 0, "some tokens are drafted")


async def asynchronous(url, key, model):
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        async def streamed(prompt):
            stream = await client.completions.create(model=model, prompt=prompt, max_tokens=24, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        together = await asyncio.gather(*(streamed(prompt) for prompt in PROMPTS))
        alone = [await streamed(prompt) for prompt in PROMPTS]
        equal(together, alone, "streams side by side and alone")


def refused(client, model):
    def error_of(kind, **arguments):
        try:
            client.completions.create(**{"model": model, "prompt": "x", "max_tokens": 1, **arguments})
        except kind as error:
            return error
        raise AssertionError(f"{arguments} must raise {kind.__name__}")

    equal(error_of(openai.BadRequestError, max_tokens=-1).param, "max_tokens", "param")
    equal(error_of(openai.BadRequestError, max_tokens=-1, stream=True).param, "max_tokens", "param of a stream")
    equal(error_of(openai.BadRequestError, prompt="").param, "prompt", "param")
    equal(error_of(openai.BadRequestError, prompt="word " * 9000).code, "context_length_exceeded", "code")
    equal(error_of(openai.BadRequestError, n=99).param, "n", "param")
    equal(error_of(openai.NotFoundError, model="gpt-5").code, "model_not_found", "code")


def abandoned(client, model):
    """A reader that leaves in mid-stream frees its slot: four leave, and a fifth is served at once."""
    for _ in range(4):
        stream = client.completions.create(
            model=model, prompt=PROMPTS[2], max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    client.completions.create(model=model, prompt=PROMPTS[2], max_tokens=4)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", required=True, help="the canopy-server to test")
    binary = parser.parse_args().binary
    key = "Key-1"
    command = [binary, "--port", "0", "--api-key", f"other,{key}", "--log", "warn"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline()
        found = re.search(r"http://\S+", line)
        expect(found, f"the server prints its URL, got {line!r}")
        url = found.group() + "/v1"
        client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=300)
        model = client.models.list().data[0].id
        for step in (parameters, completions, chat, drafted_is_undrafted, refused, abandoned):
            started = time.monotonic()
            step(client, model)
            print(f"{step.__name__}: ok, {time.monotonic() - started:.1f} s", flush=True)
        asyncio.run(asynchronous(url, key, model))
        print("asynchronous: ok", flush=True)
        try:
            openai.OpenAI(base_url=url, api_key="key-1", max_retries=0).models.list()
            raise AssertionError("a wrong key must be refused")
        except openai.AuthenticationError:
            print("key: ok", flush=True)
        server.send_signal(signal.SIGTERM)
        equal(server.wait(timeout=300), 0, "exit code after SIGTERM")
        print("drain: ok", flush=True)
    finally:
        if server.poll() is None:
            server.kill()


if __name__ == "__main__":
    main()
