#version 450
#extension GL_GOOGLE_include_directive : enable
// Joins entries with the elements that an index gives along one dim. Each entry has its own index.
// x and out are (outer, n, inner); index and source are (outer, m, inner). Elements have 4 bytes.
// Columns are adjacent in all tensors.
//
// A workgroup computes REACH of the n elements of 8 columns, so it reads whole memory sectors once.
// Groups of 4 neighbouring invocations have 2 columns each of EACH entries, and keep the entries and
// their indices (16 bits each) in registers. Shared memory holds 2 of the columns at once. Each pass
// joins the entries of 2 columns there, and stores the sums back to the registers of the entries.
//
// Buffers: x, index, source, out.
// Offsets and strides are in elements, and even.
// Macros:
//   LOCAL          invocations of a workgroup
//   EACH           entries per invocation, even. REACH is LOCAL / 4 * EACH, below 65535
//   INDEX_WORDS    2: the index is int64, and only low words are read
//   INTEGERS       defined if the elements are int32 rather than float32
//   COMBINE(a, b)  joins two elements
//   IDENTITY       what joining leaves unchanged
// local_size_x is LOCAL.
#pragma purevk macro INTEGERS
#include "core/common.glslh"
#include "core/math.glslh"

#ifndef LOCAL
#define LOCAL 256
#endif
#ifndef EACH
#define EACH 4
#endif
#ifndef INDEX_WORDS
#define INDEX_WORDS 1
#endif
#pragma purevk macro IDENTITY
#ifndef COMBINE
#define COMBINE(a, b) ((a) + (b))
#define IDENTITY -0.0
#endif

PARAM(0, outer)
PARAM(1, n)
PARAM(2, inner)
PARAM(3, m)
PARAM(4, x_offset)
PARAM(5, x_outer)  // strides along outer and n (of index and source: m)
PARAM(6, x_along)
PARAM(7, out_offset)
PARAM(8, out_outer)
PARAM(9, out_along)
PARAM(10, index_offset)
PARAM(11, index_outer)
PARAM(12, index_along)
PARAM(13, source_offset)
PARAM(14, source_outer)
PARAM(15, source_along)
PARAM(16, parts)  // of n
PARAM(17, blocks)  // of 8 columns

#if INDEX_WORDS == 2
#define INDICES uvec4
#else
#define INDICES uvec2
#endif
#ifdef INTEGERS
#define ACC int
int number_of(uint bits) { return int(bits); }
uint bits_of(int v) { return uint(v); }
#else
#define ACC float
float number_of(uint bits) { return uintBitsToFloat(bits); }
uint bits_of(float v) { return floatBitsToUint(v); }
#endif

layout(local_size_x_id = 100) in;
READONLY_BUFFER(0, x, uvec2)
READONLY_BUFFER(1, index, INDICES)
READONLY_BUFFER(2, source, uvec2)
BUFFER(3, out, uvec2)

#define SIDE 4
#define ABREAST (LOCAL / SIDE)
#define REACH (EACH * ABREAST)
#define BATCH (EACH > 4 ? 4 : EACH)
#define NOWHERE 0xFFFFu

shared uint tile[REACH * 2];

void join(int at, ACC v) {
    uint old = tile[at];
    for (;;) {
        uint was = atomicCompSwap(tile[at], old, bits_of(COMBINE(number_of(old), v)));
        if (was == old) break;
        old = was;
    }
}

// Invocations that are 2 apart exchange half of their entries, or exchange them back. After the first
// exchange, entries of even numbers belong to the first 4 columns, those of odd numbers to the last 4.
#define EXCHANGE(T, some)                                                  \
    UNROLL for (int k = 0; k < EACH; k += 2) {                             \
        T given = subgroupShuffleXor(last ? some[k] : some[k + 1], 2u);    \
        if (last) some[k] = given;                                         \
        else some[k + 1] = given;                                          \
    }
#define ROW_OF(k) (((k) / 2 * 2 + side / 2) * ABREAST + row)

LOOPS(loop(ceil(m, REACH), 2 * EACH * loop(subgroup_size)))

void main() {
    int group = int(WORKGROUP_ID.x + WORKGROUP_ID.y * gl_NumWorkGroups.x);
    int lane = int(gl_LocalInvocationIndex), side = lane % SIDE, row = lane / SIDE;
    int part = group % parts, block = group / parts % blocks, o = group / parts / blocks;
    if (o >= outer) return;
    int column = (block * SIDE + side) * 2, start = part * REACH, reach = min(REACH, n - start), at = side % 2 * REACH;
    bool has = column < inner, last = side >= 2;
    int x_at = x_offset + o * x_outer + column + start * x_along, out_at = out_offset + o * out_outer + column + start * out_along;
    int index_at = index_offset + o * index_outer + column, source_at = source_offset + o * source_outer + column;
    uint nothing = bits_of(ACC(IDENTITY));
    UNROLL for (int k = 0; k < EACH; k += 2) tile[at + ROW_OF(k)] = nothing;
    for (int from = 0; from < m; from += REACH) {
        uint targets[EACH];
        uvec2 numbers[EACH];
        UNROLL for (int b = 0; b < EACH; b += BATCH) {
            INDICES given[BATCH];
            UNROLL for (int k = 0; k < BATCH; k++) {
                int e = min(from + (b + k) * ABREAST + row, m - 1);
                if (has) {
                    given[k] = buf_index[(index_at + e * index_along) / 2];
                    numbers[b + k] = buf_source[(source_at + e * source_along) / 2];
                }
            }
            UNROLL for (int k = 0; k < BATCH; k++) {
                ivec2 to = ivec2(given[k][0], given[k][INDEX_WORDS]);
                UNROLL for (int c = 0; c < 2; c++) {
                    to[c] = clamp(to[c] < 0 ? to[c] + n : to[c], 0, n - 1) - start;
                    if (!has || to[c] < 0 || to[c] >= reach || from + (b + k) * ABREAST + row >= m) to[c] = int(NOWHERE);
                }
                targets[b + k] = uint(to[0] | to[1] << 16);
            }
        }
        EXCHANGE(uint, targets)
        EXCHANGE(uvec2, numbers)
        UNROLL for (int pass = 0; pass < 4; pass++) {
            int c = pass / 2;
            barrier();
            UNROLL for (int k = pass % 2; k < EACH; k += 2) {
                uint to = targets[k] >> (16 * c) & 0xFFFFu;
                if (to != NOWHERE) join(at + int(to), number_of(numbers[k][c]));
            }
            barrier();
            UNROLL for (int k = pass % 2; k < EACH; k += 2) {
                numbers[k][c] = tile[at + ROW_OF(k)];
                tile[at + ROW_OF(k)] = nothing;
            }
        }
        EXCHANGE(uvec2, numbers)
        UNROLL for (int b = 0; b < EACH; b += BATCH) {
            uvec2 own[BATCH];
            UNROLL for (int k = 0; k < BATCH; k++) {
                int r = min((b + k) * ABREAST + row, reach - 1);
                if (has) own[k] = from == 0 ? buf_x[(x_at + r * x_along) / 2] : buf_out[(out_at + r * out_along) / 2];
            }
            UNROLL for (int k = 0; k < BATCH; k++) {
                int r = (b + k) * ABREAST + row;
                UNROLL for (int c = 0; c < 2; c++) own[k][c] = bits_of(COMBINE(number_of(own[k][c]), number_of(numbers[b + k][c])));
                if (has && r < reach) buf_out[(out_at + r * out_along) / 2] = own[k];
            }
        }
    }
}
