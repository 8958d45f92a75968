"""transformers' continuous batching (`generate_batch`, `transformers serve`) on our kernels.

transformers keeps the requests, the pages and the tokens of a step. This is its attention. If every
request has one token, the step appends to the pages and attends through the block table;
transformers itself does so only with FlashAttention 2 and 3. If the step has prompts, it gathers
the keys that transformers names and attends to the packed sequences. Nothing is read back from the
device, so transformers' graphs can replay.
"""

import inspect
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..launch import argument_error
from ..ops.attention import attention_out
from ..ops.attention_decode import attention_decode
from ..ops.common.sequences import near
from ..ops.kv_append import kv_append
from .continuous_codes import KV_DTYPE, Pages, coded_batch_processor
from .kinds import asks_for_attention
from .method import NAME
from .scope import with_our_function

# A name with "flash" tells transformers that an attention needs no mask of [tokens, keys] and may
# be captured.
PAGED = f"{NAME}_flash"
SMALLEST_PAGE = 16
MOST_GRAPHS = 64  # of each of transformers' two sets of inputs; CUDA keeps host memory for each


def paged_attention_forward(  # noqa: PLR0913 transformers names the arguments
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **paging: Any,
) -> tuple[Tensor, None]:
    """The attention call under continuous batching.

    The names of the arguments are transformers'.

    Args:
        query, key, value: [1, heads, tokens of all requests, head_dim].
        cache: transformers' PagedAttentionCache.
        cu_seq_lens_q: int32 [requests + 1], where the tokens of each request begin.
        max_length_q: tokens of the longest request.
        paging: where to read and write keys; `cache.update` turns it into what this layer needs.
    Returns: [1, tokens, q_heads, head_dim], and no attention weights.
    Raises: ValueError for a call without continuous batching's arguments, or with a mask or
        dropout.
    """
    if cache is None or cu_seq_lens_q is None:
        raise argument_error("cache", "transformers' paged cache: stop the continuous batching manager before another call of the model", None)
    if attention_mask is not None:
        raise argument_error("attention_mask", "None under continuous batching", f"a tensor of shape {tuple(attention_mask.shape)}")
    if dropout:
        raise argument_error("attention dropout", "0 (call model.eval())", dropout)
    sinks = None if s_aux is None else s_aux.float()
    key, value = cache.update(key, value, module.layer_idx, kwargs=paging)
    kv_begin = paging["cu_seq_lens_k"]
    if paging.get("block_table") is not None:
        table, kv_len = paging["block_table"], kv_begin.diff()
        q, k, v = (x.permute(2, 1, 0, 3) for x in (query, key, value))  # a request's token is its whole sequence: [requests, heads, 1, head_dim]
        pages, scales = [paging[name] for name in ("k_cache", "v_cache")], dict[str, Any]()
        if isinstance(pages[0], Pages):
            scales, pages = {"k_scale": pages[0].scales, "v_scale": pages[1].scales}, [kind.codes for kind in pages]
        keys, values = (x.transpose(1, 2) for x in pages)  # [pages, kv_heads, page_size, head_dim]
        # A request that only pads a captured batch has no keys. Its position is -1: it is not
        # stored and attends to nothing.
        kv_append(k, v, keys, values, positions=kv_len - 1, block_table=table, **scales)
        how: dict[str, Any] = {"window": sliding_window, "sinks": sinks, "scale": scaling, "softcap": softcap}
        found: Any = attention_decode(q, keys, values, kv_len, block_table=table, **scales, **how)
        return found.permute(2, 0, 1, 3), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, head_dim]
    # Zeros: tokens that only pad a captured step belong to no request, and no attention writes
    # them, but later layers route and normalise them.
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    scale = q.shape[2] ** -0.5 if scaling is None else scaling
    optional = (None, None, cu_seq_lens_q, kv_begin, sinks, None, None, None)
    attention_out(q, k, v, *optional, scale, True, sliding_window, 0, max_length_q, softcap, out, None)
    return out[None], None


def register() -> None:
    """Makes `PAGED` known to transformers."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(PAGED, paged_attention_forward)


def init_continuous_batching(model_class: type) -> Callable[..., Any]:
    """transformers' method of this name, with managers that run a model on our attention."""
    stock: Any = inspect.unwrap(model_class.init_continuous_batching)  # type: ignore[attr-defined]
    return with_our_function(stock, "ContinuousBatchingManager", _manager_class())


def check_pages(model: Any) -> None:
    """Raises ValueError for a model whose layers cannot all keep what they keep in transformers'
    pages. Without them a step's requests are one text: each reads the others.
    """
    from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR

    config = model.config.get_text_config()
    if getattr(config, "kv_lora_rank", None):
        wanted = "one whose values are as wide as its keys: transformers' paged cache holds no others, such as MLA's"
        raise argument_error("the model", wanted, config.model_type)
    kinds = sorted({*(getattr(config, "layer_types", None) or ())} - ATTN_TYPE_TO_ALLOCATOR.keys())
    asking = sum(map(asks_for_attention, model.modules()))
    if kinds or asking < config.num_hidden_layers:
        wanted = "one whose layers all call an attention that transformers selects: its paged cache holds keys and values of no other"
        raise argument_error("the model", wanted, f"{config.model_type}, with " + (f"layers of {kinds[0]}" if kinds else "attention of its own"))


@cache
def _manager_class() -> type:
    """transformers' manager with another choice of attention and of block tables."""
    import transformers
    from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache

    class Manager(ContinuousBatchingManager):
        def __init__(self, model: Any, generation_config: Any, continuous_batching_config: Any, workload_hints: Any = None) -> None:
            if "kwargs" not in inspect.signature(PagedAttentionCache.update).parameters:
                raise argument_error("transformers", "5.23 or newer for continuous batching", transformers.__version__)
            check_pages(model)
            before = model.config._attn_implementation
            try:
                super().__init__(model, generation_config, continuous_batching_config, workload_hints)
            except BaseException:
                model.config._attn_implementation = before
                raise
            pages = _pages_per_request(model.config, continuous_batching_config, workload_hints)
            self.continuous_batching_config.max_blocks_per_request = pages

        def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
            model.config._attn_implementation = PAGED  # a copy that is this model's own: see patch
            self._original_attn_impl: Any = NAME  # `stop` selects it again

        def _create_batch_processor(self) -> Any:
            coded = self.model.__dict__.get(KV_DTYPE) is not None
            processor = coded_batch_processor()(self) if coded else super()._create_batch_processor()
            processor.model_runner.__class__, graphs = _few_sizes(), _few_graphs()
            for inputs in _inputs(processor):
                inputs.graphs.__class__ = graphs
            return processor

    return Manager


def _inputs(processor: Any) -> list[Any]:
    """The inputs on the device that graphs read: two, where a step is prepared while the one before
    runs.
    """
    inputs = processor.inputs_and_outputs
    return [pair.device_io for pair in inputs.io_pairs] if hasattr(inputs, "io_pairs") else [inputs]


def captured_steps(processor: Any) -> int:
    """How many graphs are kept."""
    return sum(len(inputs.graphs._storage) for inputs in _inputs(processor))


@cache
def _few_sizes() -> type:
    """transformers' ModelRunner, with fewer sizes of steps that are captured: it pads tokens and
    keys to multiples of an interval. Here, beyond four intervals, there are four sizes to the next
    power of two, so that a server has soon captured all its steps.
    """
    from transformers.generation.continuous_batching.model_runner import ModelRunner

    class Runner(ModelRunner):
        def maybe_pad_inputs(self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> tuple[int, int]:
            if self.pad_inputs and not use_decode_fast_path:
                tokens, keys = self.cb_config.q_padding_interval_size, self.cb_config.kv_padding_interval_size
                num_q_tokens = near(-(-num_q_tokens // tokens), 3) * tokens
                max_kv_read = near(-(-max_kv_read // keys), 3) * keys
            found: tuple[int, int] = super().maybe_pad_inputs(num_q_tokens, max_kv_read, use_decode_fast_path)
            return found

    return Runner


@cache
def _few_graphs() -> type:
    """transformers' CudaGraphBuffer, which keeps all graphs, with a limit."""
    from transformers.generation.continuous_batching.utils import CudaGraphBuffer

    class Graphs(CudaGraphBuffer):
        def get_graph(self, key: tuple[int, ...]) -> Any:
            graph = self._storage.pop(key, None)
            if graph is not None:
                self._storage[key] = graph  # behind all that were not used since
            return graph

        def set_graph(self, key: tuple[int, ...], graph: Any) -> None:
            super().set_graph(key, graph)
            if len(self._storage) > MOST_GRAPHS:
                # It ended long ago: a step is prepared when the one two before it has ended.
                self._storage.pop(next(iter(self._storage))).reset()

    return Graphs


def _pages_per_request(config: Any, given: Any, hints: Any) -> int:
    """Columns of the block table; 0 if steps of one token a request cannot use a table."""
    from transformers.generation.continuous_batching import cache, initialization

    layers = cache.group_layers_by_attn_type(config.get_text_config())
    tables = all(cache.ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in layers)
    fits = given.page_size >= SMALLEST_PAGE and given.page_size & (given.page_size - 1) == 0
    if not (tables and fits):
        return 0
    wanted = deepcopy(given)
    initialization.resolve_using_hints(wanted, hints)
    initialization.resolve_without_hints(wanted)
    return int(wanted.max_blocks_per_request)
