"""A value other than the default for every field of ``VTokenConfig``."""

from __future__ import annotations

from service import flags

SAMPLES = {
    "mode": "naive",
    "policy": "random",
    "policy_args": '{"a": 1}',
    "keep_ratio": "0.5",
    "budget_tokens": "512",
    "sink_tokens": "2",
    "recent_tokens": "8",
    "evict_interval_tokens": "32",
    "evict_during_prefill": "true",
    "evict_free_ratio": "0.5",
    "theta_f": "0.5",
    "theta_f_mode": "adaptive",
    "theta_f_min": "0.01",
    "theta_f_max": "0.75",
    "low_watermark_ratio": "0.75",
    "headroom_blocks": "9",
    "max_source_blocks": "16",
    "check_interval_steps": "3",
    "verify": "full",
    "record_evictions": "true",
    "relocate_shared": "true",
    "relocate_into_cached": "true",
    "max_blocks_per_request": "64",
    "score_layers": "9,0",
    "score_interval_steps": "5",
    "score_window_tokens": "3",
    "seed": "7",
}
EXPECTED = {
    **{n: int(v) for n, v in SAMPLES.items() if v.isdigit()},
    **{n: float(v) for n, v in SAMPLES.items() if "." in v},
    **{n: SAMPLES[n] for n in ("mode", "policy", "theta_f_mode", "verify")},
    "policy_args": {"a": 1},
    "score_layers": (0, 9),
    "evict_during_prefill": True,
    "record_evictions": True,
    "relocate_shared": True,
    "relocate_into_cached": True,
    "max_blocks_per_request": 64,
}


def flag_arguments(name: str) -> list[str]:
    """How the field's sample is written on a command line."""
    if EXPECTED[name] is True:
        return [flags.flag_name(name)]
    return [flags.flag_name(name), SAMPLES[name]]
