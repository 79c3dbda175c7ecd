"""Writes the example data files into this folder: one or more for each format and container.

Needs the packages pyarrow and zstandard: python examples/data/make.py
"""

import csv
import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import zstandard

FOLDER = Path(__file__).parent

FACTS = [
    ("Which planet is closest to the sun?", "Mercury."),
    ("How many sides does a hexagon have?", "Six."),
    ("What is water made of?", "Hydrogen and oxygen."),
    ("Which ocean is the largest?", "The Pacific."),
    ("How many minutes are two hours?", "120."),
    ("What do bees make?", "Honey."),
    ("Which gas do plants take in?", "Carbon dioxide."),
    ("What is the boiling point of water at sea level?", "100 degrees Celsius."),
]
SUMS = [(a, b) for a in range(3, 60, 7) for b in range(5, 40, 11)]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **keys):
    return {"role": "assistant", "content": text, **keys}


def write_lines(name, records):
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    opened = {".gz": lambda path: gzip.GzipFile(path, "wb", mtime=0), ".zst": lambda path: zstandard.open(path, "wb")}
    path = FOLDER / name
    with opened.get(path.suffix, lambda path: path.open("wb"))(path) as file:
        file.write(text.encode())


def write_list(name, records):
    (FOLDER / name).write_text(json.dumps(records, ensure_ascii=False, indent=1) + "\n")


def write_table(name, records, separator):
    with (FOLDER / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]), delimiter=separator, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def write_parquet(name, records, compression):
    table = pyarrow.Table.from_pylist(records)
    pyarrow.parquet.write_table(table, FOLDER / name, row_group_size=16, compression=compression)


def main():
    sentences = [f"{a} plus {b} is {a + b}." for a, b in SUMS]
    write_lines("text.jsonl", [{"text": text, "source": "sums"} for text in sentences])
    (FOLDER / "text.txt").write_text("\n".join(sentences) + "\n")
    write_table("text.csv", [{"id": index, "text": text} for index, text in enumerate(sentences)], ",")

    # Each digit is the token with its number + 10, and 1 stands for the sign.
    def digits(number):
        return [10 + int(digit) for digit in str(number)]

    tokens = []
    for a, b in SUMS:
        prompt, answer = digits(a) + [1] + digits(b), digits(a + b)
        tokens.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    write_lines("tokens.jsonl", tokens)
    write_parquet("tokens.parquet", tokens, "zstd")

    chats = [
        {
            "messages": [
                {"role": "system", "content": "Answer in one word or number."},
                user(f"What is {a} plus {b}?"),
                assistant(str(a + b)),
                user(FACTS[index % len(FACTS)][0]),
                assistant(FACTS[index % len(FACTS)][1]),
            ]
        }
        for index, (a, b) in enumerate(SUMS)
    ]
    write_lines("messages.jsonl", chats)
    write_parquet("messages.parquet", chats, "snappy")
    add = {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
    calls = []
    for a, b in SUMS[:12]:
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
        calls.append(
            {
                "tools": [add],
                "messages": [
                    user(f"What is {a} plus {b}?"),
                    {"role": "assistant", "reasoning_content": "A sum: I call add.", "content": "", "tool_calls": [call]},
                    {"role": "tool", "name": "add", "content": str(a + b)},
                    assistant(f"It is {a + b}."),
                ],
            }
        )
    write_list("messages-tools.json", calls)

    sharegpt = [
        {"id": f"fact-{index}", "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
        for index, (question, answer) in enumerate(FACTS)
    ]
    write_list("sharegpt.json", sharegpt)

    alpaca = [{"instruction": "Add the numbers.", "input": f"{a} and {b}", "output": str(a + b)} for a, b in SUMS]
    alpaca += [{"instruction": question, "input": "", "output": answer} for question, answer in FACTS]
    write_list("alpaca.json", alpaca)
    write_table("alpaca.tsv", alpaca, "\t")

    pairs = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a, b in SUMS]
    write_table("prompt-completion.csv", pairs, ",")
    write_lines("prompt-completion.jsonl.gz", pairs)
    write_lines("prompt-completion.jsonl.zst", pairs)
    turns = [{"prompt": [user(question)], "completion": [assistant(answer)]} for question, answer in FACTS]
    write_lines("prompt-completion-messages.jsonl", turns)

    wrong = [{"prompt": f"{a} + {b} =", "chosen": f" {a + b}", "rejected": f" {a + b + 1}"} for a, b in SUMS]
    write_lines("preference.jsonl", wrong)


if __name__ == "__main__":
    main()
