"""The worker with a pool of documents: vLLM's own for the platform, which makes the pool when it has the model."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.kv_transfer import get_kv_transfer_group

from comb.backbones.identity import weights_fingerprint
from comb.linktokens.front import published_front
from comb_serving.config.serve_options import ServeOptions, instance_dir
from comb_serving.encoding.kept import KeptDocuments, kept_store
from comb_serving.linking.layout import LinkingLayout
from comb_serving.pool.capability import PoolHandle
from comb_serving.vllm.fixed_weights import FixedWeights
from comb_serving.vllm.gpu_worker import without_full_v1, without_full_v2
from comb_serving.vllm.linking.connector import LinkingConnector
from comb_serving.vllm.linking.document_pool import DocumentPool
from comb_serving.vllm.linking.setup import check_backbone, check_engine, front_of, link_tokens_of
from comb_serving.vllm.versions import untested


class PoolWorker(FixedWeights):
    """The part that doesn't depend on the platform; comes first among the bases."""

    model_runner: Any
    vllm_config: Any
    comb_pool: DocumentPool
    comb_looks = False  # whether a question's look is in the step

    def load_model(self, **options: Any) -> None:
        """Loads the model, then makes this rank's pool, so that memory profiling sees it."""
        config = self.vllm_config
        # the interfaces of a scheduler nobody has tried may change with every version
        if said := untested(vllm.__version__):
            raise ImportError(f"linking without training {said}: install that")
        check_engine(config)
        super().load_model(**options)
        model = self.model_runner.get_model()
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        asked, folder = ServeOptions.from_environment(), instance_dir()
        link_tokens, front = link_tokens_of(config), front_of(config)
        self.comb_pool = pool = DocumentPool(
            model,
            config,
            total_bytes=asked.pool_bytes,
            ranks=ranks,
            block_size=asked.pool_block,
            front_tokens=0 if link_tokens is None else len(front),
        )
        if link_tokens is not None:
            learned, adapter = published_front(link_tokens)
            check_backbone(model, adapter)
            pool.put_front(learned, rank, ranks)
        longest = config.model_config.max_model_len
        store = kept_store(
            host_bytes=asked.host_bytes // ranks,
            disk_path=asked.disk_path,
            disk_bytes=asked.disk_bytes,
            largest_bytes=pool.bytes_per_token * (longest + pool.state_rows),
            part=f"rank-{rank}",
            parts=ranks,
        )
        pool.kept = None if store is None else KeptDocuments(store)
        if rank == 0:
            LinkingLayout(
                num_blocks=pool.num_blocks,
                block_size=pool.block_size,
                bytes_per_token=pool.bytes_per_token,
                fingerprint=weights_fingerprint(model, settings=False) + pool.positions.digest() + pool.front_digest(),
                dtype=pool.dtype_name,
                max_document_tokens=longest - 1,  # one token has to be sampled, if nobody sees it
                vocab_size=config.model_config.get_vocab_size(),
                front=tuple(front),
                given=link_tokens is not None,
                state_rows=pool.state_rows,
                columns=0 if pool.states is None else pool.states.columns,
            ).write(folder)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """vLLM's cache is made: from now on there is something to copy from and to."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        connector = get_kv_transfer_group()
        assert isinstance(connector, LinkingConnector)
        self.comb_pool.attach(kv_cache_config.kv_cache_groups)
        connector.pool = self.comb_pool

    def execute_model(self, scheduler_output: Any) -> Any:
        """A step of vLLM's; what questions look at can't be heard in one that is replayed as one graph."""
        self.comb_looks = bool(getattr(scheduler_output.kv_connector_metadata, "looks", ()))
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM's, which makes its graphs here."""
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        if self.comb_pool.looks is None:
            return times
        if (manager := getattr(self.model_runner, "cudagraph_manager", None)) is not None:
            without_full_v2(manager, lambda: self.comb_looks)
        elif (dispatcher := getattr(self.model_runner, "cudagraph_dispatcher", None)) is not None:
            without_full_v1(dispatcher, lambda: self.comb_looks)
        return times

    def comb_fetch(self, key: str, tokens: int, blocks: list[int]) -> str | None:
        """Asked by the front: the tier from which a document has come into the pool; None if it must be compiled."""
        return self.comb_pool.fetch(key, PoolHandle(tokens, tuple(blocks)))

    def comb_kept(self) -> dict[str, int]:
        """Asked by the front: bytes of documents that have left the pool, by tier."""
        return {} if self.comb_pool.kept is None else self.comb_pool.kept.nbytes()

    def comb_forget(self, key: str) -> None:
        """Asked by the front: a document is deleted from where it is kept."""
        if self.comb_pool.kept is not None:
            self.comb_pool.kept.forget(key)

    def shutdown(self) -> None:
        """Documents on their way to the disk get there."""
        if (pool := getattr(self, "comb_pool", None)) is not None:
            pool.close()
        super().shutdown()  # type: ignore[misc]


def __getattr__(name: str) -> Any:
    """``LinkingWorker``: for the platform that vLLM runs on, which isn't asked before the worker is made."""
    if name != "LinkingWorker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from comb_serving.vllm.cpu_worker import SeededCPUWorker

        base: Any = SeededCPUWorker
    else:
        from vllm.v1.worker.gpu_worker import Worker

        base = Worker
    made = type(name, (PoolWorker, base), {"__module__": __name__})
    globals()[name] = made
    return made
