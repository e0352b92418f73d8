"""The tiles that kernels may take on a device family.

Where a list has several, a cost model or a limit of the device chooses among them. Each tile is one
more kernel to compile.
"""

from typing import NamedTuple


class TiledSizes(NamedTuple):
    """A tile in shared memory: m x n results in steps of k. Each invocation makes thread_m x
    thread_n results, and `slices` invocations share the k of a step."""

    m: int
    n: int
    k: int
    thread_m: int
    thread_n: int
    slices: int = 1


class CoopmatSizes(NamedTuple):
    """The same on matrix cores: each subgroup makes sub_m x sub_n results."""

    m: int
    n: int
    k: int
    sub_m: int
    sub_n: int
    slices: int = 1


class WorkgroupSizes(NamedTuple):
    """The same by a cooperative matrix of a workgroup of `invocations`, which takes `least_steps`
    steps along K or more: shorter loops are unrolled by the driver, and registers do not suffice."""

    m: int
    n: int
    k: int
    invocations: int
    least_steps: int


class FragmentSizes(NamedTuple):
    """A workgroup of `matmul_fragments.comp`: `subs_m` x `subs_n` times `slices` subgroups. Those of a
    slice make `fragments_m` x `fragments_n` fragments of 16 x 16 results each, with `depth` steps of 16
    terms in flight; the slices share the terms of these results. The code of the loop has up to `steps`
    steps. A multiprocessor takes `together` workgroups at a time, as far as measured times tell."""

    subs_m: int
    subs_n: int
    fragments_m: int
    fragments_n: int
    slices: int
    depth: int
    steps: int
    together: int


class ConvolutionSizes(NamedTuple):
    """A workgroup of `conv2d_fragments.comp`: `subs_m` x `subs_n` times `slices` subgroups. Those of a
    slice make `fragments_m` x `fragments_n` fragments of 16 x 16 results each; the slices share the
    terms of these results. A multiprocessor takes `together` workgroups at a time, as far as measured
    times tell."""

    subs_m: int
    subs_n: int
    fragments_m: int
    fragments_n: int
    slices: int
    together: int


class AttentionSizes(NamedTuple):
    """A workgroup of `attention_coopmat.comp`: each of `subgroups` takes `fragments` times 16
    queries, over `keys` keys a step. `q_steps` steps of 16 columns of the queries are in shared
    memory."""

    fragments: int
    subgroups: int
    keys: int
    q_steps: int = 0


class VectorSizes(NamedTuple):
    """A workgroup of the vector kernel: `lanes` invocations for neighbouring columns, `slices` for
    parts of k."""

    lanes: int
    slices: int


class RegisterSizes(NamedTuple):
    """The macros LANES_M, TM and TN4 of `glsl/matmul/matmul_tile.glslh`."""

    lanes_m: int
    tm: int
    tn4: int


class QuantizedSizes(NamedTuple):
    """Macros of `glsl/quantized/qmatmul_coopmat.comp`, which describes them."""

    tiles: int
    subs_n: int
    subs_k: int
    blocks: int
    ahead: int
    segments: int


class IntegerSizes(NamedTuple):
    """A tile of `glsl/quantized/qtile_coopmat.glslh`: m x n results in steps of `chunks` times 16
    values; each subgroup makes sub_m x sub_n."""

    m: int
    n: int
    chunks: int
    sub_m: int
    sub_n: int


class DotSizes(NamedTuple):
    """A workgroup of `matmul_dot.comp`: `lanes` invocations, with `steps` loads of each column in
    flight."""

    lanes: int
    steps: int


class NchwStep(NamedTuple):
    """A step of `glsl/conv/conv2d_nchw_tiled.comp`.

    Attributes:
        depth: channels of a step.
        unrolled: channels whose arithmetic is unrolled.
        ahead: whether the reads of a step start during the step before.
    """

    depth: int
    unrolled: int
    ahead: bool


class TileSizes(NamedTuple):
    """All of them.

    Attributes:
        tiled: matmuls and convolutions in shared memory.
        tiled_long: more of them with longer code, for matmuls alone, whose addresses are simple.
        coopmat: the same on matrix cores.
        coopmat_more: more of them, for matmuls alone.
        workgroup_coopmat: the same, staged by the driver.
        fragments: matmuls on matrix cores whose operands are in the order of fragments.
        convolution: convolutions on matrix cores whose weight is in the order of fragments.
        attention: attention on matrix cores.
        vector: the vector kernel where B is dense along n.
        vector_rows: the same for 16 rows of A.
        vector_transposed: the vector kernel where B is dense along k.
        dot: up to 8 rows, where B is dense along k, and read 16 bytes at a time.
        distance: distances between rows, in shared memory.
        registers: kernels without shared memory.
        winograd: the same for Winograd's algorithm, whose code is longer.
        quantized_4bit: products with a weight of 4 bits on matrix cores, for up to 8 rows of A.
        quantized_8bit: the same of 8 bits.
        quantized_8bit_once: more rows, where the weight of 8 bits is read once.
        quantized_two: 16 rows of A in other cases.
        quantized_many: more rows than that.
        quantized_small: smaller tiles, for where the best one does not fit or leaves
            multiprocessors without work; the first that fits is taken.
        quantized_integers: int8 times int8 on matrix cores, for many rows.
        quantized_unrolled: whether the int8 kernels without matrix cores unroll the chunks of a
            step through K.
        nchw_pointwise: NCHW convolutions with a window of 1 x 1.
        nchw_narrow: those whose groups have up to 8 output channels.
        nchw_small: those with a window of up to 4 elements.
        nchw_window: all others.
    """

    tiled: tuple[TiledSizes, ...]
    tiled_long: tuple[TiledSizes, ...]
    coopmat: tuple[CoopmatSizes, ...]
    coopmat_more: tuple[CoopmatSizes, ...]
    workgroup_coopmat: tuple[WorkgroupSizes, ...]
    fragments: tuple[FragmentSizes, ...]
    convolution: tuple[ConvolutionSizes, ...]
    attention: tuple[AttentionSizes, ...]
    vector: tuple[VectorSizes, ...]
    vector_rows: tuple[VectorSizes, ...]
    vector_transposed: tuple[VectorSizes, ...]
    dot: tuple[DotSizes, ...]
    distance: tuple[TiledSizes, ...]
    registers: tuple[RegisterSizes, ...]
    winograd: tuple[RegisterSizes, ...]
    quantized_4bit: QuantizedSizes
    quantized_8bit: QuantizedSizes
    quantized_8bit_once: QuantizedSizes
    quantized_two: QuantizedSizes
    quantized_many: QuantizedSizes
    quantized_small: tuple[QuantizedSizes, ...]
    quantized_integers: tuple[IntegerSizes, ...]
    quantized_unrolled: bool
    nchw_pointwise: NchwStep
    nchw_narrow: NchwStep
    nchw_small: NchwStep
    nchw_window: NchwStep
