"""Methods that are a front and a rule which belong together, under a name of their own."""

from __future__ import annotations

from comb.methods.legolink import legolink
from comb.methods.linked import Linked
from comb.methods.registry import register
from comb.methods.selection import NOTHING, Rule


@register("naive")
class Naive(Linked):
    """Documents as they were compiled, one behind the other; only what isn't a document is computed.

    Documents know nothing of each other, and each of them starts with tokens that took themselves for the start of
    the prompt (attention sinks). Exact for one document with nothing in front; ``rotate=false`` is the weakest baseline
    of the papers. On a backbone that was fine-tuned to read documents under a block-diagonal mask it is that model's
    own attention, and nothing is lost (Block-Attention, Ma et al. 2024).

    Source: EPIC sec. 2.3 ("Naive").
    """

    rule = NOTHING
    on_hybrids = "hypic"


@register("legolink-0")
class LegoLinkZero(Naive):
    """`naive` behind four BOS tokens, which take the attention sink away.

    Source: EPIC (ICML 2025) sec. 5.4. Unlike there, a prompt that begins with a document has its first token computed:
    it would have no sink at all.
    """

    default_front = "dummies:4"


@register("primed")
class Primed(Linked):
    """`naive`, or with `k` `legolink`, behind a passage of prose.

    Source: this project's; LegoLink-0 (EPIC sec. 5.4) compiles behind BOS tokens, FusionRAG (arXiv 2601.12904) behind
    similar documents.
    """

    rule = Rule.of(legolink, k=0)
    default_front = "prose"
    on_hybrids = "hypic"


@register("linktokens")
class LinkTokens(Naive):
    """`naive` behind what the model's adapter has learned (`comb.linktokens`).

    Source: KVLink (arXiv:2502.16002), whose link tokens are computed at link time, and KV Packet (arXiv:2604.13226),
    whose trained wrappers are not; the keys and values as parameters are prefix tuning's (Li and Liang 2021).
    """

    default_front = "adapter"
