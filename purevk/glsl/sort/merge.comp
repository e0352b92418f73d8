#version 450
#extension GL_GOOGLE_include_directive : enable
// Merges neighbouring sorted runs of rows, two and two, with the index of each element. Of equal
// elements, those of the first run come first, so the sort is stable.
//
// A workgroup makes TILE elements of the result. Which elements of the two runs these are, a search
// finds in rounds: each invocation compares at one position. The elements are read to shared memory.
// There, each invocation finds its EACH elements of the tile by bisection, and merges them one by
// one. (The merge path of Green, McColl and Bader, "GPU Merge Path", 2012.)
//
// Buffers: x (keys) and from (their indices, int), both dense and sorted in runs; keys and indices of
// the result.
// Offsets and strides are in elements. Outer dim 0 is the innermost.
// Macros:
//   T_X, T_KEY  element types of x and of the result
//   T_INDEX     type of the result's indices
//   ACC         type of the comparison: float, int or int64_t
//   FROM_X(v)   converts an element of x to ACC
//   TO_KEY(v)   converts ACC to an element of the result
//   LOCAL       invocations of a workgroup, a power of 2
//   EACH        elements that an invocation merges; TILE = LOCAL * EACH divides two runs
//   DESCENDING  1: the largest elements come first
// Shared memory, bytes: TILE * (size of ACC + 4) + 4 * LOCAL + 8
// Grid: tiles of all rows, flat; local_size_x is LOCAL.
#undef VEC4
#define VEC4 0
#include "core/rows.glslh"
#include "core/math.glslh"
#include "core/order.glslh"

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
#ifndef EACH
#define EACH 8
#endif
#ifndef DESCENDING
#define DESCENDING 0
#endif
#define TILE (LOCAL * EACH)
// Numbers without a sign that are in the order of the result.
#define KEY_OF_float uint
#define KEY_OF_int uint
#define KEY_OF_int64_t uint64_t
#define KEY_OF_PASTE(T) KEY_OF_##T
#define KEY_OF(T) KEY_OF_PASTE(T)
#define KEY KEY_OF(ACC)
#if DESCENDING
#define READ_KEY(i) (~pv_key(FROM_X(READ_X(i))))
#else
#define READ_KEY(i) pv_key(FROM_X(READ_X(i)))
#endif

PARAM(0, x_offset)
PARAM(1, rows)
PARAM(2, row_length)
PARAM(3, tiles)  // of a row
PARAM(4, run)  // elements of a run; the last one of a row may be shorter
PARAM(5, keep)  // elements of a row that are stored
PARAM(6, size_0)  // of the outer dims of the result
PARAM(7, size_1)
PARAM(8, size_2)
PARAM(9, values_offset)  // of the merged elements
PARAM(10, values_step)
PARAM(11, values_stride_0)
PARAM(12, values_stride_1)
PARAM(13, values_stride_2)
PARAM(14, values_stride_3)
PARAM(15, indices_offset)  // of their indices
PARAM(16, indices_step)
PARAM(17, indices_stride_0)
PARAM(18, indices_stride_1)
PARAM(19, indices_stride_2)
PARAM(20, indices_stride_3)

READONLY_BUFFER(1, from, int)
WRITEONLY_BUFFER(2, keys, T_KEY)
WRITEONLY_BUFFER(3, indices, T_INDEX)

#define MINE int(gl_LocalInvocationIndex)
// Padded, so that neighbouring invocations, which write EACH neighbouring elements each, use different
// banks.
#define AT(i) ((i) + (i) / EACH)

shared KEY key[TILE];
shared int source[AT(TILE)];  // where in `key` the elements of the merged tile are
shared int passed[2];

// How many elements of the first run are among the first `taken.x`, and among the first `taken.y`, of
// the merged runs. The runs start at `first` and `second`.
ivec2 split(int first, int first_length, int second, int second_length, ivec2 taken) {
    ivec2 low = max(taken - second_length, 0), high = min(taken, ivec2(first_length));
    while (any(lessThan(low, high))) {
        // The last position of each part is tried. Elements of the first run are taken at the first
        // positions, and at no other.
        ivec2 part = (high - low + LOCAL - 1) / LOCAL;
        int flags = 0;
        UNROLL for (int k = 0; k < 2; k++) {
            int at = low[k] + (MINE + 1) * part[k] - 1;
            if (part[k] > 0 && at < high[k] && READ_KEY(first + at) <= READ_KEY(second + taken[k] - 1 - at)) {
                flags |= 1 << k;
            }
        }
        source[MINE] = flags;
        barrier();
        int last = MINE + 1 < LOCAL ? flags & ~source[MINE + 1] : flags;
        UNROLL for (int k = 0; k < 2; k++) {
            if ((last >> k & 1) != 0) passed[k] = MINE + 1;
            if (MINE == 0 && (flags >> k & 1) == 0) passed[k] = 0;
        }
        barrier();
        low += ivec2(passed[0], passed[1]) * part;
        high = min(high, low + max(part - 1, 0));
    }
    return low;
}

// The same for the runs in shared memory, found by one invocation.
int split_shared(int first_length, int second_length, int taken) {
    int low = max(taken - second_length, 0), high = min(taken, first_length);
    while (low < high) {
        int at = (low + high) / 2;
        if (key[at] <= key[first_length + taken - 1 - at]) low = at + 1;
        else high = at;
    }
    return low;
}

// A search divides its range by LOCAL, of which it has 31 bits.
LOOPS(loop(ceil(rows * tiles, workgroups), 2 * loop(ceil(31, log2(LOCAL)) + 1) + 2 * loop(EACH) + loop(log2(TILE) + 1)))

void main() {
    int all_tiles = rows * tiles;
    for (int i = WORKGROUP; i < all_tiles; i += WORKGROUPS) {
        int row = i / tiles, start = (i - row * tiles) * TILE, pair = start / (2 * run) * 2 * run;
        int first = x_offset + row * row_length + pair, second = first + run;
        int first_length = clamp(row_length - pair, 0, run), second_length = clamp(row_length - pair - run, 0, run);
        ivec2 taken = min(ivec2(start - pair, start - pair + TILE), first_length + second_length);
        ivec2 of_first = split(first, first_length, second, second_length, taken), of_second = taken - of_first;
        int count = taken.y - taken.x, firsts = of_first.y - of_first.x;
        first += of_first.x;
        second += of_second.x - firsts;  // from where the second run's element e of the tile is read
        for (int e = MINE; e < count; e += LOCAL) key[e] = READ_KEY((e < firsts ? first : second) + e);
        barrier();
        int to = MINE * EACH;
        if (to < count) {
            int a = split_shared(firsts, count - firsts, to), b = firsts + to - a;
            KEY key_a = key[min(a, TILE - 1)], key_b = key[min(b, TILE - 1)];
            UNROLL for (int k = 0; k < EACH; k++) {
                bool of_a = b >= count || a < firsts && key_a <= key_b;
                source[AT(to + k)] = of_a ? a : b;
                a += int(of_a);
                b += int(!of_a);
                KEY next = key[min(of_a ? a : b, TILE - 1)];
                key_a = of_a ? next : key_a;
                key_b = of_a ? key_b : next;
            }
        }
        barrier();
        int q1 = row / size_0, q2 = q1 / size_1, q3 = q2 / size_2;
        int c0 = row - q1 * size_0, c1 = q1 - q2 * size_1, c2 = q2 - q3 * size_2;
        int values_at = values_offset + c0 * values_stride_0 + c1 * values_stride_1 + c2 * values_stride_2 + q3 * values_stride_3;
        int indices_at = indices_offset + c0 * indices_stride_0 + c1 * indices_stride_1 + c2 * indices_stride_2 + q3 * indices_stride_3;
        for (int e = MINE; e < min(count, keep - start); e += LOCAL) {
            int at = source[AT(e)];
            at += at < firsts ? first : second;
            buf_keys[values_at + (start + e) * values_step] = TO_KEY(FROM_X(READ_X(at)));
            buf_indices[indices_at + (start + e) * indices_step] = T_INDEX(buf_from[at - x_offset]);
        }
        barrier();
    }
}
