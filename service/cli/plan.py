"""`batchengine plan MODEL`: what fits where and how fast it should be, before anything is loaded.

Reads the header of the model, measures this machine for about a second, and computes the rest.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from service.cli.options import ConfigFile, Debug, Json, model_file, show
from service.cli.tables import table_lines

CONTEXTS = (2048, 8192, 32768, 131072)
MEASURE_S = 0.3
READ_BYTES = 1 << 30  # beyond most caches; a virtual machine may say that it has 320 MiB
ENGINE_BYTES = 512 << 20  # the engine, text processes and workers beside weights and KV
GIB = 1 << 30
# Those of `capacity.GPUS`, which is imported when it is needed.
GpuName = Literal["a100-40", "a100-80", "l4", "l40s", "rtx4090", "h100", "h200", "b200"]


def plan(
    model: Annotated[Path, Parameter(help="The GGUF file, or `pocket`.")],
    /,
    *,
    config: ConfigFile = None,
    gpu: Annotated[
        GpuName | None, Parameter(help="Plan for a GPU too, by its data sheet, not measured.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """What of a model fits this machine, and how fast it should be, before it is loaded."""
    from batchengine import config as configuration
    from batchengine.policy import capacity

    model = model_file(model) or model
    loaded = configuration.load(
        None if config is None else str(config), {"model.path": str(model)}, is_served=False
    )
    configuration.check_model_file(str(model))
    facts, size = read_model(model, loaded.limits.context_tokens)
    packed = packed_file(model, loaded.cache_dir)
    if sys.stderr.isatty():
        print("measuring this machine: a second or two, longer if it is busy", file=sys.stderr)
    machine, here = measure(loaded)
    processors = [here]
    if gpu is not None:
        processors.append(capacity.gpu_processor(gpu))
    disk_bytes = loaded.store.budget_bytes
    plans = [capacity.capacity(size, one, disk_bytes, CONTEXTS) for one in processors]
    answer: dict[str, Any] = {
        "model": {**facts, **packed},
        "machine": machine,
        "lanes": [_as_json(one) for one in plans],
    }
    show(answer, json, lambda: _lines({**facts, **packed}, machine, plans))
    return 0 if plans[0].fits or (gpu is not None and plans[-1].fits) else 1


def packed_file(model: Path, cache_dir: str) -> dict[str, Any]:
    """Where the packed copy of a model is, or will be, and the free bytes of that disk."""
    from batchengine.config import disk_bytes
    from batchengine.weights.cache import cache_path

    path = cache_path(Path(cache_dir), model)
    free, _ = disk_bytes(cache_dir) or (0, 0)
    return {
        "packed_file": str(path),
        "is_packed": path.is_file(),
        "packed_disk_free_bytes": free,
    }


def read_model(path: Path, context_tokens: int) -> tuple[dict[str, Any], Any]:
    """Facts of a model to show, and its `ModelSize`; BatchEngineError as `serve` would raise it."""
    import kernels
    from batchengine.gguf import GgufFile
    from batchengine.policy.capacity import BATCH, Experts, ModelSize, step_bytes
    from batchengine.text.vocab import Tokenizer
    from batchengine.weights import plan_tensors, read_spec
    from kv_store.layout import PAGE_TOKENS

    with GgufFile(path) as gguf:
        spec = read_spec(gguf)
        tensors = plan_tensors(gguf, spec)
        file_bytes = gguf.size_bytes
    Tokenizer(path).close()
    sizes = {m.name: kernels.packed_bytes(m.kind, m.rows, m.cols) for m in tensors.matrices}
    weight_bytes = sum(sizes.values()) + 4 * sum(v.size for v in tensors.vectors)
    parameters = sum(m.rows * m.cols for m in tensors.matrices)
    experts, unused, bank_bytes = None, 0, 0  # unused: parameters of experts that a token leaves
    if spec.experts is not None:
        n_expert, n_used = spec.experts.n_expert, spec.experts.n_used
        ffns = [layer.ffn for layer in tensors.layers if layer.ffn is not None]
        banks = [m for ffn in ffns for m in ffn.banks]
        bank_bytes = sum(sizes[m.name] for m in banks)
        experts = Experts(n_expert, n_used, bank_bytes)
        unused = sum(m.rows * m.cols for m in banks) * (n_expert - n_used) // n_expert
    tables = [m for m in tensors.matrices if m.name in spec.tables]
    read_bytes = weight_bytes - bank_bytes - sum(sizes[m.name] for m in tables)
    products = parameters - unused - sum(m.rows * m.cols for m in tables)
    layout = spec.page_layout
    context = min(context_tokens or spec.context_trained, spec.context_trained)
    size = ModelSize(
        weight_bytes,
        read_bytes,
        products,
        spec.whole_query_dims,
        layout.page_bytes,
        PAGE_TOKENS,
        context,
        experts,
        spec.whole_kv_share,
        spec.state_bytes,
        spec.window_kv_share,
        spec.window_pages,
    )
    facts: dict[str, Any] = {
        "name": spec.name or path.stem,
        "arch": spec.arch,
        "quantisation": spec.quantisation,
        "layers": spec.n_block,
        "parameters": parameters,
        "parameters_used": parameters - unused,  # by one token
        "experts": experts.n_expert if experts else 0,
        "experts_used": experts.n_used if experts else 0,
        "step_bytes": round(step_bytes(size, 1)),  # that a step of one token reads
        "batch": BATCH,
        "batch_step_bytes": round(step_bytes(size, BATCH)),
        "file_bytes": file_bytes,
        "packed_bytes": weight_bytes,
        "kv_bytes_per_token": layout.page_bytes // PAGE_TOKENS,
        "window": spec.window,  # tokens that queries of some layers see; 0: there is none
        "window_kv_share": round(spec.window_kv_share, 3),  # of KV, in these layers
        "state_bytes": spec.state_bytes,  # of recurrent layers, for each session
        "context_trained": spec.context_trained,
        "context_tokens": context,
    }
    return facts, size


def measure(loaded: Any) -> tuple[dict[str, Any], Any]:
    """Facts of this machine, its peaks as measured now, and the `Processor` of its cores."""
    import psutil

    import kernels
    from batchengine.config import disk_bytes
    from batchengine.policy.capacity import cpu_processor

    threads = sum(len(lane.cores) or lane.threads for lane in loaded.lanes)
    read_gbps = kernels.peak_read_gbps(threads, READ_BYTES // threads)
    int8_gops = kernels.peak_int8_gops(threads, MEASURE_S)
    memory = psutil.virtual_memory()
    free, total = disk_bytes(loaded.store.dir) or (0, 0)
    machine: dict[str, Any] = {
        "threads": threads,
        "isa": kernels.isa(),
        "read_gbps": round(read_gbps, 1),
        "int8_gops": round(int8_gops),
        "memory_bytes": int(memory.total),
        "memory_free_bytes": int(memory.available),
        "store": loaded.store.dir,
        "store_budget_bytes": loaded.store.budget_bytes,
        "disk_free_bytes": free,
        "disk_bytes": total,
    }
    usable = max(0, int(memory.total) - ENGINE_BYTES)
    return machine, cpu_processor(f"cpu, {threads} threads", read_gbps, int8_gops, usable)


def _as_json(one: Any) -> dict[str, Any]:
    return {
        "processor": one.processor._asdict(),
        "fits": one.fits,
        "kv_bytes": one.kv_bytes,
        "contexts": [context._asdict() for context in one.contexts],
    }


def _window_lines(facts: dict[str, Any]) -> list[str]:
    if not facts["window"]:
        return []
    return [
        f"window   {facts['window']:,} tokens in layers that have {facts['window_kv_share']:.0%} of"
        " KV: memory need not hold more of it for a session"
    ]


def _state_lines(facts: dict[str, Any]) -> list[str]:
    if not facts["state_bytes"]:
        return []
    mib = facts["state_bytes"] / 2**20
    return [f"state    {mib:.1f} MiB of recurrent layers a session, read and written by each token"]


def _lines(facts: dict[str, Any], machine: dict[str, Any], plans: list[Any]) -> list[str]:
    """The plan as a terminal shows it."""
    lines = [
        f"model    {facts['name']}  {facts['quantisation']}  {facts['layers']} layers"
        f"  {_gib(facts['packed_bytes'])} packed  KV {facts['kv_bytes_per_token'] / 1024:.1f} KiB a"
        f" token  context {facts['context_tokens']:,}",
        *_expert_lines(facts),
        *_window_lines(facts),
        *_state_lines(facts),
        f"machine  {machine['threads']} cores, {machine['isa']}: reads {machine['read_gbps']} GB/s,"
        f" computes {machine['int8_gops']:,} GOPS of int8 (measured now)",
        f"memory   {_gib(machine['memory_bytes'])}, {_gib(machine['memory_free_bytes'])} free",
        f"disk     {_gib(machine['disk_free_bytes'])} free at {machine['store']}; the store takes"
        f" {_gib(machine['store_budget_bytes'])} at most",
        f"packed   {_packed(facts)}",
        f"         {facts['packed_file']}",
    ]
    for one in plans:
        lines += ["", *_lane_lines(facts, one)]
    lines += ["", "Speeds are predictions from the peaks above; `batchengine bench` measures them."]
    return lines


def _expert_lines(facts: dict[str, Any]) -> list[str]:
    """What of a model with experts a token computes with, and a step reads."""
    if not facts["experts"]:
        return []
    used, parameters = facts["parameters_used"] / 1e9, facts["parameters"] / 1e9
    return [
        f"experts  {facts['experts_used']} of {facts['experts']} for a token: {used:.2f} of"
        f" {parameters:.2f} G parameters; a step reads {_gib(facts['step_bytes'])} for one session,"
        f" {_gib(facts['batch_step_bytes'])} for {facts['batch']}"
    ]


def _packed(facts: dict[str, Any]) -> str:
    """The size of the packed copy, beside that of the model file, and whether it is there."""
    size = f"{_gib(facts['packed_bytes'])} beside the model's {_gib(facts['file_bytes'])}"
    if facts["is_packed"]:
        return f"{size}, made already"
    return f"{size}, made at the first start; {_gib(facts['packed_disk_free_bytes'])} free there"


def _lane_lines(facts: dict[str, Any], one: Any) -> list[str]:
    name = one.processor.name
    if not one.fits:
        return [
            f"{name}: does not fit. Weights take {_gib(facts['packed_bytes'])},"
            f" there is room for {_gib(one.processor.memory_bytes)}"
        ]
    rows = [
        {
            "context": f"{context.context_tokens:,}",
            "sessions": f"{context.sessions:,}",
            "on disk": f"{context.sessions_on_disk:,}",
            "prefill": _seconds(context.prefill_ms),
            "ms/token": f"{context.tpot_ms:.1f}",
            "at once": f"{context.batch}:",
            "ms/token each": f"{context.batch_tpot_ms:.1f}",
            "tokens/s": f"{context.batch_tokens_per_s:,.0f}",
        }
        for context in one.contexts
    ]
    return [f"{name}: {_gib(one.kv_bytes)} for KV", *table_lines(rows, "")]


def _gib(n_bytes: float) -> str:
    if n_bytes < GIB:
        return f"{n_bytes / (1 << 20):.0f} MiB"
    return f"{n_bytes / GIB:.1f} GiB"


def _seconds(ms: float) -> str:
    if ms < 1000:
        return f"{ms:.0f} ms"
    return f"{ms / 1000:.1f} s" if ms < 60_000 else f"{ms / 60_000:.1f} min"
