"""The coefficients of the cost models that choose tiles.

`lower/gpu_tiles.py` and `lower/register_tiles.py` have the formulas. Only the ratios of
coefficients matter, since a model compares kernels with each other.
"""

from typing import NamedTuple


class TiledCosts(NamedTuple):
    """Microseconds of matmul and convolution tiles in shared memory.

    Attributes:
        start: to start the dispatch.
        code: to fetch the unrolled loop, per multiply-add of one invocation in it.
        latency: to wait for memory and barriers, per step along K.
        window: to compute addresses in windows of a convolution, per vector of 4 elements of A
            that an invocation loads in a step.
        load: for a multiprocessor to load a vector of 4 elements.
        multiply_add: for a multiprocessor to do one.
        shared_read: part of `multiply_add` that each further read of shared memory adds.
        join: to add up slices of K, per further slice and workgroup of a multiprocessor.
        registers: of an invocation, and of it for each result (numbers, not microseconds).
        register_file: registers of a multiprocessor (a number).
        fullest: as that of `CoopmatCosts`.
    """

    start: float
    code: float
    latency: float
    window: float
    load: float
    multiply_add: float
    shared_read: float
    join: float
    registers: tuple[float, float]
    register_file: int
    fullest: float


class CoopmatCosts(NamedTuple):
    """Microseconds of the same tiles on matrix cores.

    Attributes:
        start: to start the dispatch.
        code: to fetch the unrolled loop, per product of fragments of 16 x 16 x 16 of one subgroup
            in it.
        latency: to wait for memory and barriers, per step along K.
        window: as that of `TiledCosts`.
        load: for a multiprocessor to load a vector of 4 or 8 elements.
        product: for a multiprocessor to multiply fragments of 16 x 16 x 16.
        shared_read: part of `product` that each fragment read from shared memory for it adds.
        store: to store a fragment of 16 x 16.
        result: for the device to store an element.
        registers: those that an invocation has beside its sums (a number, not microseconds).
        register_file: registers of a multiprocessor (a number).
        fullest: part of the work that takes as long as the multiprocessor with the most workgroups;
            the rest is shared evenly (a number).
    """

    start: float
    code: float
    latency: float
    window: float
    load: float
    product: float
    shared_read: float
    store: float
    result: float
    registers: int
    register_file: int
    fullest: float


class WorkgroupCoopmatCosts(NamedTuple):
    """Microseconds of tiles on matrix cores that the driver stages.

    Attributes:
        start: to start the dispatch.
        latency: to wait for memory and barriers, per step along K.
        load: for a multiprocessor to load a vector of 4 elements.
        product: for a multiprocessor to multiply fragments of 16 x 16 x 16.
        store: to store a fragment of 16 x 16.
        fullest: as that of `CoopmatCosts`.
    """

    start: float
    latency: float
    load: float
    product: float
    store: float
    fullest: float


class FragmentCosts(NamedTuple):
    """Microseconds of tiles on matrix cores whose operands are in the order of fragments. A
    multiprocessor works on `FragmentSizes.together` workgroups at a time.

    Attributes:
        start: to start the dispatch.
        product: for a subgroup to multiply fragments of 16 x 16 x 16: for each workgroup of the
            multiprocessor that has the most, and for each as if all times had as many.
        round: for each time that a multiprocessor starts workgroups.
        latency: of a step of 16 terms, for each such time.
        join: for a multiprocessor to add up a fragment of results of slices, per slice.
        weight: to read an element of the right operand.
        copy: to copy an element of an operand into the order of fragments before.
        copy_start: to start that copy, in a network; alone, `others_copied` has it.
        others: as that of `ConvolutionCosts`.
        others_copied: the same of a matmul alone, where an operand is copied.
    """

    start: float
    product: tuple[float, float]
    round: float
    latency: float
    join: float
    weight: float
    copy: float
    copy_start: float
    others: float
    others_copied: float


class ConvolutionCosts(NamedTuple):
    """Microseconds of convolutions on matrix cores whose weight is in the order of fragments. A
    multiprocessor works on `ConvolutionSizes.together` workgroups at a time.

    Attributes:
        start: to start the dispatch.
        code: to fetch the loop, per product of fragments of 16 x 16 x 32 of one subgroup.
        product: for a subgroup to multiply fragments of 16 x 16 x 32: if the work is shared evenly,
            for each workgroup of the multiprocessor that has the most, and for each as if all
            times had as many.
        load: part of `product` that it takes to load a fragment.
        latency: to wait for memory, per round and step of the loop.
        store: for a multiprocessor to store a fragment of results.
        round: for each time that a multiprocessor starts workgroups.
        result: to write an element of the result.
        join: for a multiprocessor to add up a fragment of results of slices.
        others: factor on the costs that the models of other kernels give, which are fitted to a
            kernel behind itself, to compare with these.
    """

    start: float
    code: float
    product: tuple[float, float, float]
    load: float
    latency: float
    store: float
    round: float
    result: float
    join: float
    others: float


class VectorCosts(NamedTuple):
    """Microseconds of matmuls of few rows.

    Attributes:
        start: to start the dispatch.
        code: to fetch the unrolled loop, per instruction of one invocation in it.
        latency: to wait for memory, per step along K.
        load: for a multiprocessor to load a vector of 4 elements.
        multiply_add: for a multiprocessor to do one.
        join: to add up what invocations have, per row, invocation and workgroup of a
            multiprocessor.
    """

    start: float
    code: float
    latency: float
    load: float
    multiply_add: float
    join: float


class MatmulCosts(NamedTuple):
    """The kernels of devices with fast shared memory.

    Attributes:
        tiled: tiles in shared memory.
        window_tiled: the same for convolutions whose window is read element by element.
        coopmat: tiles on matrix cores.
        window_coopmat: the same for convolutions whose window is read element by element.
        workgroup_coopmat: the same, staged by the driver.
        fragments: the same, with operands in the order of fragments.
        convolution: convolutions whose weight is in the order of fragments.
        vector: few rows.
        split_start: microseconds to start the dispatch that adds up the parts of a split K.
        split_element: microseconds of that dispatch, per element of a part.
    """

    tiled: TiledCosts
    window_tiled: TiledCosts
    coopmat: CoopmatCosts
    window_coopmat: CoopmatCosts
    workgroup_coopmat: WorkgroupCoopmatCosts
    fragments: FragmentCosts
    convolution: ConvolutionCosts
    vector: VectorCosts
    split_start: float
    split_element: float


class AttentionCosts(NamedTuple):
    """Microseconds of attention on matrix cores (`attention_coopmat.comp`).

    Attributes:
        start: to start the dispatch.
        group: for a multiprocessor to start and end a workgroup.
        latency: to wait for memory and barriers, per step over the keys.
        step: of a step that does not depend on how many workgroups a multiprocessor has, per 64
            keys and 16 queries of a subgroup.
        product: for a multiprocessor to multiply 16 queries by 16 keys of 64 columns, both times.
        softmax: for the softmax of 16 queries over 64 keys.
        read: for a subgroup to read 16 keys of 64 columns from shared memory.
        stage: for a workgroup to store them there.
        registers: of an invocation, for each that its fragments and loads need, and beside those
            (numbers, not microseconds).
        register_file: registers of a multiprocessor (a number).
        fullest: as that of `CoopmatCosts`.
    """

    start: float
    group: float
    latency: float
    step: float
    product: float
    softmax: float
    read: float
    stage: float
    registers: tuple[float, float]
    register_file: int
    fullest: float


class IntegerCosts(NamedTuple):
    """Microseconds of int8 times int8 on matrix cores (`qtile_coopmat.glslh`).

    Attributes:
        start: to start the dispatch.
        latency: to wait for memory and barriers, per step along K.
        window: to compute addresses in windows of a convolution, per load of an invocation in a step.
        load: for a multiprocessor to load a value into shared memory and from there.
        product: for a multiprocessor to multiply two values.
        resident: workgroups of a multiprocessor at a time (a number).
        fullest: as that of `CoopmatCosts`.
    """

    start: float
    latency: float
    window: float
    load: float
    product: float
    resident: int
    fullest: float


class RegisterCosts(NamedTuple):
    """The kernels that keep tiles in registers, and exchange data inside a subgroup.

    Attributes:
        start: nanoseconds to start a workgroup.
        store: nanoseconds to store a vector of 4 floats per invocation.
        step: nanoseconds of the loop, per 4 steps along K.
        multiply_add: nanoseconds to multiply and add a vector of 4 floats per invocation, 4 steps
            along K.
        load: nanoseconds to load a vector per invocation.
        spill: nanoseconds per vector of the tile that does not fit the registers, 4 steps along K.
        kept_vectors: vectors of 4 floats that fit the registers.
        join: nanoseconds to add a product of Winograd's algorithm to one of its sums, per vector of 4
            floats.
        winograd_block: nanoseconds to transform blocks of 4 x 4 input pixels, 4 channels per
            invocation.
        scalar_loads: loads of a vector that take as long as loading its 4 elements one by one.
        attention_key: queries of an invocation that take as long as loading a key.
        depthwise_block: pixels of a depthwise convolution that take as long as starting a block.
        depthwise_spill: factor of the time of blocks of 8 pixels, which spill registers.
    """

    start: float
    store: float
    step: float
    multiply_add: float
    load: float
    spill: float
    kept_vectors: int
    join: float
    winograd_block: float
    scalar_loads: float
    attention_key: float
    depthwise_block: float
    depthwise_spill: float
