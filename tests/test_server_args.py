"""Modes of the server in which adapters are not served: refused at start, in one line."""

from __future__ import annotations

from typing import Any

import pytest

from scute_patches import sgl_kernel

sgl_kernel.install()

from sglang.srt.server_args import ServerArgs  # noqa: E402

from scute_patches.server_args import refuse_unsupported  # noqa: E402


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"enable_lora_overlap_loading": True}, "--enable-lora-overlap-loading"),
        ({"pp_size": 2}, "--pp-size > 1"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"attn_cp_size": 2}, "--attn-cp-size > 1"),
        ({"dcp_size": 2}, "--dcp-size > 1"),
        ({"enable_prefill_cp": True}, "--enable-prefill-cp"),
        ({"moe_dense_tp_size": 1}, "--moe-dense-tp-size"),
        ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend"),
        ({"enable_attn_tp_input_scattered": True}, "--enable-attn-tp-input-scattered"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
    ],
)
def test_what_is_not_served_is_refused(fields: dict[str, Any], option: str) -> None:
    with pytest.raises(ValueError, match="--lora-backend scute does not serve adapters with") as caught:
        refuse_unsupported(ServerArgs(model_path="none", **fields))
    assert option in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_served_is_not() -> None:
    refuse_unsupported(ServerArgs(model_path="none", tp_size=2, chunked_prefill_size=7, enable_mixed_chunk=True))
