#version 450
#extension GL_GOOGLE_include_directive : enable
// Finds the elements of each row that come first in its order, or the one of a given rank, without
// sorting the row. A workgroup takes one row.
//
// Elements are mapped to unsigned keys of the same order. The keys between the least and the largest
// are counted in bins. The bin that has the wanted rank is divided again, and so on, until few
// elements are left in it. If these are equal, their indices are divided instead. What comes before
// the bin, and the bin itself, are then sorted in shared memory.
//
// If few elements are wanted, a bound comes first: the least key of each of GROUPS groups of the row
// is taken, and at least as many elements as are wanted are not after the bound. If all elements up
// to the bound fit into the list, nothing is counted.
//
// Buffers: x, from (if INDEXED: the elements' indices in their rows, dense), keys (the selected
// elements) and indices (theirs).
// Offsets and strides are in elements. Outer dim 0 is the innermost.
// Macros:
//   T_X, T_KEY   element types of x and of the result
//   T_INDEX      type of the indices
//   ACC          type of the comparison
//   FROM_X(v)    converts an element of x to ACC
//   TO_KEY(v)    converts ACC to an element of the result
//   VEC4         1: x is read as vec4
//   LOCAL        invocations of a workgroup, a power of 2
//   BINS         bins, a power of 2 and a multiple of LOCAL
//   GROUPS       0, or (RANK 0) groups whose least keys give the bound: a power of 2, at most LOCAL,
//                and more than are wanted
//   PER          elements that an invocation reads at once, at most 32; a multiple of 4 if VEC4
//   CACHED       1: a row has at most LOCAL PER elements, and is read once; 2: rare passes do not
//                read it again either
//   FULL         1: rows are a multiple of LOCAL PER
//   DESCENDING   1: the largest elements come first
//   RANK         0: the first elements; 1: the element of a rank; 2: the lower median, or the first
//                NaN; 3: the lower median of all but NaNs
//   LIST         elements that are sorted in shared memory, at most; a multiple of 4
//   LIMIT        elements of LIST that may be in the last bin
//   BITONIC      1: the list is sorted by a bitonic network, and LIST is a power of 2; 0: all pairs
//                are compared
//   SUBGROUP     1: uses subgroup operations; LOCAL is a multiple of the subgroup size
//   INTEGERS     defined if ACC is int
//   WIDE_KEY     1: ACC is int64_t
//   INDEXED      1: binding 1 has the elements' indices; 0: the index is the position in the row
// local_size_x is LOCAL.
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
#ifndef BINS
#define BINS 256
#endif
#ifndef PER
#define PER 4
#endif
#ifndef CACHED
#define CACHED 0
#endif
#ifndef FULL
#define FULL 0
#endif
#ifndef DESCENDING
#define DESCENDING 0
#endif
#ifndef RANK
#define RANK 0
#endif
#ifndef LIST
#define LIST 128
#endif
#ifndef LIMIT
#define LIMIT 64
#endif
#ifndef BITONIC
#define BITONIC 0
#endif
#ifndef INDEXED
#define INDEXED 0
#endif
#ifndef WIDE_KEY
#define WIDE_KEY 0
#endif
#ifndef GROUPS
#define GROUPS 0
#endif

PARAM(0, x_offset)
PARAM(1, rows)
PARAM(2, whole_length)  // of a row
PARAM(3, step)  // stride along a row
PARAM(4, stride_0)  // of the outer dims
PARAM(5, stride_1)
PARAM(6, stride_2)
PARAM(7, stride_3)
PARAM(8, size_0)  // of the outer dims
PARAM(9, size_1)
PARAM(10, size_2)
PARAM(11, keep)  // how many come first, or (RANK) the rank, from 1 on
PARAM(12, parts)  // of a row, each a row of its own; the first in the grid is the innermost
PARAM(13, part_length)
PARAM(14, values_offset)  // of the stored elements
PARAM(15, values_step)
PARAM(16, values_stride_0)
PARAM(17, values_stride_1)
PARAM(18, values_stride_2)
PARAM(19, values_stride_3)
PARAM(20, values_part)  // stride of the parts
PARAM(21, indices_offset)  // of the stored indices
PARAM(22, indices_step)
PARAM(23, indices_stride_0)
PARAM(24, indices_stride_1)
PARAM(25, indices_stride_2)
PARAM(26, indices_stride_3)
PARAM(27, indices_part)

#if INDEXED
READONLY_BUFFER(1, from, int)
#define OUTPUT 2
#else
#define OUTPUT 1
#endif
WRITEONLY_BUFFER(OUTPUT, keys, T_KEY)
WRITEONLY_BUFFER(OUTPUT + 1, indices, T_INDEX)

#define ITEM (VEC4 == 1 ? 4 : 1)
#if VEC4
#define ELEMENT(i) FROM_X(READ4_X(i)[(i) & 3])
#else
#define ELEMENT(i) FROM_X(READ_X(i))
#endif

#if WIDE_KEY
#define KEY uint64_t
#else
#define KEY uint
#endif
#define ORDERED(v) (DESCENDING == 1 ? ~pv_key(v) : pv_key(v))
#define DIGIT findMSB(uint(BINS))

// The greatest number of `bits` bits.
KEY all_ones(int bits) { return bits == 0 ? KEY(0) : KEY(~KEY(0)) >> (32 * (WIDE_KEY + 1) - bits); }

#define SHARE (BINS / LOCAL)
shared uint bins[BINS];
shared uint least, largest, listed, nans;
shared uint found[3];  // bin, elements before it, elements in it
#if GROUPS
shared uint firsts[GROUPS];
shared uint bound;
#endif
shared KEY list_key[LIST];
shared int list_index[LIST];

int base, row_length;

// The index in the row of element j of this invocation, from `first` on.
#if VEC4
#define INDEX(j) (first + ((j) / 4 * LOCAL + MINE) * 4 + (j) % 4)
#else
#define INDEX(j) (first + (j) * LOCAL + MINE)
#endif
#if FULL
#define HAS(j) true
#else
#define HAS(j) (INDEX(j) < row_length)
#endif

// Makes a function that reads COUNT elements.
#if VEC4
#define DEFINE_LOAD(name, COUNT)                                                                              \
    void name(int first, out KEY made[COUNT]) {                                                              \
        X4 some[COUNT / 4];                                                                                   \
        UNROLL for (int j = 0; j < COUNT; j += 4) if (HAS(j)) some[j / 4] = READ4_X(base + INDEX(j));         \
        UNROLL for (int j = 0; j < COUNT; j++) made[j] = ORDERED(FROM_X(some[j / 4][j % 4]));                 \
    }
#else
#define DEFINE_LOAD(name, COUNT)                                                                              \
    void name(int first, out KEY made[COUNT]) {                                                              \
        ACC some[COUNT];                                                                                      \
        UNROLL for (int j = 0; j < COUNT; j++) some[j] = HAS(j) ? FROM_X(READ_X(base + INDEX(j) * step)) : ACC(0); \
        UNROLL for (int j = 0; j < COUNT; j++) made[j] = ORDERED(some[j]);                                    \
    }
#endif

// KEPT(BODY) runs BODY for each `key`, with INDEX(j), of a row that is kept in registers.
// AGAIN(BODY) reads the row again, in batches. It serves long rows, and rare passes, which then need
// few registers and little code.
#if CACHED
#define BATCH ITEM
KEY keys[PER];
DEFINE_LOAD(load, PER)
#define KEPT(BODY)                                                                                            \
    {                                                                                                         \
        const int first = 0;                                                                                  \
        UNROLL for (int j = 0; j < PER; j++) {                                                                \
            KEY key = keys[j];                                                                                \
            if (HAS(j)) BODY                                                                                  \
        }                                                                                                     \
    }
#else
#define BATCH PER
#define KEPT(BODY) AGAIN(BODY)
#endif
#if CACHED == 2
#define AGAIN(BODY) KEPT(BODY)
#else
DEFINE_LOAD(load_again, BATCH)
#define AGAIN(BODY)                                                                                           \
    for (int first = 0; first < row_length; first += LOCAL * BATCH) {                                         \
        KEY batch[BATCH];                                                                                     \
        load_again(first, batch);                                                                             \
        UNROLL for (int j = 0; j < BATCH; j++) {                                                              \
            KEY key = batch[j];                                                                               \
            if (HAS(j)) BODY                                                                                  \
        }                                                                                                     \
    }
#endif

// The element of a key. It is read again if the key stands for several elements.
ACC number_of(KEY ordered, int x_at) {
#if !WIDE_KEY
    uint key = DESCENDING == 1 ? ~ordered : ordered;
#ifdef INTEGERS
    return ACC(key ^ 0x80000000u);
#else
    if (key != PV_KEY_ZERO && key != PV_KEY_NAN) return pv_float_of(key);
#endif
#endif
    return ELEMENT(x_at);
}

// Appends an element that is wanted, or may be, to the list. There may be more elements up to the bound
// than the list can hold.
void list(KEY key, int index) {
    uint n = atomicAdd(listed, 1u);
#if GROUPS
    if (n >= LIST) return;
#endif
    list_key[n] = key;
    list_index[n] = index;
}

// Entries behind the end of the list come last.
void clear_list() {
    if (MINE == 0) listed = 0u;
#if !BITONIC
    for (int e = MINE; e < LIST; e += LOCAL) {
        list_key[e] = ~KEY(0);
        list_index[e] = PV_NOWHERE;
    }
#endif
}

bool before(KEY a, int i, KEY b, int j) { return a != b ? a < b : i < j; }

#if BITONIC
void order(int low, int high, int count) {
    if (high >= count || !before(list_key[high], list_index[high], list_key[low], list_index[low])) return;
    KEY k = list_key[low];
    int p = list_index[low];
    list_key[low] = list_key[high];
    list_index[low] = list_index[high];
    list_key[high] = k;
    list_index[high] = p;
}

// A bitonic network. The first step of a merge compares mirrored positions, so that positions behind
// the end can be left out.
void sort_list(int count) {
    int all = 1;
    while (all < count) all *= 2;
    for (int whole = 2; whole <= all; whole *= 2) {
        for (int span = whole; span > 1; span /= 2) {
            int half_span = span / 2;
            for (int c = MINE; c < all / 2; c += LOCAL) {
                int group = c / half_span, at = c - group * half_span, low = group * span + at;
                order(low, span == whole ? group * span + span - 1 - at : low + half_span, count);
            }
            barrier();
        }
    }
}
#endif

// What is left of a row: `inside` elements (at first: at most), after `passed` others. Their keys are
// `low` plus a number of `bits` bits. With by_index, all have the key `same`, and the indices are `low`
// plus such a number.
KEY low, same;
int bits, passed, inside;
bool by_index;

// Continues in the bin with the element of rank `wanted`.
void divide(int wanted) {
    barrier();
    uint some[SHARE], total = 0u;
    UNROLL for (int b = 0; b < SHARE; b++) {
        some[b] = bins[SHARE * MINE + b];
        bins[SHARE * MINE + b] = 0u;
        total += some[b];
    }
    uint ahead = sum_before(total), rest = uint(wanted - passed);
    if (ahead <= rest && rest - ahead < total) {
        uint bin = 0u, own = some[0];
        UNROLL for (int b = 1; b < SHARE; b++) {
            bool further = bin == uint(b - 1) && ahead + own <= rest;
            ahead += further ? own : 0u;
            own = further ? some[b] : own;
            bin += further ? 1u : 0u;
        }
        found[0] = uint(SHARE * MINE) + bin;
        found[1] = ahead;
        found[2] = own;
    }
    barrier();
    bits = max(bits - DIGIT, 0);
    low += KEY(found[0]) << bits;
    passed += int(found[1]);
    inside = int(found[2]);
}

#define AGAIN_LOOPS loop(ceil(part_length, LOCAL * BATCH))
#if WIDE_KEY
#define DIVISIONS (ceil(64, log2(BINS)) + ceil(32, log2(BINS)))
#else
#define DIVISIONS (2 * ceil(32, log2(BINS)))
#endif
#if BITONIC
#define LIST_LOOPS (loop(log2(LIST)) + loop(log2(LIST), loop(log2(LIST), loop(ceil(LIST, 2 * LOCAL)))) + loop(ceil(LIST, LOCAL)))
#else
#define LIST_LOOPS loop(ceil(LIST, LOCAL), loop(ceil(LIST, 4)))
#endif
LOOPS(loop(ceil(rows * parts, workgroups), loop(ceil(BINS, LOCAL)) + 2 * loop(ceil(LIST, LOCAL)) + loop(ceil(GROUPS, LOCAL), loop(GROUPS)) + 5 * AGAIN_LOOPS + (DIVISIONS + 1) * (1 + AGAIN_LOOPS + SUM_BEFORE_LOOPS) + 32 + LIST_LOOPS))

void main() {
    int all_rows = rows * parts;
    for (int i = WORKGROUP; i < all_rows; i += WORKGROUPS) {
        int row = i / parts, part = i - row * parts, skipped = part * part_length;
        int q1 = row / size_0, q2 = q1 / size_1, q3 = q2 / size_2;
        ivec4 at = ivec4(row - q1 * size_0, q1 - q2 * size_1, q2 - q3 * size_2, q3);
        base = x_offset + at.x * stride_0 + at.y * stride_1 + at.z * stride_2 + at.w * stride_3 + skipped * step;
        row_length = min(part_length, whole_length - skipped);
#if CACHED
        load(0, keys);
#endif
        for (int b = MINE; b < BINS; b += LOCAL) bins[b] = 0u;
#if GROUPS
        for (int b = MINE; b < GROUPS; b += LOCAL) firsts[b] = 0xffffffffu;
#endif
        clear_list();
        if (MINE == 0) {
            least = 0xffffffffu;
            largest = 0u;
            nans = 0u;
        }
        barrier();
        // The range of the keys.
        low = KEY(0);
        bits = 64;
        passed = 0;
        inside = row_length;
        by_index = false;
        bool listed_all = false;
#if !WIDE_KEY
        uint mine_least = 0xffffffffu, mine_largest = 0u;
        KEPT({
            mine_least = min(mine_least, key);
            mine_largest = max(mine_largest, key);
        })
#if GROUPS
        atomicMin(firsts[MINE % GROUPS], mine_least);
        barrier();
        for (int b = MINE; b < GROUPS; b += LOCAL) {
            uint mine = firsts[b];
            int rank = 0;
            for (int other = 0; other < GROUPS; other++) rank += before(firsts[other], other, mine, b) ? 1 : 0;
            if (rank == keep - 1) bound = mine;
        }
        barrier();
        uint end = bound;
        if (mine_least <= end) KEPT(if (key <= end) list(key, INDEX(j));)
        barrier();
        listed_all = listed <= LIST;
        if (!listed_all) {
            barrier();
            clear_list();
            mine_largest = end;
        }
#elif RANK == 0
        // Each invocation with elements has one that is not after the last of their first ones:
        // enough of them bound the keys.
        int busy = min((row_length + ITEM - 1) / ITEM, LOCAL);
        if (keep <= busy) mine_largest = MINE < busy ? mine_least : 0u;
#endif
        if (!listed_all) {
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
        }
        low = least;
        bits = findMSB(largest - least) + 1;
#endif
        int wanted = keep - 1;  // a rank, from 0 on
#if RANK > 1
        wanted = (row_length - 1) / 2;
        if (largest == PV_KEY_NAN) {
            uint mine = 0u;
            AGAIN({ mine += key == PV_KEY_NAN ? 1u : 0u; })
            atomicAdd(nans, mine);
            barrier();
            int numbers = row_length - int(nans);
            wanted = RANK == 2 ? numbers : max(numbers - 1, 0) / 2;
        }
#endif
#if CACHED == 1 && !GROUPS
        if (inside > LIMIT && bits > 0) {
            int shift = max(bits - DIGIT, 0);
            KEY width = all_ones(bits);
            // Keys are beyond the largest only if few elements are wanted.
            KEPT(if (RANK != 0 || key - low <= width) atomicAdd(bins[uint(key - low >> shift)], 1u);)
            divide(wanted);
        }
#endif
        while (!listed_all && inside > LIMIT && !(by_index && bits == 0)) {
            if (bits == 0) {
                by_index = true;
                same = low;
                low = KEY(0);
                bits = findMSB(uint(row_length)) + 1;
            }
            int shift = max(bits - DIGIT, 0);
            KEY width = all_ones(bits);
            AGAIN({
                KEY d = (by_index ? KEY(uint(INDEX(j))) : key) - low;
                if (d <= width && (!by_index || key == same)) atomicAdd(bins[uint(d >> shift)], 1u);
            })
            divide(wanted);
        }
        // The elements up to the end of what is left; for one rank, only those from its start on.
        KEY width = all_ones(bits), begin = low;
        if (RANK == 0) {
            width = low + width < low ? ~KEY(0) : low + width;
            begin = KEY(0);
        }
        if (by_index) {
            AGAIN({
                bool taken = key == same ? KEY(uint(INDEX(j))) - begin <= width : RANK == 0 && key < same;
                if (taken) list(key, INDEX(j));
            })
        } else if (!listed_all) {
#if GROUPS
            AGAIN(if (key - begin <= width) list(key, INDEX(j));)
#elif RANK && CACHED == 1
            // There are few: reading them again is cheaper than a branch per element.
            uint taken = 0u;
            KEPT(taken |= key - begin <= width ? 1u << j : 0u;)
            const int first = 0;
            while (taken != 0u) {
                int j = findLSB(taken);
                taken &= taken - 1u;
                list(ORDERED(ELEMENT(base + INDEX(j) * step)), INDEX(j));
            }
#else
            KEPT(if (key - begin <= width) list(key, INDEX(j));)
#endif
        }
        barrier();
        int count = int(listed);
        ivec4 values_strides = ivec4(values_stride_0, values_stride_1, values_stride_2, values_stride_3);
        ivec4 indices_strides = ivec4(indices_stride_0, indices_stride_1, indices_stride_2, indices_stride_3);
        int values_at = values_offset + part * values_part, indices_at = indices_offset + part * indices_part;
        values_at += at.x * values_strides.x + at.y * values_strides.y + at.z * values_strides.z + at.w * values_strides.w;
        indices_at += at.x * indices_strides.x + at.y * indices_strides.y + at.z * indices_strides.z + at.w * indices_strides.w;
#if BITONIC
        sort_list(count);
#endif
        for (int e = MINE; e < count; e += LOCAL) {
            int index = list_index[e], rank = e;
#if !BITONIC
            KEY key = list_key[e];
            rank = 0;
            for (int n = 0; n < count; n += 4) {
                UNROLL for (int k = n; k < n + 4; k++) rank += before(list_key[k], list_index[k], key, index) ? 1 : 0;
            }
#endif
#if RANK
            if (passed + rank != wanted) continue;
            rank = 0;
#else
            if (rank >= keep) continue;
#endif
            int from = base + index * step;
            buf_keys[values_at + rank * values_step] = TO_KEY(number_of(list_key[e], from));
#if INDEXED
            buf_indices[indices_at + rank * indices_step] = T_INDEX(buf_from[row * whole_length + index]);
#else
            buf_indices[indices_at + rank * indices_step] = T_INDEX(skipped + index);
#endif
        }
        barrier();
    }
}
