"""A worker without a model that speaks the protocol of `harness.engines.kvpress.worker`.

Every prompt is cut to the budget in two layers, of which the second keeps one token more. A request whose id says so
makes it die. Its model argument is the folder in which it leaves its process id and command line.
"""

import argparse
import json
import os
import sys
from pathlib import Path

BYTES_PER_TOKEN = 8

parser = argparse.ArgumentParser()
parser.add_argument("model", type=Path)
parser.add_argument("--revision")
parser.add_argument("--dtype")
parser.add_argument("--press", type=json.loads)
parser.add_argument("--budget", type=int)
options = parser.parse_args()

(options.model / "worker.json").write_text(
    json.dumps({"pid": os.getpid(), "options": {**vars(options), "model": None}, "isolated": sys.flags.isolated})
)
if options.press == {"name": "UnknownPress"}:
    print(json.dumps({"error": "policy.name=kvpress:UnknownPress is unknown."}), flush=True)
    sys.exit(2)
print(json.dumps({"versions": {"kvpress": "0.0"}, "bytes_per_token": BYTES_PER_TOKEN}), flush=True)

for line in sys.stdin:
    request = json.loads(line)
    if request["request_id"] == "dies":
        print("\n".join(f"line {number}" for number in range(100)), file=sys.stderr)
        os._exit(7)
    num_tokens = len(request["prompt_token_ids"])
    budget = request.get("budget", options.budget)
    compressed = options.press is not None and num_tokens > budget
    kept = [budget, budget + 1] if compressed else [num_tokens, num_tokens]
    reply = {
        "request_id": request["request_id"],
        "token_ids": [*request["stop_token_ids"], request["min_new_tokens"], request["max_new_tokens"]],
        "finish_reason": "length",
        "ttft_s": 0.25,
        "e2e_s": 0.5,
        "compressed": compressed,
        "kept_tokens": kept,
        "final_tokens": [length + 2 for length in kept],
        "kept_by_head": [[length, length] for length in kept],
        "prompt_peak_tokens": num_tokens + kept[0],
        "press_s": 0.125 * compressed,
    }
    print(json.dumps(reply), flush=True)
