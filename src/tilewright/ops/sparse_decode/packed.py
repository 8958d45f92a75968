"""Caches of 8-bit keys: pages of uint8 [pages, page_size, bytes of a row], in one of two layouts
that `bytes of a row` names.

656 of 576 columns (DeepSeek-V3.2): 512 e4m3 codes, 4 fp32 scales of 128 columns each, 64 bf16
rotated columns.
584 of 512 columns (DeepSeek-V4): 448 e4m3 codes, 64 bf16 rotated columns; behind all rows of a
page, for each row 7 scales of 64 columns each (ue8m0: the exponent byte of a power of two) and a
zero. Pages begin a multiple of 576 bytes apart.

    column = code * scale
"""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...launch import FLOATS, argument_error, check_tensor, dtype_name

CODE = torch.float8_e4m3fn
LARGEST = 448.0  # of the codes
ROPE = 64  # columns that stay bf16
WIDE, NARROW = 656, 584  # bytes of a row
COLUMNS = {WIDE: 576, NARROW: 512}
BYTES = {columns: width for width, columns in COLUMNS.items()}
GROUP = {WIDE: 128, NARROW: 64}  # columns of a scale
DATA = 576  # bytes of a row in front of a page's scales, in the narrow layout


def parts(cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [pages, page_size, 512], scales (fp32 [.., .., 4], uint8 [.., .., 8]) and rotated
    columns [.., .., 64], as views of the cache.

    The last 64 of the codes and the last of the scales are none in the 584-byte layout: kernels
    read powers of two.
    """
    pages, page_size, width = cache.shape
    if width == WIDE:
        return cache[..., :512].view(CODE), cache[..., 512:528].view(torch.float32), cache[..., 528:].view(torch.bfloat16)
    data = cache.as_strided((pages, page_size, DATA), (cache.stride(0), DATA, 1))
    # A page as rows of 8 bytes, the last of them scales. No storage_offset(): a trace may lack it.
    scales = cache.as_strided((pages, page_size * (DATA // 8 + 1), 8), (cache.stride(0), 8, 1))[:, page_size * (DATA // 8) :]
    return data[..., :512].view(CODE), scales, data[..., 448:].view(torch.bfloat16)


def pack_kv(rows: Tensor) -> Tensor:
    """Packs rows of keys into a cache of 8-bit codes: the 656-byte layout for 576 columns, the
    584-byte layout for 512.

    Args:
        rows: [pages, page_size, 576 or 512]; floating point, the last 64 columns the rotated ones;
            page_size even.
    Returns: uint8 [pages, page_size, 656 or 584] on the device of rows. In the 584-byte layout only
        pages are contiguous, not rows. The page stride is page_size * 584 bytes, rounded up to a
        multiple of 576. Scales: largest magnitude of the group / 448, in the 584-byte layout at
        least 1e-4 and rounded up to a power of two. A group with a NaN or an infinity has NaN for
        all its codes.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(rows, "rows", dtypes=(*FLOATS, torch.float64), any_strides=True)
    if rows.dim() != 3 or rows.shape[2] not in BYTES:
        raise argument_error("rows.shape", "(pages, page_size, 576 or 512)", tuple(rows.shape))
    pages, page_size, columns = rows.shape
    if page_size % 2:
        raise argument_error("rows.shape[1]", "even", page_size)
    width = BYTES[columns]
    apart = -(-page_size * width // DATA) * DATA if width == NARROW else page_size * width
    cache = torch.zeros(pages, apart, dtype=torch.uint8, device=rows.device).as_strided((pages, page_size, width), (apart, width, 1))
    codes, scales, rope = parts(cache)
    # Not the method, a Python one: torch.compile cannot trace that under torch.set_default_device.
    groups = torch.unflatten(rows[..., :-ROPE].float(), -1, (-1, GROUP[width]))
    largest = groups.abs().amax(-1, keepdim=True)
    groups = groups.where(largest.isfinite(), torch.nan)  # a scale of 8 bits says neither
    scale = largest[..., 0].nan_to_num(LARGEST, LARGEST) / LARGEST
    if width == NARROW:
        mantissa, exponent = torch.frexp(scale.clamp(min=1e-4))
        exponent = exponent - (mantissa == 0.5).int()
        scale = torch.ldexp(torch.ones_like(scale), exponent)
        scales[..., :-1] = (exponent + 127).to(torch.uint8)
    else:
        scale = scale.clamp(min=torch.finfo(torch.float32).tiny)  # of a group of zeros
        scales.copy_(scale)
    codes[..., : columns - ROPE] = (groups / scale[..., None]).clamp(-LARGEST, LARGEST).flatten(-2).to(CODE)
    rope.copy_(rows[..., -ROPE:])
    return cache


def unpack_kv(cache: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The rows of a cache of 8-bit codes.

    Args:
        cache: uint8 [pages, page_size, 656 or 584], as `pack_kv` makes it; any page stride.
        dtype: of the result; bf16 holds every column of the 584-byte layout exactly, but rounds
            those of the 656-byte layout.
    Returns: [pages, page_size, 576 or 512].
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    if not isinstance(cache, Tensor):
        raise TypeError(f"cache must be a torch.Tensor, got {type(cache).__name__}")
    check_packed(cache, "cache")
    if not dtype.is_floating_point:
        raise argument_error("dtype", "floating point", dtype_name(dtype))
    codes, scales, rope = parts(cache)
    if cache.shape[2] == NARROW:
        scales = (scales[..., :-1].int() << 23).view(torch.float32)
    wide = torch.promote_types(dtype, torch.float32)
    codes = codes[..., : COLUMNS[cache.shape[2]] - ROPE]
    columns = torch.unflatten(codes.float().to(wide), -1, (-1, GROUP[cache.shape[2]])) * scales.to(wide)[..., None]
    return torch.cat((columns.flatten(-2).to(dtype), rope.to(dtype)), -1)


def check_packed(cache: Tensor, name: str) -> None:
    """Raises ValueError unless the cache is in one of the two layouts, its pages and rows where
    16-byte accesses find them.
    """
    if cache.dtype != torch.uint8 or cache.dim() != 3 or cache.shape[2] not in COLUMNS:
        raise argument_error(name, "uint8 [pages, page_size, 656 or 584]", f"{cache.dtype} {tuple(cache.shape)}")
    width = cache.shape[2]
    if cache.shape[1] % 2:
        raise argument_error(f"{name}.shape[1]", "even", cache.shape[1])
    if cache.shape[1] > 1 and cache.stride()[1:] != (width, 1):
        raise argument_error(f"{name}.stride()[1:]", (width, 1), cache.stride()[1:])
    start = 0 if is_compiling() else cache.storage_offset()  # a traced tensor does not tell
    if cache.stride(0) % 16 or start % 16:
        raise argument_error(f"{name}.stride(0) and storage_offset()", "multiples of 16", (cache.stride(0), start))
