"""`python -m bench NAME [--quick] [--json FILE] …`: every bench ends in one RESULT line."""

from __future__ import annotations

import importlib
import sys

BENCHES = {
    "engine": "prefill and decode of one GGUF against llama.cpp, same threads, same run",
    "kernels": "GB/s and GOPS of every kernel against the machine's measured peaks",
    "cuda": "random cases of every GPU kernel against the CPU, on an emulated GPU or a real one",
    "drafts": "decode with drafts against decode without, on changes of source files",
    "idle": "the share of time in which a modelled GPU waits for its host, by batch",
    "quality": "what rounding activations and KV costs, against what Q4_0 costs",
    "invariance": "sequences compared bit for bit across every way of computing them",
    "canonical": "what the fixed order of float sums costs, against a build without it",
    "store": "what calls on a store of a million pages cost, and how long they hold its lock",
    "tokenizer": "ids of this package's encoders against llama.cpp's, by way of splitting text",
    "router": "microseconds of one routing decision, by number of lanes",
    "promote": "moving a running session between lanes, against prefill and llama.cpp's files",
    "pipeline": "prefill by two daemons of one core, each with some layers, against one core",
    "agents": "a served trace of agents, against llama-server when it is on the PATH",
    "clients": "unmodified agents and client libraries, each with a tool call and a second turn",
    "serve": "1,000 streams beside 10,000 idle connections, on a lane without arithmetic",
    "grammar": "microseconds of a mask, and constrained steps against free ones",
    "hop": "microseconds between two workers, one way, over TCP and TLS",
    "restart": "first token of a long session after a stop or a kill, against prefill",
    "rolling": "linked daemons under load, each drained and started again: sessions lost",
    "attack": "hostile clients against a daemon, while another tenant streams",
    "offload": "sessions of one model with pages at an engine of another, against one without",
    "ring": "decode over two linked engines, against one engine and against sharding",
    "failover": "kills of engines that hold a session's pages: recovery, lost and wrong tokens",
    "crash": "random kills of workers and engines: sent tokens lost, wrong tokens, double owners",
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHES:
        print(__doc__)
        for name, text in BENCHES.items():
            print(f"  {name:<12}{text}")
        return 0 if sys.argv[1:] in ([], ["-h"], ["--help"]) else 2
    module = importlib.import_module(f"bench.{sys.argv[1]}")
    return int(module.main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
