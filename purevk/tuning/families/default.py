"""Any GPU without a family of its own, and the start of the other families.

The numbers were measured on one GPU, an NVIDIA H200. They are a guess for all others, which have
ratios of latency to throughput that are not too different.
"""

from typing import TypeVar

from purevk.tuning.costs import (
    AttentionCosts,
    ConvolutionCosts,
    CoopmatCosts,
    FragmentCosts,
    IntegerCosts,
    MatmulCosts,
    RegisterCosts,
    TiledCosts,
    VectorCosts,
    WorkgroupCoopmatCosts,
)
from purevk.tuning.profile import DeviceProfile
from purevk.tuning.registry import Family, register
from purevk.tuning.tiles import (
    AttentionSizes,
    ConvolutionSizes,
    CoopmatSizes,
    DotSizes,
    FragmentSizes,
    IntegerSizes,
    NchwStep,
    QuantizedSizes,
    RegisterSizes,
    TiledSizes,
    TileSizes,
    VectorSizes,
    WorkgroupSizes,
)

_Sizes = TypeVar("_Sizes")

# Measured over matmuls and convolutions of 1 to 12544 rows, alone and among the other layers of
# models.
MATMUL = MatmulCosts(
    # Fitted to 16 products with all tiles and 231 with 3 to 5 each. The choice takes 3 % more than
    # the best on average, and 35 % at worst.
    tiled=TiledCosts(
        start=3.6,
        code=0.003,
        latency=0.26,
        window=0.0,
        load=1.2e-4,
        multiply_add=5.2e-6,
        shared_read=0.08,
        join=0.02,
        registers=(67, 1.28),
        register_file=65536,
        fullest=1.0,
    ),
    window_tiled=TiledCosts(
        start=3.6,
        code=0.003,
        latency=0.26,
        window=0.03,
        load=2.4e-4,
        multiply_add=6e-6,
        shared_read=0.05,
        join=0.02,
        registers=(1, 0),  # they limit nothing
        register_file=65536,
        fullest=0.0,
    ),
    coopmat=CoopmatCosts(
        start=2.1,
        code=7.5e-3,
        latency=0.114,
        window=0.0,
        load=1.26e-4,
        product=1.37e-3,
        shared_read=1.26,
        store=0.099,
        result=3.8e-7,
        registers=255,
        register_file=65536,
        fullest=0.68,
    ),
    window_coopmat=CoopmatCosts(
        start=3.5,
        code=0.02,
        latency=0.066,
        window=0.08,
        load=3.1e-4,
        product=7.3e-4,
        shared_read=0.0,
        store=0.069,
        result=7e-7,
        registers=126,
        register_file=65536,
        fullest=0.0,
    ),
    workgroup_coopmat=WorkgroupCoopmatCosts(
        start=4.35, latency=0.29, load=1.32e-4, product=3.9e-4, store=0.063, fullest=0.68
    ),
    # Fitted to times between other kernels: 56 products of a Llama and of BERT, of 16 to 2048 rows,
    # with 13 tiles, and 56 of encoders with up to 12608 rows. The choice takes 1.4 % more than the best
    # of 111 tiles on average for the first, and 9 % at worst, and 0.1 % for the others.
    fragments=FragmentCosts(
        start=5.17,
        product=(5.98e-4, 1.535e-3),
        round=0.494,
        latency=0.0652,
        join=0.0447,
        weight=2.32e-7,
        # Fitted to 40 products of two inputs, and as many of a constant with rows that are copied. The
        # choice takes 1.5 % more than the best of both kernels; without copies 11 %.
        copy=8e-7,
        copy_start=3.5,
        others=2.0,
        others_copied=1.15,
    ),
    # Start, code, store, round and result are fitted to the 58 convolutions of ResNet-50 for 1, 8 and 32
    # images, each timed in the network; the others to 40 convolutions of ResNet-50 and Stable Diffusion
    # with 11 tiles, alone. The choice takes 2 % more than the best of them, and 13 % at worst.
    convolution=ConvolutionCosts(
        start=2.26,
        code=0.592,
        product=(4.13e-4, 2.32e-4, 7.9e-4),
        load=2.08,
        latency=0.195,
        store=3.62e-3,
        round=0.218,
        result=7.55e-7,
        join=0.0514,
        others=1.5,
    ),
    vector=VectorCosts(
        start=3.4,
        code=0.002,
        latency=0.22,
        load=5.5e-5,
        multiply_add=5e-6,
        join=2.8e-4,
    ),
    split_start=3.3,
    split_element=9e-7,
)
# Fitted to 7 products and convolutions with 10 tiles each.
INTEGERS = IntegerCosts(
    start=3.0, latency=0.34, window=0.25, load=6e-6, product=3.6e-7, resident=2, fullest=0.68
)
# Fitted to 21 sizes with up to 12 tiles: of 32 to 128 columns, from 32 x 12 heads with 128 tokens to 12
# with 16384, four of them causal. The choice takes 2 % more than the best on average, 8 % at worst.
ATTENTION = AttentionCosts(
    start=2.94,
    group=0.8,
    latency=0.242,
    step=0.384,
    product=0.0145,
    softmax=0.00396,
    read=0.00153,
    stage=0.0403,
    registers=(1.64, 12.0),
    register_file=65536,
    fullest=1.0,
)
# Measured on a core of llvmpipe (vectors of 8 floats, operands in texel buffers), and fitted to the
# times of 37 matmuls of real models with 38 tiles each. The model is within 7 % of most of them. No
# GPU was measured with these kernels.
REGISTERS = RegisterCosts(
    start=110.0,
    store=21.0,
    step=7.0,
    multiply_add=3.7,
    load=2.5,
    spill=0.44,
    kept_vectors=14,
    join=4.0,
    winograd_block=540.0,
    scalar_loads=4.0,
    attention_key=1.2,
    depthwise_block=2.4,
    depthwise_spill=1.05,
)


def _sizes(kind: type[_Sizes], *rows: tuple[int, ...]) -> tuple[_Sizes, ...]:
    return tuple(kind(*row) for row in rows)


# Those that are the fastest for some shape, by a few percent or more. Similar tiles may take several
# times as long, since registers do not suffice.
# fmt: off
TILES = TileSizes(
    tiled=_sizes(
        TiledSizes, (16, 32, 64, 4, 4, 4), (32, 32, 32, 4, 4, 1), (32, 32, 64, 4, 4, 2),
        (32, 32, 64, 4, 4, 4), (64, 32, 32, 4, 4, 1), (64, 32, 64, 4, 4, 2), (64, 64, 16, 4, 4, 1),
        (64, 64, 16, 8, 8, 1), (64, 64, 32, 4, 8, 1),
    ),
    tiled_long=_sizes(
        TiledSizes, (16, 16, 128, 4, 4, 8), (32, 32, 128, 4, 4, 4), (64, 64, 32, 8, 4, 2),
        (64, 64, 16, 4, 8, 1), (64, 128, 16, 8, 8, 1),
    ),
    coopmat=_sizes(
        CoopmatSizes, (32, 32, 32, 16, 16, 1), (32, 32, 64, 16, 16, 1), (32, 32, 128, 16, 16, 2),
        (32, 32, 128, 16, 16, 4), (16, 32, 128, 16, 16, 4), (16, 16, 256, 16, 16, 8),
        (32, 64, 64, 16, 32, 1), (64, 32, 128, 32, 16, 1), (64, 64, 64, 16, 32, 1),
        (64, 64, 64, 32, 32, 1), (64, 64, 128, 32, 32, 1), (64, 128, 64, 32, 64, 1),
        (128, 64, 32, 32, 32, 1), (128, 64, 64, 32, 32, 1), (128, 64, 64, 64, 32, 1),
        (128, 128, 32, 64, 64, 1), (128, 128, 64, 32, 64, 1), (128, 128, 64, 64, 64, 1),
    ),
    coopmat_more=_sizes(
        CoopmatSizes, (64, 96, 64, 32, 48, 1), (96, 96, 64, 48, 48, 1), (128, 96, 64, 64, 48, 1),
    ),
    workgroup_coopmat=_sizes(WorkgroupSizes, (128, 128, 64, 128, 32), (128, 64, 64, 128, 32)),
    fragments=_sizes(
        FragmentSizes, (2, 2, 4, 4, 1, 1, 2, 2), (2, 2, 3, 4, 1, 1, 4, 2), (2, 2, 3, 3, 1, 1, 4, 2),
        (2, 2, 2, 3, 1, 2, 4, 3), (2, 2, 2, 2, 1, 4, 8, 3), (2, 2, 2, 2, 2, 2, 4, 2),
        (2, 1, 4, 4, 2, 1, 2, 2), (2, 1, 2, 2, 4, 2, 4, 2), (1, 2, 2, 2, 4, 2, 4, 2),
        (2, 1, 1, 2, 4, 4, 8, 2), (1, 1, 2, 1, 8, 4, 8, 2), (1, 1, 1, 2, 8, 4, 8, 2),
        (1, 1, 1, 1, 8, 4, 4, 2),
    ),
    convolution=_sizes(
        ConvolutionSizes, (4, 1, 3, 4, 1, 2), (2, 2, 3, 4, 1, 2), (2, 2, 2, 4, 1, 2),
        (1, 1, 3, 4, 4, 2), (2, 2, 2, 2, 1, 5), (1, 4, 2, 2, 1, 4), (1, 2, 2, 2, 2, 3),
        (1, 1, 2, 2, 4, 3), (2, 2, 1, 2, 1, 2), (1, 1, 1, 2, 8, 3), (1, 1, 2, 1, 8, 3),
    ),
    attention=_sizes(
        AttentionSizes, (1, 4, 64), (1, 8, 64, 2), (1, 8, 64), (1, 4, 32), (1, 8, 32), (1, 2, 64),
        (1, 2, 32), (1, 3, 48), (1, 6, 48), (1, 6, 96), (1, 4, 16, 12), (2, 4, 64), (2, 4, 32),
    ),
    vector=_sizes(VectorSizes, (8, 8), (8, 16), (8, 32), (8, 64), (16, 8), (16, 16), (4, 32)),
    vector_rows=_sizes(VectorSizes, (8, 32)),
    vector_transposed=_sizes(VectorSizes, (1, 32), (1, 64), (1, 128)),
    dot=_sizes(DotSizes, (256, 1), (128, 2), (128, 1), (64, 1)),
    distance=_sizes(TiledSizes, (128, 64, 16, 8, 8, 1), (32, 32, 32, 4, 4, 1)),
    # Wide and narrow outputs, few rows, one row.
    registers=_sizes(
        RegisterSizes, (0, 1, 2), (0, 4, 2), (0, 8, 2), (0, 16, 1), (0, 16, 2), (1, 4, 1),
        (1, 4, 2), (1, 4, 4), (1, 3, 6),
    ),
    winograd=_sizes(RegisterSizes, (0, 16, 1), (0, 4, 2)),
    quantized_4bit=QuantizedSizes(tiles=1, subs_n=8, subs_k=1, blocks=4, ahead=0, segments=2),
    quantized_8bit=QuantizedSizes(tiles=1, subs_n=4, subs_k=4, blocks=1, ahead=1, segments=2),
    quantized_8bit_once=QuantizedSizes(tiles=1, subs_n=8, subs_k=2, blocks=2, ahead=1, segments=1),
    quantized_two=QuantizedSizes(tiles=2, subs_n=8, subs_k=1, blocks=4, ahead=1, segments=1),
    quantized_many=QuantizedSizes(tiles=2, subs_n=8, subs_k=1, blocks=2, ahead=1, segments=1),
    quantized_small=(
        QuantizedSizes(tiles=1, subs_n=2, subs_k=4, blocks=2, ahead=0, segments=1),
        QuantizedSizes(tiles=1, subs_n=2, subs_k=4, blocks=1, ahead=0, segments=1),
        QuantizedSizes(tiles=1, subs_n=4, subs_k=2, blocks=1, ahead=0, segments=1),
        QuantizedSizes(tiles=1, subs_n=4, subs_k=1, blocks=1, ahead=0, segments=1),
    ),
    quantized_integers=_sizes(
        IntegerSizes, (128, 128, 8, 64, 64), (128, 128, 4, 64, 64), (128, 64, 8, 64, 32),
        (64, 64, 8, 32, 32), (64, 64, 4, 32, 32), (32, 64, 8, 16, 32), (32, 32, 8, 16, 16),
    ),
    quantized_unrolled=True,
    nchw_pointwise=NchwStep(depth=32, unrolled=16, ahead=False),
    nchw_narrow=NchwStep(depth=2, unrolled=1, ahead=True),
    nchw_small=NchwStep(depth=8, unrolled=8, ahead=True),
    nchw_window=NchwStep(depth=8, unrolled=2, ahead=True),
)
# fmt: on
DEFAULT = DeviceProfile(
    name="default",
    has_fast_shared_memory=True,
    coalesces_accesses=True,
    needs_many_invocations=True,
    prefers_texel_reads=False,
    prefers_word_access=True,
    specialize_sizes=True,
    prefers_unrolled_code=True,
    compiles_at_dispatch=False,
    has_fast_float_atomics=True,
    has_fast_matrix_cores=True,
    packs_to_nearest=False,
    subgroup_size=0,
    max_unrolled_code=2048,
    max_depthwise_code=2048,
    loads_in_flight=8,
    max_iterations=2**31 - 1,
    dispatch_seconds=2.0,  # Windows' watchdog, by default
    iteration_seconds=50e-9,
    assumed_cores=16,  # those of a small GPU
    busy_invocations=16384,
    max_invocations_per_core=2048,
    enough_invocations_per_core=1024,
    min_invocations_per_core=256,
    depthwise_invocations_per_core=128,
    shared_memory_ratio=4,
    sector_bytes=32,
    transaction_bytes=128,
    cached_bytes=4 << 20,
    dispatch_cost_bytes=8 << 20,
    workgroup_size=256,
    max_select_workgroup=1024,
    max_sort_workgroup=256,
    max_workgroups_per_core=64,
    staged_image_bytes=40000,
    max_select_items=16,
    max_window_elements=96,
    max_tile_window_elements=64,
    max_unrolled_window=25,
    reduce_part_elements=4096,
    scan_part_elements=4096,
    select_part_elements=8192,
    attention_queries=4,
    attention_part_keys=128,
    max_counted_row=32,
    min_atomic_entries=64,
    min_norm_groups=16,
    max_norm_elements=16384,
    recurrent_elements=(64, 64),
    max_direct_flops=1 << 29,
    matmul=MATMUL,
    attention=ATTENTION,
    integers=INTEGERS,
    registers=REGISTERS,
    tiles=TILES,
)

register(Family(DEFAULT, lambda device: True, priority=-1))
