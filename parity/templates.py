#!/usr/bin/env python3
"""Compares chat templates with transformers: rendered text byte for byte, tokens and labels.

    parity/run templates [--command C]

Each template of fixtures/chat, and each built-in one, renders each conversation of `conversations()` with and without a
generation prompt. The labels have a reference of their own here: it renders beginnings of a conversation with
transformers, marks characters, and asks the tokenizer for the places of its tokens.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

import tokenizers
import transformers.utils.chat_template_utils as chat_template_utils
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FIXTURES = HERE / "fixtures" / "chat"
BUILT_IN = ROOT / "crates/plimsoll-train/src/data/template/builtin"
#: The moment of `strftime_now`: 2026-03-05 14:07:09 UTC.
NOW = 1772719629
SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|end|>", "<|eot|>",
    "<|user|>", "<|assistant|>", "<|system|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<｜User｜>", "<｜Assistant｜>",
]
IGNORED = -100


class FixedClock(datetime):
    """A clock that stands still, for `strftime_now` of transformers."""

    @classmethod
    def now(cls, tz=None):
        return datetime.fromtimestamp(NOW, timezone.utc).replace(tzinfo=None)


def write_tokenizer(folder):
    """Writes a tokenizer of bytes with special tokens, and a few merges so that tokens have several letters."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("e", "r"), ("Ġ", "t"), ("i", "n"), ("Ċ", "Ċ"), ("a", "n"), ("Ġt", "h"), ("l", "l"), ("o", "u")]
    vocabulary = alphabet + [left + right for left, right in merges]
    model = tokenizers.models.BPE({token: at for at, token in enumerate(vocabulary)}, merges)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return PreTrainedTokenizerFast.from_pretrained(folder)


def tool(name, parameters=None, description="A tool."):
    function = {"name": name, "description": description}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


TOOLS = [
    tool("weather", {"type": "object", "properties": {
        "city": {"type": "string", "description": "Größe & \"name\""}, "days": {"type": "integer"},
        "units": {"type": "string", "enum": ["c", "f"]}}, "required": ["city"]}),
    tool("search", {"type": "object", "properties": {
        "items": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "options": {"type": "object", "properties": {"deep": {"type": ["string", "null"]}, "either": {"oneOf": [
            {"type": "string", "description": "a text"}, {"type": "integer"}]}}}, "any": {}}, "required": []}, "Search <all> & more."),
    tool("now"),
]


def call(name, arguments, index=0):
    return {"id": f"call{index:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def user(content, **more):
    return {"role": "user", "content": content, **more}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def system(content):
    return {"role": "system", "content": content}


def conversations():
    """Returns named requests: messages, and perhaps tools, variables and settings."""
    plain = [user("Hello."), assistant("Hi there, how can I help you?")]
    second = [user("And then?"), assistant("Then nothing.")]
    thought = assistant("<think>\nLet me see.\n</think>\n\nFour.")
    weather = [user("Weather in Köln?"), assistant(None, tool_calls=[call("weather", {"city": "Köln", "days": 2})])]
    answer = {"role": "tool", "name": "weather", "content": "{\"t\": 21.5}", "tool_call_id": "call00000"}
    two_calls = assistant("", tool_calls=[call("weather", {"city": "a"}), call("search", {"q": [1, 2.5, None, True]}, 1)])
    yield "one turn", {"messages": plain}
    yield "two turns", {"messages": plain + second}
    yield "four turns", {"messages": (plain + second) * 2}
    yield "system", {"messages": [system("Be brief.")] + plain}
    yield "system, two turns", {"messages": [system("Be brief.\n")] + plain + second}
    yield "two systems", {"messages": [system("One."), system("Two.")] + plain}
    yield "late system", {"messages": plain + [system("Now in French.")] + second}
    yield "user alone", {"messages": [user("Hello?")]}
    yield "system alone", {"messages": [system("Only rules.")]}
    yield "assistant first", {"messages": [assistant("Welcome!"), user("Thanks."), assistant("Sure.")]}
    yield "empty answer", {"messages": [user("Say nothing."), assistant("")]}
    yield "empty question", {"messages": [user(""), assistant("Pardon?")]}
    yield "blank contents", {"messages": [user("  \n "), assistant(" \n\n ")]}
    yield "null content", {"messages": [user("Hm."), assistant(None)]}
    yield "white space around", {"messages": [user("  Hello \n"), assistant("\n\n  Hi.  \n\n")]}
    yield "unicode", {"messages": [user("Grüße 日本語 😀 e\u0301 \u200b\u00a0"), assistant("שלום — “ok” \U0001f469\u200d\U0001f4bb ß")]}
    yield "escapes", {"messages": [user("\"quotes\" 'single' \\ back\\n {{ x }} {% if %} <b>&amp;</b>\t\x07"), assistant("`code`\n```py\nx = {'a': 1}\n```")]}
    yield "markers in content", {"messages": [user("What is <|im_end|>?"), assistant("It ends a turn.")]}
    yield "line ends", {"messages": [user("a\r\nb\rc\u2028d\x0be"), assistant("x\n\ny\n")]}
    yield "thinking", {"messages": [user("2+2?"), thought]}
    yield "thinking, two turns", {"messages": [user("2+2?"), thought, user("3+3?"), thought]}
    yield "reasoning key", {"messages": [user("2+2?"), assistant("Four.", reasoning_content="Easy.")]}
    yield "thinking key", {"messages": [user("2+2?"), assistant("Four.", thinking="Easy."), *second]}
    yield "thinking off", {"messages": plain, "variables": {"enable_thinking": False}}
    yield "tools", {"messages": plain, "tools": TOOLS}
    yield "tools, system", {"messages": [system("Use tools.")] + plain, "tools": TOOLS[:1]}
    yield "tool call", {"messages": weather + [answer, assistant("21.5 degrees.")], "tools": TOOLS}
    yield "tool call, no tools", {"messages": weather + [answer, assistant("21.5 degrees.")]}
    yield "tool call at the end", {"messages": weather, "tools": TOOLS}
    yield "two tool calls", {"messages": [user("Both."), two_calls, answer, {**answer, "content": "two"}, assistant("Done.")], "tools": TOOLS}
    yield "arguments as text", {"messages": [user("Go."), assistant("Well", tool_calls=[call("now", "{\"a\": 1}")]), answer, assistant("ok")], "tools": TOOLS}
    yield "content parts", {"messages": [user([{"type": "text", "text": "Look:"}, {"type": "image", "url": "x"}]), assistant([{"type": "text", "text": "A cat."}])]}
    yield "developer", {"messages": [{"role": "developer", "content": "Rules."}] + plain}
    yield "names", {"messages": [user("I am Ann.", name="Ann"), assistant("Hi Ann.", name="bot", extra={"a": [1.0, None]})]}
    yield "unknown role", {"messages": [user("a"), {"role": "critic", "content": "b"}, assistant("c")]}
    yield "documents", {"messages": plain, "variables": {"documents": [{"title": "T one", "text": "x"}, {"title": "T two", "n": 3}]}}
    yield "date given", {"messages": plain, "variables": {"date_string": "1 Jan 2000", "bos_token": "<B>"}}
    yield "long", {"messages": (plain + second) * 20}
    yield "long content", {"messages": [user("word " * 3000), assistant("answer " * 3000)]}
    yield "same roles", {"messages": [user("a"), user("b"), assistant("c"), assistant("d")]}
    yield "last turn", {"messages": plain + second, "train_on": "last"}
    yield "completion", {"messages": plain + second + weather + [answer, assistant("So.")], "train_on": "completion"}
    yield "all", {"messages": plain + second, "train_on": "all"}
    yield "ends: last", {"messages": plain + second, "train_on_end": "last"}
    yield "ends: none", {"messages": plain + second, "train_on_end": "none"}
    yield "message switched off", {"messages": [user("a"), assistant("b", train=False), *second]}
    yield "message switched on", {"messages": [user("a", train=True), assistant("b"), *second], "train_on": "last"}


class Reference:
    """Renders one template with transformers, and labels its turns."""

    def __init__(self, tokenizer, template, request):
        self.tokenizer, self.template, self.request = tokenizer, template, request
        self.messages = [{key: value for key, value in m.items() if key != "train"} for m in request["messages"]]
        self.train = [m.get("train") for m in request["messages"]]
        self.special = set(SPECIAL)

    def render(self, count, prompt):
        variables = dict(self.request.get("variables", {}))
        documents = variables.pop("documents", None)
        return self.tokenizer.apply_chat_template(
            self.messages[:count], tools=self.request.get("tools"), documents=documents, chat_template=self.template,
            add_generation_prompt=prompt, tokenize=False, **variables)

    def trained(self):
        roles = [m["role"] for m in self.messages]
        assistants = [at for at, role in enumerate(roles) if role == "assistant"]
        users = [at for at, role in enumerate(roles) if role == "user"]
        chosen = {
            "assistant": assistants, "last": assistants[-1:], "all": range(len(roles)),
            "completion": [at for at in assistants if not users or at > users[-1]],
        }[self.request.get("train_on", "assistant")]
        return [at for at in range(len(roles)) if (self.train[at] if self.train[at] is not None else at in chosen)]

    def documents(self):
        """Returns the ids and labels of the documents, or None if this reference does not tell (see `turn`)."""
        whole = self.render(len(self.messages), False)
        if self.request.get("train_on") == "all":
            return [self.label(whole, [(0, len(whole), None)])]
        turns = [self.turn(at, whole) for at in self.trained()]
        if None in turns:
            return None
        if "apart" in turns:
            if "generation" in self.template:
                return None
            documents = []
            for at in self.trained():
                text = self.render(at + 1, False)
                turn = self.turn(at, text)
                if turn in (None, "apart"):
                    return None
                documents.append(self.label(text, [turn]))
            return documents
        return [self.label(whole, turns)]

    def turn(self, at, text):
        """Returns start, end and number of a turn in a text; "apart" if it is written differently there.

        None stands for a first message that the template cannot begin with: its start is a guess of Plimsoll's.
        """
        if at == 0:
            return None
        prompt = self.messages[at]["role"] == "assistant"
        try:
            before, after = self.render(at, prompt), self.render(at + 1, False)
        except Exception:
            return None
        if not after.startswith(before):
            return "apart"
        if text.startswith(after):
            return len(before), len(after), at
        cut = after.removesuffix("</s>")
        return (len(before), len(cut), at) if text.startswith(cut) and len(cut) >= len(before) else "apart"

    def label(self, text, turns):
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = encoding["input_ids"], encoding["offset_mapping"]
        tokens = self.tokenizer.convert_ids_to_tokens(ids)
        labels = [IGNORED] * len(ids)
        roles = [m["role"] for m in self.messages]
        last = max((at for at, role in enumerate(roles) if role == "assistant"), default=None)
        ends = self.request.get("train_on_end", "turn")
        for start, end, at in turns:
            inside = [i for i, (a, b) in enumerate(places) if a >= start and b <= end]
            if at is None or roles[at] != "assistant":
                keep = inside
            else:
                keep = self.without_end(inside, tokens, [text[a:b] for a, b in places], ends == "turn" or (ends == "last" and at == last))
            for i in keep:
                labels[i] = ids[i]
        return {"ids": ids, "labels": labels}

    def without_end(self, inside, tokens, pieces, train_end):
        """Removes white space after the end token of a turn, and the end token unless it is trained."""
        kinds = "".join("S" if tokens[i] in self.special else "b" if not pieces[i].strip() else "c" for i in inside)
        found = re.search(r"(?:Sb+)*Sb*$", kinds)
        if not found or "S" not in found.group():
            return inside
        tail = inside[found.start():]
        return inside[:found.start()] + [i for i in tail if train_end and tokens[i] in self.special]


def expected(reference):
    try:
        text = reference.render(len(reference.messages), False)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    try:
        prompt = reference.render(len(reference.messages), True)
    except Exception:
        prompt = None
    return {"text": text, "prompt": prompt, "documents": reference.documents()}


def difference(ours, theirs):
    """Returns a description of the first difference, and None if there is none."""
    if "error" in theirs:
        return None if "error" in ours else f"transformers refuses: {theirs['error']}"
    if "error" in ours:
        return f"refused: {ours['error']}"
    for name in ("text", "prompt"):
        if ours[name] != theirs[name]:
            left, right = ours[name] or "", theirs[name] or ""
            at = next((i for i, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))
            return f"{name} at {at}: {left[max(0, at - 30):at + 40]!r}, expected {right[max(0, at - 30):at + 40]!r}"
    if theirs["documents"] is not None and ours["documents"] is None:
        return f"labels refused: {ours['refused']}"
    if theirs["documents"] is not None and ours["documents"] != theirs["documents"]:
        if len(ours["documents"]) != len(theirs["documents"]):
            return f"{len(ours['documents'])} documents, expected {len(theirs['documents'])}"
        for mine, other in zip(ours["documents"], theirs["documents"]):
            if mine["ids"] != other["ids"]:
                return "other tokens"
            if mine["labels"] != other["labels"]:
                at = [i for i, (a, b) in enumerate(zip(mine["labels"], other["labels"])) if a != b]
                return f"labels of {len(at)} tokens differ, first at {at[0]} of {len(mine['ids'])}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    default = str(Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release/xtask") + " render-chat"
    parser.add_argument("--command", default=default, help="the command that answers JSON lines")
    parser.add_argument("--templates", type=Path, help="a folder with further templates")
    parser.add_argument("--list", action="store_true", help="print every difference")
    arguments = parser.parse_args()
    chat_template_utils.datetime = FixedClock
    passed = failed = labelled = refused = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer = write_tokenizer(folder)
        templates = sorted(FIXTURES.glob("*.jinja")) + sorted(BUILT_IN.glob("*.jinja"))
        if arguments.templates:
            templates += sorted(arguments.templates.glob("*.jinja"))
        cases = [(path, name, request) for path in templates for name, request in conversations()]
        lines = [json.dumps({"model": str(folder), "template": str(path), "now": NOW, **request}) for path, _, request in cases]
        command = shlex.split(arguments.command)
        answers = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
        for (path, name, request), line in zip(cases, answers.stdout.rstrip("\n").split("\n"), strict=True):
            theirs = expected(Reference(tokenizer, path.read_text(), request))
            ours = json.loads(line)
            problem = difference(ours, theirs)
            labelled += bool(theirs.get("documents"))
            refused += "error" in theirs
            passed, failed = passed + (problem is None), failed + (problem is not None)
            if problem and (arguments.list or failed <= 20):
                print(f"FAIL {path.stem}, {name}: {problem}")
    print(f"templates: {len(templates)}, conversations: {len(cases) // len(templates)}, with labels: {labelled}, refused by both: {refused}")
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
