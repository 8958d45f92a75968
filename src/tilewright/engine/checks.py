"""What an `Engine` refuses before it changes the model, or begins with prompts."""

from collections.abc import Callable, Sequence
from functools import wraps
from operator import is_
from typing import Any, Concatenate, ParamSpec, SupportsIndex, TypeVar

from torch import Tensor, nn

from ..launch import Device, argument_error, check_integers
from ..models import continuous_codes, linear_attention
from ..models.files import require_transformers
from ..models.probe import hooks_of
from ..models.quantized import check_dtype, is_quantized
from ..models.saved import METHODS
from ..models.shard import Shard, shard_of
from .cost import memory
from .mega.pack import CODES, refuse_model
from .parallel import Group
from .sampling import LIKELIEST, Sampling
from .speculate import check_speculation

HELD = "tilewright_engine"  # the attribute of a model that an engine holds


P = ParamSpec("P")
R = TypeVar("R")


def alone(call: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method of an engine that refuses to run beside another one: they share tokens and cache."""

    @wraps(call)
    def run(engine: Any, /, *args: P.args, **options: P.kwargs) -> R:
        try:
            turn = engine._turn.pop()  # atomic; a lock could not be copied with a model
        except IndexError:
            message = "an engine must run one call at a time, got another from a callback or thread: wait, or give each an engine"
            raise RuntimeError(message) from None
        try:
            return call(engine, *args, **options)
        finally:
            engine._turn.append(turn)

    return run


def check_positive(**sizes: int) -> None:
    check_integers(**sizes)
    for name, value in sizes.items():
        if value < 1:
            raise argument_error(name, "at least 1", value)


def check_called(**functions: object) -> None:
    """Raises TypeError unless each is a function, or None."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function, got {function!r:.80}")


def check_model(model: Any, group: Group | None) -> None:
    require_transformers("tilewright.Engine")
    from transformers import PreTrainedModel

    if group is not None and not isinstance(getattr(group, "shard", None), Shard):
        raise TypeError(f"group must be a tilewright.engine.Group, got {group!r:.80}")
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    if getattr(model.__dict__.get(HELD), "by", None) is not None:
        raise argument_error("model", "without an engine", "one that another Engine holds: close() that one first")
    wanted, held = Shard() if group is None else group.shard, shard_of(model)
    if held != wanted:
        raise argument_error("model", f"loaded with {wanted}, as this engine's group is", held)
    if is_quantized(model):
        check_dtype(model.dtype)


def check_mode(mode: str, model: Any, max_batch: int, group: Group | None, weights: str | None) -> None:
    if mode not in ("eager", "graph", "mega", "auto"):
        raise argument_error("mode", '"eager", "graph", "mega" or "auto"', repr(mode))
    if mode == "graph" and model.device.type != "cuda":
        raise argument_error("mode", '"eager" on a CPU: a CUDA graph needs an NVIDIA GPU', '"graph"')
    if mode == "mega":
        if group is not None:
            raise argument_error("mode", '"eager" or "graph" with a group', '"mega"')
        if max_batch != 1:
            raise argument_error("max_batch", '1 with mode="mega"', max_batch)
        if weights not in (None, CODES):
            raise argument_error("weights", f'None or "{CODES}" with mode="mega"', repr(weights))
        refuse_model(model, Device.of(next(model.parameters())))


def check_draft(model: Any, draft: Any, weights: str | None, speculate: int, mode: str, group: Group | None) -> None:
    """Raises ValueError unless a draft model, if given, can propose tokens for the model. weights:
    what it is quantised to.
    """
    check_speculation(speculate, LIKELIEST, mode, masked=False)
    if draft is None:
        if weights is not None:
            raise argument_error("draft_weights", "given with a draft model", repr(weights))
        return
    check_model(draft, None)
    check_states(draft, drafts=True)
    if speculate < 1:
        raise argument_error("speculate", "at least 1 with a draft model", speculate)
    if draft is model or mode == "mega" or group is not None:
        raise argument_error("draft", 'another model than model, without mode="mega" and without a group', type(draft).__name__)
    words, own = (each.config.get_text_config().vocab_size for each in (draft, model))
    if words != own or draft.device != model.device:
        raise argument_error("draft", f"a model of {own} tokens on {model.device}, as the model is", f"one of {words} on {draft.device}")


def check_states(
    model: Any, group: Group | None = None, *, cache: str = "static", prefix_reuse: bool = False, drafts: bool = False, codes: bool = False
) -> None:
    """Raises ValueError for what a model with states cannot do: they lie in no pages, are of a
    whole prompt, take no token back, and are not divided between ranks. codes: keys and values in 8
    bits, which some layer must have.
    """
    without_keys = codes and not any(hasattr(module, "v_proj") or hasattr(module, "qkv_proj") for module in model.modules())
    for name, asked, wanted, given in (
        ("group", group is not None, "None", "a group"),
        ("cache", cache != "static", '"static"', f'"{cache}"'),
        ("prefix_reuse", prefix_reuse, "False", True),
        ("speculate", drafts, "0, and no draft model", "drafts"),
        ("kv_dtype", without_keys, "None", "a dtype of keys, which no layer has"),
    ):
        if asked and any(linear_attention.ours_of(cls)[0] for cls in set(map(type, model.modules()))):
            raise argument_error(name, f"{wanted} for a model whose layers keep a state", given)


def check_sampling(sampling: Sampling | None) -> Sampling:
    """What to choose tokens by: without one, the likeliest."""
    if sampling is not None and not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a tilewright.engine.Sampling, got {sampling!r:.80}")
    return sampling or LIKELIEST


def check_kv_dtype(kv_dtype: str | None, model: Any, mode: str) -> None:
    """Raises ValueError unless the cache of the model can be of that kind."""
    continuous_codes.check_kv_dtype(kv_dtype, model)
    if kv_dtype is not None and mode == "mega":
        raise argument_error("kv_dtype", 'None with mode="mega"', repr(kv_dtype))


def check_rotations(model: Any, max_len: int) -> None:
    """Raises MemoryError unless cosines and sines of so many positions fit while they are made."""
    frequencies = getattr(getattr(getattr(model, "model", None), "rotary_emb", None), "inv_freq", None)
    needed = 0 if frequencies is None else 4 * 4 * max_len * frequencies.numel()  # fp32: angles, both, and both scaled
    free, total = memory(model.device)
    if needed > free:
        raise MemoryError(f"max_len {max_len}: its rotations need {gib(needed)}; {gib(free)} of {gib(total)} are free. Lower max_len")


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def check_rows(given: Any, name: str) -> list[list[int]]:
    """Token ids as lists."""
    given = given.tolist() if isinstance(given, Tensor) and not given.is_meta else given
    if not isinstance(given, Sequence) or not all(isinstance(row, Sequence) and all(isinstance(token, int) for token in row) for row in given):
        raise TypeError(f"{name} must be lists of token ids, or one tensor [batch, tokens] of integers, got {given!r:.80}")
    return [list(row) for row in given]


def check_continuations(given: Any, count: int) -> list[list[int]]:
    """The continuations of so many prompts as lists: of no tokens for None."""
    rows = [[] for _ in range(count)] if given is None else check_rows(given, "continuations")
    if len(rows) != count or len({len(row) for row in rows}) != 1:
        raise argument_error("continuations", f"{count} lists of equal length", [len(row) for row in rows])
    return rows


class Held:
    """In a model: the engine that it is held by, and where its weights are since. A copy of the
    model is held by none.
    """

    def __init__(self, by: Any = None) -> None:
        self.by = by
        self.places: Places | None = None

    def __deepcopy__(self, memo: Any) -> "Held":
        return Held()

    def __reduce__(self) -> Any:
        return Held, ()


def check_code(name: str, module: nn.Module) -> None:
    """Raises ValueError for a module that may compute something else than transformers' class of
    the family: an engine reads its weights and calls none of its code.
    """
    own, kind = "one whose code an engine may replace by its own", type(module)
    if not _known(kind):
        raise argument_error(name, f"{own}, of a class of transformers (patch() tries others)", f"{kind.__module__}.{kind.__qualname__}")
    if not all(map(_known, hooks_of(module))):
        raise argument_error(name, f"{own}, without hooks, which would not be called (patch() calls them)", "one with a hook")
    if "forward" in module.__dict__ and METHODS not in module.__dict__ and not _known(module.__dict__["forward"]):  # a shard's raises
        raise argument_error(name, f"{own} (patch() leaves others alone)", "one whose forward is replaced")


def _known(code: Any) -> bool:
    """Whether a class or a function is of a library whose code an engine replaces."""
    return str(getattr(code, "__module__", "")).partition(".")[0] in ("torch", "transformers", "tilewright")


class Lone:
    """One of these has its weights, cache and lock to itself."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise TypeError("an engine must be made from a model where it runs, got a copy or a pickle of one: copy the model")


def check_open(model: Any) -> None:
    """Raises ValueError if an engine has let go of its model."""
    if model is None:
        raise argument_error("the engine", "open", "one that was closed")


class Places:
    """Where the weights of a model are.

    Whether they still are is asked at each call, so not by names: going through the modules for
    these takes 2 ms of one with 500.
    """

    def __init__(self, model: nn.Module) -> None:
        held = (of for module in model.modules() for of in (module._modules, module._parameters))
        self._held = [(of, tuple(of.values())) for of in held]
        self._weights = {name: (parameter, parameter.data_ptr()) for name, parameter in model.named_parameters()}

    def moved(self, model: nn.Module) -> str | None:
        """The name of a weight that is elsewhere, new or gone; None if all are where they were."""
        same = all(len(of) == len(before) and all(map(is_, of.values(), before)) for of, before in self._held)
        if same and all(parameter.data_ptr() == place for parameter, place in self._weights.values()):
            return None
        before = {name: place for name, (_, place) in self._weights.items()}
        now = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        return next((name for name in {**before, **now} if now.get(name) != before.get(name)), None)


def check_weights(model: Any) -> None:
    """Raises ValueError if an engine has let go of its model, or the model got other weights or
    moved them: the engine would go on with those that it has fused.
    """
    check_open(model)
    name = model.__dict__[HELD].places.moved(model)
    if name is not None:
        raise argument_error("the model's weights", "those that the engine was made of (close() it, change them, make another)", f"another {name}")


def check_prompts(prompts: Sequence[Sequence[int]] | Tensor, more: int, *, max_batch: int, max_len: int, vocabulary: int) -> list[list[int]]:
    """The prompts as lists. more: tokens that follow each."""
    rows = check_rows(prompts, "prompts")
    if not 1 <= len(rows) <= max_batch:
        raise argument_error("the number of prompts", f"1 to max_batch = {max_batch}", len(rows))
    for row in rows:
        if not row or len(row) + more > max_len:
            raise argument_error("a prompt and what follows it", f"at least 1 token and at most max_len = {max_len}", f"{len(row)} + {more}")
        if min(row) < 0 or max(row) >= vocabulary:
            raise argument_error("token ids", f"0 to {vocabulary - 1}", f"{min(row)} to {max(row)}")
    return rows
