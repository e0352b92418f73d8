#version 450
#extension GL_GOOGLE_include_directive : enable
// Sorts rows that fit into shared memory, with the index of each element. Elements are mapped to
// unsigned keys of the same order. They are counted in bins of equal width between the least and
// the largest finite one, by value or, where these crowd in some, by key; each goes to its bin's
// places, and then counts those before it in the bin. Where keys are crowded, too, an invocation
// has EACH elements in registers for several steps of a bitonic network. Every step orders the same
// way: the first of a merge compares mirrored places. What is behind the end of a row is behind all
// else. A workgroup takes a row.
//
// Bindings: 0 x, 1 the sorted elements, 2 their indices.
// Offsets and strides are in elements; outer dim 0 is the innermost.
// Macros:
//   T_X, T_KEY, ACC, FROM_X(v), TO_KEY(v)  element types, the type that they are converted to
//   (float or int), and conversions T_INDEX      type of the indices
//   LEVELS       log2 of the elements of an invocation
//   LOCAL        invocations of a workgroup, a power of 2; a row has at most LOCAL << LEVELS
//   elements BINS         a multiple of 2 LOCAL, a power of 2
//   CROWD        elements of a bin, at most
//   DESCENDING   0 or 1
//   SUBGROUP     before.glslh
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
PARAM(11, keep)  // elements of a row that are stored
PARAM(12, v_offset)  // of the sorted elements
PARAM(13, v_step)
PARAM(14, v_stride_0)
PARAM(15, v_stride_1)
PARAM(16, v_stride_2)
PARAM(17, v_stride_3)
PARAM(18, p_offset)  // of their indices
PARAM(19, p_step)
PARAM(20, p_stride_0)
PARAM(21, p_stride_1)
PARAM(22, p_stride_2)
PARAM(23, p_stride_3)

layout(set = 0, binding = 1) writeonly buffer BufKeys { T_KEY buf_keys[]; };
layout(set = 0, binding = 2) writeonly buffer BufPlaces { T_INDEX buf_places[]; };

#define EACH (1 << LEVELS)
#define BLOCK (LOCAL * EACH)
// Padded, so that neighbouring invocations, which have EACH neighbours each, use different banks.
#define AT(i) ((i) + ((i) >> LEVELS))
shared uint shared_key[AT(BLOCK)];
shared int shared_place[AT(BLOCK)];

uint key[EACH];
int place[EACH];

void order(int a, int b) {
    uint key_a = key[a], key_b = key[b];
    int place_a = place[a], place_b = place[b];
    bool swap = key_b < key_a || key_b == key_a && place_b < place_a;
    key[a] = swap ? key_b : key_a;
    key[b] = swap ? key_a : key_b;
    place[a] = swap ? place_b : place_a;
    place[b] = swap ? place_a : place_b;
}

// Orders the pairs of the elements of this invocation that are `distance` of them apart.
void halve(int distance) {
    UNROLL for (int k = 0; k < EACH; k++) {
        if ((k & distance) == 0) order(k, k + distance);
    }
}

// The steps of the network within an invocation, one by one: loops over them would not be unrolled
// in full, and registers have no indices.
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

// LEVELS steps, less the first `done`, of the merge that begins with a span; the first is mirrored
// or not.
void merge(int log_span, bool mirrored, int done) {
    int log_step = log_span - LEVELS, at = MINE & ((1 << log_step) - 1);
    int first = ((MINE >> log_step) << log_span) + at, second = first;
    if (mirrored) second += (1 << log_span) - 1 - 2 * at - ((EACH - 1) << log_step);
    int to[EACH];
    UNROLL for (int k = 0; k < EACH; k++) {
        int from = (k < EACH / 2 ? first : second) + (k << log_step);
        to[k] = AT(from);
        key[k] = shared_key[to[k]];
        place[k] = shared_place[to[k]];
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
        shared_place[to[k]] = place[k];
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

// Stores an element and its index behind `rank` others.
void put(uint ordered, int from, int rank, int base, int v_at, int p_at) {
    buf_keys[v_at + rank * v_step] = TO_KEY(number_of(ordered, base + from * step));
    buf_places[p_at + rank * p_step] = T_INDEX(from);
}

// How many elements bins have, then how many are before them: two to a word.
#define SHARE (BINS / 2 / LOCAL)
#define HALF(bin) (16 * int((bin) & 1u))
#define BIN(bin) (bins[(bin) >> 1] >> HALF(bin) & 0xffffu)
shared uint bins[BINS / 2 + 1];
shared uint least, largest, most;

// Whether bins are of numbers, or of keys, and where they begin.
bool by_key;
uint low;
float low_number, scale;

// Sets what bins are of, and returns whether there is a range for them.
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

// Puts the elements of `key` into the places of their bins, with the bin beside the index; returns
// whether there are few enough in each.
bool fill_bins(int row_length) {
    uint spot[EACH];  // bin, and place in it
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
            shared_place[to] = int(bin << 16) | e;
        }
    }
    barrier();
    return true;
}

// How many come before element p, which is in the places of its bin.
int rank_of(int p) {
    uint key = shared_key[p];
    int place = shared_place[p];
    uint bin = uint(place) >> 16;
    int rank = int(BIN(bin)), end = int(BIN(bin + 1u));
    for (int q = rank; q < end; q++) {
        uint other = shared_key[q];
        if (other < key || other == key && q != p && shared_place[q] < place) rank++;
    }
    return rank;
}

void main() {
    for (int row = WORKGROUP; row < rows; row += WORKGROUPS) {
        int q1 = row / size_0, q2 = q1 / size_1, q3 = q2 / size_2;
        int c0 = row - q1 * size_0, c1 = q1 - q2 * size_1, c2 = q2 - q3 * size_2;
        int base = x_offset + c0 * stride_0 + c1 * stride_1 + c2 * stride_2 + q3 * stride_3;
        int v_at = v_offset + c0 * v_stride_0 + c1 * v_stride_1 + c2 * v_stride_2 + q3 * v_stride_3;
        int p_at = p_offset + c0 * p_stride_0 + c1 * p_stride_1 + c2 * p_stride_2 + q3 * p_stride_3;
        UNROLL for (int k = 0; k < EACH; k++) {
            int e = k * LOCAL + MINE;
            key[k] = 0xffffffffu;
            if (e < row_length) key[k] = IN_ORDER(pv_key(FROM_X(READ_X(base + e * step))));
        }
        for (int b = MINE; b < BINS / 2; b += LOCAL) bins[b] = 0u;
        if (MINE == 0) {
            bins[BINS / 2] = uint(row_length);
            least = 0xffffffffu;
            largest = 0u;
            most = 0u;
        }
        barrier();
        uint mine_least = 0xffffffffu, mine_largest = 0u;
        UNROLL for (int k = 0; k < EACH; k++) {
            if (k * LOCAL + MINE >= row_length) continue;
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
        if (set_range(false)) filled = fill_bins(row_length);
#endif
        if (!filled && set_range(true)) filled = fill_bins(row_length);
        if (filled) {
            for (int p = MINE; p < row_length; p += LOCAL) {
                int rank = rank_of(p);
                if (rank < keep) put(shared_key[p], shared_place[p] & 0xffff, rank, base, v_at, p_at);
            }
            barrier();
            continue;
        }
        UNROLL for (int k = 0; k < EACH; k++) place[k] = k * LOCAL + MINE < row_length ? k * LOCAL + MINE : PV_NOWHERE;
        // Those of an invocation first, in registers.
        order_own();
        UNROLL for (int k = 0; k < EACH; k++) {
            shared_key[AT(MINE * EACH + k)] = key[k];
            shared_place[AT(MINE * EACH + k)] = place[k];
        }
        barrier();
        for (int log_whole = LEVELS + 1; (1 << log_whole) <= BLOCK; log_whole++) {
            merge(log_whole, true, 0);
            for (int left = log_whole - LEVELS; left > 0; left -= LEVELS) merge(max(left, LEVELS), false, max(LEVELS - left, 0));
        }
        UNROLL for (int k = 0; k < EACH; k++) {
            int e = k * LOCAL + MINE;
            if (e < keep) put(shared_key[AT(e)], shared_place[AT(e)], e, base, v_at, p_at);
        }
        barrier();
    }
}
