"""What a program of the kernels in `flash` works on: its tile of a sample, the blocks that it sees, rows, logits."""

from .launch import tl, triton

__all__ = [
    "described_rows", "hides_some", "keys_of", "left_over", "load_rows", "logits_of", "queries_of", "row_address",
    "sees", "tile_of",
]  # fmt: skip


@triton.jit
def tile_of(cu_seqlens_pointer, tile, sample_count, OWN: tl.constexpr, SEARCH_STEPS: tl.constexpr):
    """The first token and the length of a tile's sample; the tile's first row in it (past its end: idle)."""
    sample = 0
    for step in tl.static_range(SEARCH_STEPS):  # each tells 128 groups of samples apart
        stride = 128 ** (SEARCH_STEPS - 1 - step)
        candidate = sample + tl.arange(0, 128) * stride
        start = tl.load(cu_seqlens_pointer + candidate, mask=candidate < sample_count, other=2147483647)
        sample += (tl.sum((start // OWN + candidate <= tile).to(tl.int32), 0) - 1) * stride
    start = tl.load(cu_seqlens_pointer + sample)
    length = tl.load(cu_seqlens_pointer + sample + 1) - start
    return start, length, (tile - start // OWN - sample) * OWN


@triton.jit
def row_address(pointer, row, stride, length, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, LONG: tl.constexpr):
    """[rows, BLOCK_D]: where rows of head vectors lie, and what of it is in the sample and in the head."""
    if LONG:
        row = row.to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    inside = row[:, None] < length
    if HEAD_DIM != BLOCK_D:
        inside = inside & (column[None, :] < HEAD_DIM)
    return pointer + row[:, None] * stride + column[None, :], inside


@triton.jit
def load_rows(pointer, row, stride, length, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, LONG: tl.constexpr):
    address, inside = row_address(pointer, row, stride, length, HEAD_DIM, BLOCK_D, LONG)
    return tl.load(address, mask=inside, other=0.0)


@triton.jit
def logits_of(a, b, inner_scale, outer_scale, HAS_SOFTCAP: tl.constexpr):
    """Logits of all rows of a with all of b, in units of ln 2, and the derivative of the cap (1 without)."""
    product = tl.dot(a, tl.trans(b), input_precision="ieee")
    slope = 1.0
    if HAS_SOFTCAP:
        x = product * inner_scale
        product = 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))  # tanh(x), to 1e-7 of 1
        if a.dtype == tl.float32:  # to 1e-7 of x: least squares for (tanh(x) / x - 1) / x^2 where x is small
            z = x * x
            series = 0.13332468 + z * (-0.05384337 + z * (0.02104217 - z * 0.00623885))
            product = tl.where(z < 0.3025, x + x * z * (z * series - 0.33333311), product)
        slope = 1.0 - product * product
    return product * outer_scale, slope


@triton.jit
def sees(query, key, window, HAS_WINDOW: tl.constexpr):
    """Whether a query attends to a key, by their positions in one sample."""
    visible = query >= key
    if HAS_WINDOW:
        visible = visible & (query - key < window)
    return visible


@triton.jit
def hides_some(first_query, first_key, window, QUERIES: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Whether some query of a block does not see some key of another: else the mask is left out."""
    hides = first_key + KEYS > first_query + 1
    if HAS_WINDOW:
        hides = hides | (first_query + QUERIES - first_key > window)
    return hides


@triton.jit
def keys_of(first, length, window, OWN: tl.constexpr, STEP: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Of the keys that a tile of queries sees: begin and end, low and high of the blocks that all of it sees."""
    begin, low = 0, 0
    high = (first + 1) // STEP * STEP
    if HAS_WINDOW:
        begin = tl.maximum(first + 1 - window, 0) // STEP * STEP
        low = tl.minimum((tl.maximum(first + OWN - window, 0) + STEP - 1) // STEP * STEP, high)
    return begin, tl.minimum(first + OWN, length), low, high


@triton.jit
def queries_of(first, length, window, OWN: tl.constexpr, STEP: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Of the queries that see a tile of keys: begin and end, low and high of the full blocks that see all of it."""
    end, high = length, length // STEP * STEP
    if HAS_WINDOW:
        end = tl.minimum(first + OWN - 1 + window, length)
        high = tl.minimum((first + window) // STEP * STEP, high)
    low = tl.minimum((first + OWN + STEP - 2) // STEP * STEP, (end + STEP - 1) // STEP * STEP)
    return first // STEP * STEP, end, low, tl.maximum(low, high)


@triton.jit
def left_over(block, low, high, DESCRIBED: tl.constexpr):
    """The block that a loop over those below low and from high on means, counting as if none lay between them."""
    if DESCRIBED:
        block += tl.where(block < low, 0, high - low)
    return block


@triton.jit
def described_rows(descriptor, row, head, HEAD_DIM: tl.constexpr):
    """[STEP, HEAD_DIM] of one head, by a descriptor of [T, heads HEAD_DIM]."""
    return descriptor.load([row.to(tl.int32), (head * HEAD_DIM).to(tl.int32)])
