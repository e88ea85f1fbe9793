"""Tables of docs/evaluation.md about answers."""

from __future__ import annotations

from collections.abc import Sequence

from tests.loadtest.published.cells import Cell, beyond, detail, joined, marked, mean, plain
from tests.loadtest.published.tables import Column, Row, Table

IDENTITY = Table(
    name="identity",
    source="quality",
    labels=["policy"],
    columns=[
        Column("generations", detail("details", "{}", "generations")),
        Column(
            "identical, tokens and logprobs of the five likeliest, to the last bit",
            marked(detail("details", "{}", "identical")),
        ),
        Column("tokens", detail("details", "{}", "tokens")),
        Column("evicted per answer", plain("evicted_tokens")),
        Column("blocks freed early, naive", detail("details", "{}", "freed_blocks_naive")),
        Column("lazy", detail("details", "{}", "freed_blocks_lazy")),
    ],
    rows=[Row([f"`{policy}`"], f"identity/{policy}") for policy in ("random", "h2o")],
)

POLICIES = ("h2o", "snapkv", "scissorhands", "random", "streaming_llm", "paged_eviction")

DAMAGE = Table(
    name="damage",
    source="quality_damage",
    labels=["keep ratio", "policy"],
    columns=[
        Column("KL", mean("kl_top20", 3)),
        Column("same first choice", plain("top1_same", 2)),
        Column("text", mean("nll_above_full", 3)),
        Column("copy", mean("copy_nll_above_full", 2)),
        Column("lookup", mean("lookup_nll_above_full", 2)),
        Column("hidden fact", mean("needle_nll_above_full", 2)),
    ],
    rows=[
        Row([keep, f"`{policy}`"], f"{policy}@{keep}")
        for keep in ("0.9", "0.5")
        for policy in POLICIES
    ],
)


def _at_both(metric: str, digits: int = 2) -> Cell:
    """At 0.9 and at 0.5; the key is the policy."""
    return joined(" / ", plain(metric, digits, "{}@0.9"), plain(metric, digits, "{}@0.5"))


_SHARES = {
    "copied right": ("copy_match", 2),
    "lookup right": ("lookup_match", 2),
    "fact right": ("needle_match", 2),
    "ROUGE-L": ("rouge_l", 2),
    "length ratio": ("length_ratio", 2),
    "same until": ("same_until", 2),
    "perplexity": ("perplexity", 1),
}

DAMAGE_SHARES = Table(
    name="damage, shares",
    source="quality_damage",
    labels=["policy"],
    columns=[
        *(Column(head, _at_both(*metric)) for head, metric in _SHARES.items()),
        Column("exact match at 0.9", plain("exact_match", 2, "{}@0.9")),
    ],
    rows=[
        Row(
            ["full attention, asked again"],
            "full@1",
            cells=[*(plain(*metric) for metric in _SHARES.values()), plain("exact_match")],
        ),
        *(Row([f"`{policy}`"], policy) for policy in POLICIES),
    ],
)


STOCK = (("stock vLLM", "stock@1"), ("stock vLLM, fp8 cache", "stock, fp8@1"))


def damage_of_text(
    name: str, source: str, rows: Sequence[tuple[str, str]], beside: str = "streaming_llm@0.5"
) -> Table:
    """What is lost of running text alone, and how far from one arm in the same cases.

    Args:
        name: of the table.
        source: name of the JSON.
        rows: label and arm of each.
        beside: the arm that the others are compared with.
    """
    against = f"against `{beside.partition('@')[0]}`"
    return Table(
        name=name,
        source=source,
        labels=[""],
        columns=[
            Column("KL", mean("kl_top20", 3)),
            Column(against, beyond("kl_top20", beside)),
            Column("text", mean("nll_above_full", 3)),
            Column(against, beyond("nll_above_full", beside)),
            Column("same first choice", plain("top1_same", 2)),
            Column("perplexity", plain("perplexity", 1)),
        ],
        rows=[Row([label], arm) for label, arm in rows],
    )


DAMAGE_OF_TEXT = damage_of_text(
    "damage to text",
    "quality_text",
    [*STOCK, *((f"`{policy}`, half kept", f"{policy}@0.5") for policy in POLICIES)],
)

DAMAGE_OF_FP8 = Table(
    name="damage, fp8",
    source="quality_fp8",
    labels=[""],
    columns=[
        *(
            Column(head, mean(f"{task}_nll_above_full", 3))
            for head, task in (("copy", "copy"), ("lookup", "lookup"), ("hidden fact", "needle"))
        ),
        *(Column(head, plain(*_SHARES[head])) for head in list(_SHARES)[:-1]),
    ],
    rows=[
        Row([label], arm)
        for label, arm in (*STOCK, ("`streaming_llm`, half kept", "streaming_llm@0.5"))
    ],
)

TABLES = [IDENTITY, DAMAGE, DAMAGE_SHARES, DAMAGE_OF_TEXT, DAMAGE_OF_FP8]
