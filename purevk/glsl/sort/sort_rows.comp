#version 450
#extension GL_GOOGLE_include_directive : enable
// Sorts rows that fit into shared memory, or blocks of longer rows, with the index of each element. A
// workgroup takes one row or block.
//
// Elements are mapped to unsigned keys of the same order. They are counted in bins of equal width
// between the least and the largest finite element: first by value, and if some bins are crowded, by
// key. Each element goes to its bin, and then counts the elements before it in the bin.
//
// If keys are crowded too, a bitonic network sorts the row. An invocation has EACH elements in
// registers for several steps of it. Every step orders the same way: the first step of a merge
// compares mirrored positions. Positions behind the end of a row come last.
//
// Buffers: x, keys (the sorted elements) and indices (theirs).
// Offsets and strides are in elements. Outer dim 0 is the innermost.
// Macros:
//   T_X, T_KEY  element types of x and of the result
//   T_INDEX     type of the indices
//   ACC         type of the comparison, float or int
//   FROM_X(v)   converts an element of x to ACC
//   TO_KEY(v)   converts ACC to an element of the result
//   LEVELS      log2 of the elements per invocation
//   LOCAL       invocations of a workgroup, a power of 2; a row has at most LOCAL << LEVELS elements
//   BINS        bins, a power of 2 and a multiple of 2 LOCAL
//   CROWD       elements of a bin, at most
//   DESCENDING  1: the largest elements come first
//   SUBGROUP    1: uses subgroup operations (before.glslh)
//   INTEGERS    defined if ACC is int
// local_size_x is LOCAL.
#undef VEC4
#define VEC4 0
#pragma purevk macro INTEGERS
#include "core/rows.glslh"
#include "core/math.glslh"
#include "core/order.glslh"
#include "core/before.glslh"

#ifndef T_KEY
#define T_KEY T_X
#endif
#ifndef T_INDEX
#define T_INDEX int
#endif
#ifndef ACC
#define ACC float
#endif
#ifndef FROM_X
#define FROM_X(v) ACC(v)
#endif
#ifndef TO_KEY
#define TO_KEY(v) T_KEY(v)
#endif
#ifndef LEVELS
#define LEVELS 4
#endif
#if LEVELS > 4
#error "an invocation sorts 16 elements at most"
#endif
#ifndef DESCENDING
#define DESCENDING 0
#endif
#ifndef BINS
#define BINS (2 * LOCAL)
#endif
#ifndef CROWD
#define CROWD 64
#endif
#define IN_ORDER(key) (DESCENDING == 1 ? ~(key) : (key))

PARAM(0, x_offset)
PARAM(1, rows)
PARAM(2, row_length)
PARAM(3, step)  // stride along a row
PARAM(4, stride_0)  // of the outer dims
PARAM(5, stride_1)
PARAM(6, stride_2)
PARAM(7, stride_3)
PARAM(8, size_0)  // of the outer dims
PARAM(9, size_1)
PARAM(10, size_2)
PARAM(11, keep)  // elements of a row or block that are stored
PARAM(12, values_offset)  // of the sorted elements
PARAM(13, values_step)
PARAM(14, values_stride_0)
PARAM(15, values_stride_1)
PARAM(16, values_stride_2)
PARAM(17, values_stride_3)
PARAM(18, indices_offset)  // of their indices
PARAM(19, indices_step)
PARAM(20, indices_stride_0)
PARAM(21, indices_stride_1)
PARAM(22, indices_stride_2)
PARAM(23, indices_stride_3)
PARAM(24, blocks)  // of a row; all but the last one have BLOCK elements

WRITEONLY_BUFFER(1, keys, T_KEY)
WRITEONLY_BUFFER(2, indices, T_INDEX)

#define EACH (1 << LEVELS)
#define BLOCK (LOCAL * EACH)
// Padded, so that neighbouring invocations, which have EACH neighbouring elements each, use different
// banks.
#define AT(i) ((i) + ((i) >> LEVELS))
shared uint shared_key[AT(BLOCK)];
shared int shared_index[AT(BLOCK)];

uint key[EACH];
int index[EACH];

void order(int a, int b) {
    uint key_a = key[a], key_b = key[b];
    int index_a = index[a], index_b = index[b];
    bool swap = key_b < key_a || key_b == key_a && index_b < index_a;
    key[a] = swap ? key_b : key_a;
    key[b] = swap ? key_a : key_b;
    index[a] = swap ? index_b : index_a;
    index[b] = swap ? index_a : index_b;
}

// Orders the pairs of elements of this invocation that are `distance` apart.
void halve(int distance) {
    UNROLL for (int k = 0; k < EACH; k++) {
        if ((k & distance) == 0) order(k, k + distance);
    }
}

// The steps of the network within an invocation, written out: a compiler would not fully unroll a loop
// over them, and registers cannot be indexed.
void order_mirrored(int whole) {
    UNROLL for (int k = 0; k < EACH; k++) {
        if ((k ^ (whole - 1)) > k) order(k, k ^ (whole - 1));
    }
}

void order_own() {
    order_mirrored(2);
#if LEVELS > 1
    order_mirrored(4);
    halve(1);
#endif
#if LEVELS > 2
    order_mirrored(8);
    halve(2);
    halve(1);
#endif
#if LEVELS > 3
    order_mirrored(16);
    halve(4);
    halve(2);
    halve(1);
#endif
}

// LEVELS steps of the merge that begins with a span of 2^log_span, without the first `done`. The first
// step is mirrored, or not.
void merge(int log_span, bool mirrored, int done) {
    int log_step = log_span - LEVELS, at = MINE & ((1 << log_step) - 1);
    int first = ((MINE >> log_step) << log_span) + at, second = first;
    if (mirrored) second += (1 << log_span) - 1 - 2 * at - ((EACH - 1) << log_step);
    int to[EACH];
    UNROLL for (int k = 0; k < EACH; k++) {
        int from = (k < EACH / 2 ? first : second) + (k << log_step);
        to[k] = AT(from);
        key[k] = shared_key[to[k]];
        index[k] = shared_index[to[k]];
    }
    if (mirrored) {
        UNROLL for (int k = 0; k < EACH / 2; k++) order(k, EACH - 1 - k);
    } else if (done == 0) {
        halve(EACH / 2);
    }
#if LEVELS > 1
    if (done <= 1) halve(EACH / 4);
#endif
#if LEVELS > 2
    if (done <= 2) halve(EACH / 8);
#endif
#if LEVELS > 3
    halve(1);
#endif
    UNROLL for (int k = 0; k < EACH; k++) {
        shared_key[to[k]] = key[k];
        shared_index[to[k]] = index[k];
    }
    barrier();
}

ACC number_of(uint ordered, int x_at) {
    uint bits = IN_ORDER(ordered);
#ifdef INTEGERS
    return int(bits ^ 0x80000000u);
#else
    if (bits == PV_KEY_ZERO || bits == PV_KEY_NAN) return FROM_X(READ_X(x_at));
    return pv_float_of(bits);
#endif
}

// Stores an element and its index in a row that has `start` elements before the block, behind `rank` others.
void put(uint ordered, int from, int rank, int base, int start, int values_at, int indices_at) {
    buf_keys[values_at + rank * values_step] = TO_KEY(number_of(ordered, base + from * step));
    buf_indices[indices_at + rank * indices_step] = T_INDEX(start + from);
}

// How many elements bins have, and later how many come before each bin: two numbers per word.
#define SHARE (BINS / 2 / LOCAL)
#define HALF(bin) (16 * int((bin) & 1u))
#define BIN(bin) (bins[(bin) >> 1] >> HALF(bin) & 0xffffu)
shared uint bins[BINS / 2 + 1];
shared uint least, largest, most;

// Whether bins are of keys rather than numbers, and their lowest key or number.
bool by_key;
uint low;
float low_number, scale;

// Sets the range of the bins; `keys`: of keys rather than numbers. Returns whether there is one.
bool set_range(bool keys) {
    by_key = keys;
    low = least;
    float span = float(largest - low);
#ifndef INTEGERS
    low_number = pv_float_of(low);
    if (!keys) span = pv_float_of(largest) - low_number;
#endif
    scale = float(BINS) / span;
    return least < largest && span > 1e-30 && span < 1e37;
}

uint bin_of(uint ordered) {
    uint key = clamp(IN_ORDER(ordered), low, largest);
    float at = float(key - low);
#ifndef INTEGERS
    if (!by_key) at = pv_float_of(key) - low_number;
#endif
    uint bin = min(uint(at * scale), uint(BINS - 1));
    return DESCENDING == 1 ? uint(BINS - 1) - bin : bin;
}

// Moves the elements of `key` to their bins, each with its bin and its index. Returns whether there are
// few enough in each bin.
bool fill_bins(int row_length) {
    uint spot[EACH];  // bin, and position in it
    UNROLL for (int k = 0; k < EACH; k++) {
        if (k * LOCAL + MINE < row_length) {
            uint bin = bin_of(key[k]);
            spot[k] = bin << 16 | atomicAdd(bins[bin >> 1], 1u << HALF(bin)) >> HALF(bin) & 0xffffu;
        }
    }
    barrier();
    uint some[SHARE], total = 0u, crowd = 0u;
    UNROLL for (int b = 0; b < SHARE; b++) {
        some[b] = bins[SHARE * MINE + b];
        uint a = some[b] & 0xffffu, c = some[b] >> 16;
        total += a + c;
        crowd = max(crowd, max(a, c));
    }
    if (crowd > CROWD) most = crowd;
    uint ahead = sum_before(total);
    UNROLL for (int b = 0; b < SHARE; b++) {
        uint next = ahead + (some[b] & 0xffffu);
        bins[SHARE * MINE + b] = next << 16 | ahead;
        ahead = next + (some[b] >> 16);
    }
    barrier();
    if (most > CROWD) {
        barrier();
        if (MINE == 0) most = 0u;
        UNROLL for (int b = 0; b < SHARE; b++) bins[SHARE * MINE + b] = 0u;
        barrier();
        return false;
    }
    UNROLL for (int k = 0; k < EACH; k++) {
        int e = k * LOCAL + MINE;
        if (e < row_length) {
            uint bin = spot[k] >> 16, to = BIN(bin) + (spot[k] & 0xffffu);
            shared_key[to] = key[k];
            shared_index[to] = int(bin << 16) | e;
        }
    }
    barrier();
    return true;
}

// How many elements come before element p, which is in its bin.
int rank_of(int p) {
    uint key = shared_key[p];
    int index = shared_index[p];
    uint bin = uint(index) >> 16;
    int rank = int(BIN(bin)), end = int(BIN(bin + 1u));
    for (int q = rank; q < end; q++) {
        uint other = shared_key[q];
        if (other < key || other == key && q != p && shared_index[q] < index) rank++;
    }
    return rank;
}

// The larger of the bins, whose elements may all be in CROWD to a bin, and the network.
LOOPS(loop(ceil(rows * blocks, workgroups), loop(ceil(BINS / 2, LOCAL)) + 2 * SUM_BEFORE_LOOPS + loop(EACH, loop(CROWD)) + loop(log2(BLOCK), loop(log2(BLOCK)))))

void main() {
    int all_blocks = rows * blocks;
    for (int i = WORKGROUP; i < all_blocks; i += WORKGROUPS) {
        int row = i / blocks, start = (i - row * blocks) * BLOCK, length = min(row_length - start, BLOCK);
        int q1 = row / size_0, q2 = q1 / size_1, q3 = q2 / size_2;
        int c0 = row - q1 * size_0, c1 = q1 - q2 * size_1, c2 = q2 - q3 * size_2;
        int base = x_offset + c0 * stride_0 + c1 * stride_1 + c2 * stride_2 + q3 * stride_3 + start * step;
        int values_at = values_offset + c0 * values_stride_0 + c1 * values_stride_1 + c2 * values_stride_2 + q3 * values_stride_3 + start * values_step;
        int indices_at = indices_offset + c0 * indices_stride_0 + c1 * indices_stride_1 + c2 * indices_stride_2 + q3 * indices_stride_3 + start * indices_step;
        UNROLL for (int k = 0; k < EACH; k++) {
            int e = k * LOCAL + MINE;
            key[k] = 0xffffffffu;
            if (e < length) key[k] = IN_ORDER(pv_key(FROM_X(READ_X(base + e * step))));
        }
        for (int b = MINE; b < BINS / 2; b += LOCAL) bins[b] = 0u;
        if (MINE == 0) {
            bins[BINS / 2] = uint(length);
            least = 0xffffffffu;
            largest = 0u;
            most = 0u;
        }
        barrier();
        uint mine_least = 0xffffffffu, mine_largest = 0u;
        UNROLL for (int k = 0; k < EACH; k++) {
            if (k * LOCAL + MINE >= length) continue;
            uint made = IN_ORDER(key[k]);
#ifndef INTEGERS
            if (made == 0u || made >= PV_KEY_INF) continue;
#endif
            mine_least = min(mine_least, made);
            mine_largest = max(mine_largest, made);
        }
#if SUBGROUP
        mine_least = subgroupMin(mine_least);
        mine_largest = subgroupMax(mine_largest);
        if (gl_SubgroupInvocationID == 0u)
#endif
        {
            atomicMin(least, mine_least);
            atomicMax(largest, mine_largest);
        }
        barrier();
        bool filled = false;
#ifndef INTEGERS
        if (set_range(false)) filled = fill_bins(length);
#endif
        if (!filled && set_range(true)) filled = fill_bins(length);
        if (filled) {
            for (int p = MINE; p < length; p += LOCAL) {
                int rank = rank_of(p);
                if (rank < keep) put(shared_key[p], shared_index[p] & 0xffff, rank, base, start, values_at, indices_at);
            }
            barrier();
            continue;
        }
        UNROLL for (int k = 0; k < EACH; k++) index[k] = k * LOCAL + MINE < length ? k * LOCAL + MINE : PV_NOWHERE;
        // The elements of an invocation first, in registers.
        order_own();
        UNROLL for (int k = 0; k < EACH; k++) {
            shared_key[AT(MINE * EACH + k)] = key[k];
            shared_index[AT(MINE * EACH + k)] = index[k];
        }
        barrier();
        for (int log_whole = LEVELS + 1; (1 << log_whole) <= BLOCK; log_whole++) {
            merge(log_whole, true, 0);
            for (int left = log_whole - LEVELS; left > 0; left -= LEVELS) merge(max(left, LEVELS), false, max(LEVELS - left, 0));
        }
        UNROLL for (int k = 0; k < EACH; k++) {
            int e = k * LOCAL + MINE;
            if (e < min(keep, length)) put(shared_key[AT(e)], shared_index[AT(e)], e, base, start, values_at, indices_at);
        }
        barrier();
    }
}
