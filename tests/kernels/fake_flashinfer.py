"""A stand-in for the package flashinfer: the documented semantics of its wrapper for paged prefill, in torch and fp32.

It keeps the arguments of `plan` as the real wrapper does: host arrays are copied to the device later, in the order of
the queue, so a caller that overwrites them too early gets wrong results.
"""

import math
import sys
from types import ModuleType

import torch

VERSION = "0.7.2.post1"


def as_package(monkeypatch, queue, version=VERSION, launch=None):
    """Installs the stand-in as `flashinfer` for one test and returns its module. queue: of a device. launch: called in
    place of the computation, for a device without values."""
    package = ModuleType("flashinfer")
    package.__version__ = version
    package.plans = []  # one entry per call of plan

    class BatchPrefillWithPagedKVCacheWrapper:
        def __init__(self, float_workspace_buffer, kv_layout="NHD"):
            assert kv_layout == "HND" and float_workspace_buffer.dtype is torch.uint8
            self.workspace = float_workspace_buffer

        def plan(
            self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            head_dim_qk, page_size, *, causal=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
            q_data_type="float16", kv_data_type=None, seq_lens=None,
        ):  # fmt: skip
            host = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len, seq_lens)
            assert all(x.dtype is torch.int32 for x in (*host, paged_kv_indices))
            assert all(x.device.type == "cpu" for x in host) and paged_kv_indices.device == queue.device
            assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
            assert len(paged_kv_indices) == paged_kv_indptr[-1], "the planner reads the host arrays at once"
            assert (qo_indptr.diff() >= 1).all() and (paged_kv_last_page_len >= 1).all()
            assert (paged_kv_last_page_len <= page_size).all()
            assert seq_lens.equal((paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len)
            assert (seq_lens >= qo_indptr.diff()).all() and q_data_type is kv_data_type
            self.sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
            self.causal, self.window_left, self.dtype = causal, window_left, q_data_type
            self.sm_scale = 1 / math.sqrt(head_dim_qk) if sm_scale is None else sm_scale
            self.soft_cap = logits_soft_cap or 0.0
            self.num_rows, self.indices = int(qo_indptr[-1]), paged_kv_indices
            self.device_arrays = [torch.empty(x.shape, dtype=x.dtype, device=queue.device) for x in host[:3]]
            for target, source in zip(self.device_arrays, host[:3], strict=True):
                queue.copy(target, source)
            package.plans.append(self)

        def run(self, q, paged_kv_cache, *, out=None):
            num_heads, num_kv_heads, head_dim, page_size = self.sizes
            k_cache, v_cache = paged_kv_cache
            assert q.shape == out.shape == (self.num_rows, num_heads, head_dim) and out.is_contiguous()
            assert k_cache.shape[1:] == v_cache.shape[1:] == (num_kv_heads, page_size, head_dim)
            assert q.dtype is k_cache.dtype is self.dtype and k_cache.stride() == v_cache.stride()
            queue.run(launch or (lambda: self._run(q, k_cache, v_cache, out)))

        def _run(self, q, k_cache, v_cache, out):
            rows, pages, last_lens = (x.tolist() for x in self.device_arrays)
            for i, last_len in enumerate(last_lens):
                mine = self.indices[pages[i] : pages[i + 1]].long()
                kv_len = (len(mine) - 1) * self.sizes[3] + last_len
                keys, values = (c[mine].transpose(0, 1).flatten(1, 2)[:, :kv_len].float() for c in (k_cache, v_cache))
                one = slice(rows[i], rows[i + 1])
                out[one] = self._attend(q[one].float(), keys, values).to(out.dtype)

        def _attend(self, q, keys, values):
            """q [rows, heads, dim], keys and values [kv heads, tokens, dim] -> as q."""
            group = q.shape[1] // len(keys)
            keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
            logits = torch.einsum("qhd,hkd->hqk", q, keys) * self.sm_scale
            if self.soft_cap > 0:
                logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
            qo_len, kv_len = logits.shape[1:]
            row, column = torch.arange(qo_len)[:, None], torch.arange(kv_len)
            seen = torch.ones(qo_len, kv_len, dtype=torch.bool)
            if self.causal:
                seen &= column <= kv_len - qo_len + row
            if self.window_left >= 0:
                seen &= column + self.window_left >= kv_len - qo_len + row
            return torch.einsum("hqk,hkd->qhd", logits.masked_fill(~seen, -math.inf).softmax(-1), values)

    package.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    return package
