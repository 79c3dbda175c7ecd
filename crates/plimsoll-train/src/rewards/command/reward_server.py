"""Serves a reward function: reads JSON lines with completions from stdin, and writes the reward of each to stdout.

Arguments: "python", a file or a module, and the name of a function in it. Or "reasoning_gym" and the name of a dataset.

Plimsoll runs this file with any Python interpreter, so it imports nothing outside the standard library but the function.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import select
import sys

# Time in seconds to wait for another line, so that a function gets several completions at once.
PAUSE = 0.005
# Most completions of one call. The time limit of a line holds for a call.
ROWS_MAX = 16


def load_function(place, name):
    """Returns the function `name` of a file or a module."""
    if place.endswith(".py"):
        # As if Python ran the file: its folder takes the place of the current one.
        sys.path[0] = os.path.dirname(os.path.abspath(place))
        # Child processes of the function import the module by this name.
        name_of_module = os.path.splitext(os.path.basename(place))[0]
        spec = importlib.util.spec_from_file_location(name_of_module, place)
        module = importlib.util.module_from_spec(spec)
        # Classes that are pickled, and data classes, look for their module here.
        sys.modules.setdefault(spec.name, module)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = module
    for part in name.split("."):
        function = getattr(function, part)
    return function


def call_function(function, rows, loop):
    """Calls a function with lists, as TRL does: prompts, completions, completion_ids, and all other keys of the records."""
    keys = {key for row in rows for key in row} - {"prompt", "completion"}
    lists = {key: [row.get(key) for row in rows] for key in sorted(keys)}
    lists["prompts"] = [row["prompt"] for row in rows]
    lists["completions"] = [as_completion(row) for row in rows]
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        accepted = {parameter.name for parameter in parameters}
        lists = {key: values for key, values in lists.items() if key in accepted}
    rewards = function(**lists)
    return loop.run_until_complete(rewards) if inspect.isawaitable(rewards) else rewards


def as_completion(row):
    """Returns a completion as TRL does: a list of messages after a list of messages, else a text."""
    text = row["completion"]
    return [{"role": "assistant", "content": text}] if isinstance(row["prompt"], list) else text


def load_dataset_scores(name):
    """Returns a function of rows that scores the answers of a dataset of reasoning-gym. Texts without a tag <answer> are whole
    answers."""
    gym = importlib.import_module("reasoning_gym")
    extract = importlib.import_module("reasoning_gym.utils").extract_answer
    score = gym.get_score_answer_fn(name)

    def score_row(row):
        answer = extract(row["completion"])
        return score(answer=row["completion"].strip() if answer is None else answer, entry=row)

    return lambda rows: [score_row(row) for row in rows]


def read_batches(descriptor):
    """Yields lists of rows: those that have come."""
    rest, is_open = b"", True
    while is_open:
        chunk = os.read(descriptor, 1 << 20)
        is_open, rest = bool(chunk), rest + chunk
        if is_open and select.select([descriptor], [], [], PAUSE)[0]:
            continue
        *lines, rest = rest.split(b"\n")
        for first in range(0, len(lines), ROWS_MAX):
            yield [json.loads(line) for line in lines[first : first + ROWS_MAX]]


def as_number(reward):
    """Returns a reward as JSON has it: a number, or None for no opinion."""
    return None if reward is None else float(reward)


def main():
    # Output of the function must not count as a reward, and child processes of it must not read requests.
    requests, replies = os.dup(0), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.environ["PLIMSOLL_REWARD_PROCESS"] = "1"
    kind, *names = sys.argv[1:]
    if kind == "python":
        # Clients that an async function keeps belong to one loop.
        function, loop = load_function(*names), asyncio.new_event_loop()
        score_rows = lambda rows: call_function(function, rows, loop)
    else:
        score_rows = load_dataset_scores(*names)
    for rows in read_batches(requests):
        rewards = list(score_rows(rows))
        if len(rewards) != len(rows):
            raise ValueError(f"the function returned {len(rewards)} rewards for {len(rows)} completions")
        replies.write("".join(json.dumps(as_number(reward)) + "\n" for reward in rewards))
        replies.flush()


# Child processes of a function may import this file's text as their main module.
if __name__ == "__main__":
    main()
