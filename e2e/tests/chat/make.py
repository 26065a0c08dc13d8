"""Renders conversations through Python's jinja2, set up as transformers sets it up, into cases.json.

    pip install jinja2==3.1.6 && python e2e/tests/chat/make.py
"""

import json
from pathlib import Path

from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = Path(__file__).parent
TEMPLATES = {"embedded": HERE / "../../models/canopy-tiny/target/chat_template.jinja", "features": HERE / "features.jinja"}


def environment():
    def raise_exception(message):
        raise TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    return made


WEATHER = {"type": "function", "function": {
    "name": "weather", "description": "Wetter, auch für <morgen> & 'übermorgen' 🦀",
    "parameters": {"type": "object", "properties": {
        "unit": {"enum": ["C", "F"], "default": "C"}, "city": {"type": "string"}, "days": {"type": "integer", "default": 3},
        "exact": {"type": "boolean", "default": False}, "bound": {"type": "number", "default": 1e-7}, "plain": True},
        "required": ["city", "days"]}}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "required": []}}}


def user(content):
    return {"role": "user", "content": content}


def said(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(name, **arguments):
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content):
    return {"role": "tool", "tool_call_id": "c", "content": content}


SYSTEM = {"role": "system", "content": "  Be brief.\n"}
ULM = call("weather", city="Ulm", days=2, exact=True, unit=None, bound=0.5, list=[1, "a"], map={"z": 1, "a": None})
CONVERSATIONS = {
    "one question": ([user(" Reverse a string.\n")], {}),
    "system and turns": ([SYSTEM, user("hi"), said("yes!"), user("[go on]")], {}),
    "thought kept out": ([user("hi"), said("<think>\nhm\n</think>\n\nyes"), user("ok")], {}),
    "thought as a field": ([user("hi"), said("yes", reasoning_content="\nhm\n"), user("ok")], {}),
    "thought of this turn": ([user("hi"), said("<think>\nhm\n</think>\n\nyes")], {}),
    "thinking": ([user("hi")], {"enable_thinking": True}),
    "no thinking": ([user("hi")], {"enable_thinking": False}),
    "parts": ([user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])], {}),
    "tools": ([SYSTEM, user("Ulm?")], {"tools": [WEATHER, NOW]}),
    "tools without a system message": ([user("Ulm?")], {"tools": [NOW]}),
    "a call": ([user("Ulm?"), said("", tool_calls=[ULM]), result("rain")], {"tools": [WEATHER]}),
    "steps": ([SYSTEM, user("old"), said("x", reasoning_content="left out"), user("Ulm?"),
               said("First the time.", reasoning_content="which day?", tool_calls=[call("now"), ULM]), result("12:00"), result("rain"),
               said("", reasoning_content="and tomorrow?", tool_calls=[ULM]), result("sun"),
               said("Rain, then sun.", reasoning_content="done")], {"tools": [WEATHER, NOW]}),
    "a result in the user's turn": ([user("Ulm?"), said("", reasoning_content="kept", tool_calls=[ULM]),
                                     user("<tool_response>\nrain\n</tool_response>")], {}),
    "nobody asked": ([SYSTEM], {}),
    "late system message": ([user("hi"), SYSTEM], {}),
    "unknown role": ([user("hi"), {"role": "robot", "content": "x"}], {}),
    "two turns": ([user("hi"), user("ho")], {}),
    "no list": ([user({"text": "x"})], {}),
}


def main():
    made, cases = environment(), []
    for name, path in TEMPLATES.items():
        template = made.from_string(path.read_text(encoding="utf-8"))
        for title, (messages, variables) in CONVERSATIONS.items():
            for prompted in (True, False):
                case = {"template": name, "case": title, "messages": messages, "variables": variables, "add_generation_prompt": prompted}
                try:
                    case["text"] = template.render(messages=messages, add_generation_prompt=prompted, eos_token="<|im_end|>", **variables)
                except TemplateError as error:
                    case["error"] = str(error)
                except TypeError:
                    continue
                cases.append(case)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (HERE / "cases.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
