#!/usr/bin/env python3
"""What transformers makes of a directory that Plimsoll wrote: does it load, and with which loss.

    parity/run written --data FILE.jsonl DIR...

One JSON line per directory, the keys of `plimsoll eval DIR --data FILE --format tokens --json`.
Exit 1 when a directory does not load or holds tensors too few or too many.
"""

import argparse
import json
import sys

import torch

import reference


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directories", nargs="+", metavar="DIR")
    parser.add_argument("--data", required=True, help="tokens format")
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
