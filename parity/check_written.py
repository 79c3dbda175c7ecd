#!/usr/bin/env python3
"""Loads directories written by Plimsoll in transformers and evaluates them.

    parity/run written --data FILE.jsonl DIR...

Prints one JSON line per directory with the keys of `plimsoll eval DIR --data FILE --format tokens --json`. Exit code 1 if a
directory does not load, or if tensors are missing or superfluous.
"""

import argparse
import json
import sys

import torch

import reference


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directories", nargs="+", metavar="DIR")
    parser.add_argument("--data", required=True, help="samples in the tokens format")
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    arguments = parser.parse_args()
    samples = reference.read_samples(arguments.data)
    failed = False
    for directory in arguments.directories:
        try:
            model = reference.load(directory, getattr(torch, arguments.dtype))
            print(json.dumps(reference.evaluate(model, samples)))
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            failed = True
            print(f"{directory}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
