"""What of a server is there as long as it runs: preprocessor, manager, who fills the pool, and the check at start."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, TypeAlias

from comb.backbones.loading import load_config, resolve_name
from comb.documents.document import PromptBuilder
from comb.documents.found import MOST, SegmentFinder
from comb.model.config import CombConfig
from comb_serving.api.choice import MethodChoice
from comb_serving.api.conversation import effort_without_thinking, renders_alike
from comb_serving.api.preprocessor import Preprocessor, tokenizer_of
from comb_serving.api.self_check import Audit, check_start
from comb_serving.config.instance import configure
from comb_serving.config.serve_options import ServeOptions, instance_dir, pool_path
from comb_serving.encoding.compiler import EngineCompiler, Loras
from comb_serving.encoding.protocol import EncoderError
from comb_serving.encoding.supervisor import EncoderProcess
from comb_serving.linking.layout import LinkingLayout
from comb_serving.linking.methods import LinkMethod
from comb_serving.manager.manager import PICManager
from comb_serving.manager.sightings import Sightings
from comb_serving.pool.capability import ReportReceiver
from comb_serving.pool.shared_pool import PoolLayout, manifest_of

ServedEncoders: TypeAlias = EncoderProcess | EngineCompiler


@dataclass
class ServerFront:
    """Everything in front of vLLM's engine but the requests themselves."""

    options: ServeOptions
    secret: bytes
    preprocessor: Preprocessor
    encoders: ServedEncoders | None = None  # who fills the pool, where there is one
    reports: ReportReceiver | None = None  # of a plain model's engine, about prompts with documents linked in them
    audit: Audit | None = None  # where requests are to be compared
    weights: str = ""  # the fingerprint of what documents are compiled with, as soon as it is known

    @classmethod
    def start(cls, options: ServeOptions, secret: bytes) -> ServerFront:
        """What the options ask for; shown on /metrics. Raises ValueError if vLLM's worker has made no pool."""
        from prometheus_client import REGISTRY  # comes with vLLM

        from comb_serving.api.metrics import CombCollector

        configure("front")
        encoders: ServedEncoders | None = None
        layout: Any = None
        manager = reports = sightings = None
        if options.has_pool:
            folder = instance_dir()
            try:
                if options.method is None:
                    layout = PoolLayout(**json.loads(manifest_of(pool_path(folder, 0)).read_text()))
                    encoders = EncoderProcess()
                    encoders.start()
                else:
                    layout = LinkingLayout.read(folder)
                    method = LinkMethod.parse(options.method)
                    encoders = EngineCompiler(layout, method, secret, keeps=options.has_tiers)
                    reports = ReportReceiver(folder)
            except FileNotFoundError as error:
                made_of = "an adapter" if options.method is None else "a plain model that vLLM can link documents in"
                reason = f"vLLM has made no pool in {folder}: does {options.checkpoint} hold {made_of}?"
                raise ValueError(reason) from error
            manager = PICManager(
                layout, encoders, wait_seconds=options.wait_seconds, held_share=options.tenant_share,
                pinned_share=options.pinned_share,
            )  # fmt: skip
        builder = PromptBuilder(tokenizer_of(options), chat_template_kwargs=options.chat_template_kwargs)
        if manager is not None and isinstance(encoders, EngineCompiler):
            finder = None
            if options.segments == "auto":
                finder = SegmentFinder(
                    builder.tokenizer, least=options.segment_tokens,
                    most=min(MOST, layout.max_document_tokens - len(layout.front)),
                    patterns=options.segment_patterns, kinds=options.segment_kinds,
                )  # fmt: skip
            if finder is not None or encoders.method.states:  # of a hybrid, beginnings of prompts are noted
                sightings = Sightings(manager, finder, encoders.spare)
        preprocessor = Preprocessor(
            builder, manager, MethodChoice(options), options.max_documents, sightings=sightings,
            disk_path=options.disk_path, share_loras=options.lora_documents == "shared",
            exact_prefix=options.method is None and load_config(resolve_name(options.model), CombConfig).exact_prefix,
        )  # fmt: skip
        audit = Audit(options.audit, preprocessor, secret) if options.audit else None
        REGISTRY.register(CombCollector(preprocessor, encoders, options))
        return cls(options, secret, preprocessor, encoders, reports, audit)

    def attach(self, engine: Any, models: Any) -> None:
        """What vLLM's running server knows: the longest prompt, and LoRAs (`OpenAIServingModels`), which may grow."""
        self.preprocessor.max_tokens = engine.model_config.max_model_len
        if isinstance(self.encoders, EngineCompiler) and models is not None:
            self.preprocessor.loras = self.encoders.loras = Loras(models.lora_requests)

    async def check(self, engine: Any, messages: Any = None) -> None:
        """Waits for encoders, takes back what was registered, and raises unless documents do what they must.

        `messages`: vLLM's `AnthropicServingMessages`.
        """
        if (config := getattr(engine, "model_config", None)) is not None:
            self.preprocessor.chats = renders_alike(config, self.preprocessor.builder.tokenizer)
        if messages is not None:
            self.preprocessor.no_thinking = await effort_without_thinking(messages)
        while self.encoders is not None:
            try:
                self.weights = (await self.encoders.identity()).fingerprint
                break
            except EncoderError:  # said in the log; tried again there
                await asyncio.sleep(1)
        if isinstance(self.encoders, EngineCompiler):
            self.encoders.client = engine  # which also forgets what is on disk
            for lora in self.encoders.loras.known.values():  # what vLLM has loaded is what they hold now
                await asyncio.to_thread(self.encoders.loras.digest, lora)
        await self.preprocessor.registered.restore(self.preprocessor.keys)
        if self.encoders is None:
            return
        await check_start(self.preprocessor, engine, self.secret, self.options.checkpoint, self.reports)

    def fault(self) -> str | None:
        """Why documents can't be had, and won't be soon."""
        return self.encoders.fault() if self.encoders is not None and self.preprocessor.linking else None

    async def stop(self) -> None:
        """Ends encoder processes, and what is under way."""
        self.preprocessor.registered.stop()
        if self.preprocessor.sightings is not None:
            self.preprocessor.sightings.stop()
        if self.encoders is not None:
            await self.encoders.stop()
        if self.reports is not None:
            self.reports.close()
        if self.audit is not None:
            self.audit.stop()
