#version 450
#extension GL_GOOGLE_include_directive : enable
// Writes entries to the elements that an index gives along one dim, or joins them with these
// elements. All other elements are copied from x. x and out are (outer, n, inner); index and source
// are (outer, m, inner). A workgroup computes REACH of the n elements of some columns.
//
// With ROWS 0 every entry has its own index. While a workgroup reads the entries, shared memory
// holds the joined bits of each element, or (SET) the number of its last entry. It takes WIDTH
// neighbouring columns at once.
//
// With ROWS 1 all columns share the index of the first. A workgroup finds the entries of its rows in
// their order, and then reads and writes whole rows. WIDTH invocations share a row, with one column
// or (VEC4) four columns each.
//
// Buffers: x, index, source (if SOURCE), out.
// Offsets and strides are in elements.
// Macros:
//   T_X            element type
//   ACC            type of the arithmetic
//   FROM_X(v)      converts an element to ACC
//   TO_OUT(v)      converts ACC to an element of out
//   ROWS           whether all columns share an index (see above)
//   LOCAL          invocations of a workgroup
//   WIDTH          columns at once, or invocations of a row (see above)
//   SET            1: the last entry replaces the element; 0: entries are joined with it
//   COMBINE(a, b)  joins an element and an entry
//   ADD            1: COMBINE adds them; integers then join by one atomic operation (0)
//   REACH          how many of the n a workgroup computes; with ROWS, a multiple of LOCAL / WIDTH
//   SPAN           entries that an invocation looks at per iteration, where rows are joined
//   INDEX_WORDS    2: the index is int64, and only low words are read
//   INTEGERS       defined if ACC is int, where elements are joined in shared memory
//   SOURCE         1: entries are in a buffer; 0: all entries are VALUE
//   VALUE          the entry, if SOURCE is 0
//   VEC4           1: x, the source and out are read and written as vec4; needs ROWS
// local_size_x is LOCAL.
#pragma purevk macro INTEGERS
#include "core/rows.glslh"
#include "core/math.glslh"

#ifndef T_OUT
#define T_OUT T_X
#endif
#ifndef ACC
#define ACC float
#endif
#ifndef FROM_X
#define FROM_X(v) ACC(v)
#endif
#ifndef TO_OUT
#define TO_OUT(v) T_OUT(v)
#endif
#ifndef ROWS
#define ROWS 0
#endif
#ifndef SET
#define SET 1
#endif
#ifndef COMBINE
#define COMBINE(a, b) (b)
#endif
#ifndef ADD
#define ADD 0
#endif
#ifndef REACH
#define REACH 64
#endif
#ifndef SOURCE
#define SOURCE 1
#endif
#ifndef SPAN
#define SPAN 4
#endif
#ifndef INDEX_WORDS
#define INDEX_WORDS 1
#endif

PARAM(0, outer)
PARAM(1, n)
PARAM(2, inner)
PARAM(3, m)
PARAM(4, x_offset)
PARAM(5, x_outer)  // strides along outer, n (of index and source: m) and inner
PARAM(6, x_along)
PARAM(7, x_inner)
PARAM(8, out_offset)
PARAM(9, out_outer)
PARAM(10, out_along)
PARAM(11, out_inner)
PARAM(12, index_offset)
PARAM(13, index_outer)
PARAM(14, index_along)
PARAM(15, index_inner)
PARAM(16, source_offset)
PARAM(17, source_outer)
PARAM(18, source_along)
PARAM(19, source_inner)
PARAM(20, parts)  // of n
PARAM(21, blocks)  // parts of inner

READONLY_BUFFER(1, index, int)
#if VEC4
#define T_ITEM VEC4_OF(T_X)
#define V X4
#define READ_ITEM(buffer, i) X4(buffer[(i) >> 2])
#define WRITE_ITEM(i, v) buf_out[(i) >> 2] = T_ITEM(v)
#define ITEM 4
#else
#define T_ITEM T_X
#define V ACC
#define READ_ITEM(buffer, i) FROM_X(buffer[i])
#define WRITE_ITEM(i, v) buf_out[i] = TO_OUT(v)
#define ITEM 1
#endif
#if SOURCE
READONLY_BUFFER(2, source, T_ITEM)
BUFFER(3, out, T_ITEM)
#define ENTRY(e) READ_ITEM(buf_source, source_at + (e) * source_along)
#else
BUFFER(2, out, T_ITEM)
#ifndef VALUE
#define VALUE 0
#endif
#define ENTRY(e) V(VALUE)
#endif
#define READ_SELF(r) READ_ITEM(buf_x, x_at + (r) * x_along)
#define READ_OUT(r) READ_ITEM(buf_out, out_at + (r) * out_along)
#define WRITE_OUT(r, v) WRITE_ITEM(out_at + (r) * out_along, v)
#define ABREAST (LOCAL / WIDTH)
#define MINE int(gl_LocalInvocationIndex)

// The element that entry e writes, relative to the first of this workgroup; -1 if there is no such
// entry.
int target(int index_at, int e, int first) {
    if (e >= m) return -1;
    int given = buf_index[(index_at + e * index_along) * INDEX_WORDS];
    return clamp(given < 0 ? given + n : given, 0, n - 1) - first;
}

#if ROWS
#define EACH (REACH / ABREAST)  /* rows per invocation */
#if SET
shared int last[REACH];
#else
#define ROUND (SPAN * LOCAL)
shared int hits, hit[ROUND];  // row * ROUND + entry
#endif
#else
shared uint tile[REACH * WIDTH];
#if !SET
uint bits_of(float v) { return floatBitsToUint(v); }
uint bits_of(int v) { return uint(v); }
#ifdef INTEGERS
int number_of(uint bits) { return int(bits); }
#else
float number_of(uint bits) { return uintBitsToFloat(bits); }
#endif
void join(int at, ACC v) {
#if ADD && defined(INTEGERS)
    atomicAdd(tile[at], bits_of(v));
#else
    uint old = tile[at];
    for (;;) {
        uint was = atomicCompSwap(tile[at], old, bits_of(COMBINE(number_of(old), v)));
        if (was == old) break;
        old = was;
    }
#endif
}
#endif
#endif

#define ALL ceil(outer * parts * blocks, workgroups)
#if ROWS && SET
LOOPS(loop(ALL, loop(ceil(REACH, LOCAL)) + loop(ceil(m, 4 * LOCAL))))
#elif ROWS
// All entries of a round belong to one workgroup at worst.
LOOPS(loop(ALL, loop(ceil(m, ROUND), SPAN * loop(ROUND) + loop(log2(ROUND) + 1) + loop(ceil(ROUND, 8)))))
#else
// Invocations of a subgroup may add to one element.
LOOPS(loop(ALL, loop(ceil(REACH, ABREAST)) + loop(ceil(m, 4 * ABREAST), 4 * loop(subgroup_size)) + loop(ceil(REACH, 4 * ABREAST))))
#endif

void main() {
    int groups = outer * parts * blocks;
    for (int g = WORKGROUP; g < groups; g += WORKGROUPS) {
        int part = g % parts, block = g / parts % blocks, o = g / parts / blocks;
        int first = part * REACH, reach = min(REACH, n - first);
        int abreast = MINE / WIDTH, column = (block * WIDTH + MINE % WIDTH) * ITEM;
        bool has = column < inner;
        int x_at = x_offset + o * x_outer + column * x_inner, out_at = out_offset + o * out_outer + column * out_inner;
        int source_at = source_offset + o * source_outer + column * source_inner;
        int index_at = index_offset + o * index_outer + (ROWS == 1 ? 0 : column * index_inner);
#if ROWS && SET
        for (int r = MINE; r < REACH; r += LOCAL) last[r] = 0;
        barrier();
        for (int e = MINE; e < m; e += 4 * LOCAL) {
            int to[4];
            UNROLL for (int k = 0; k < 4; k++) to[k] = target(index_at, e + k * LOCAL, first);
            UNROLL for (int k = 0; k < 4; k++) {
                if (to[k] >= 0 && to[k] < reach) atomicMax(last[to[k]], e + k * LOCAL + 1);
            }
        }
        barrier();
        if (has) {
            V made[EACH];
            UNROLL for (int k = 0; k < EACH; k++) {
                int r = k * ABREAST + abreast;
                if (r < reach) {
                    if (last[r] > 0) made[k] = ENTRY(last[r] - 1);
                    else made[k] = READ_SELF(first + r);
                }
            }
            UNROLL for (int k = 0; k < EACH; k++) {
                int r = k * ABREAST + abreast;
                if (r < reach) WRITE_OUT(first + r, made[k]);
            }
        }
        barrier();
#elif ROWS
        // An invocation has neighbouring rows, so their entries are neighbours once they are sorted by
        // row and entry.
        int mine = abreast * EACH;
        V made[EACH];
        UNROLL for (int k = 0; k < EACH; k++) {
            if (has && mine + k < reach) made[k] = READ_SELF(first + mine + k);
        }
        for (int from = 0; from < m; from += ROUND) {
            if (MINE == 0) hits = 0;
            barrier();
            int to[SPAN];
            UNROLL for (int k = 0; k < SPAN; k++) to[k] = target(index_at, from + k * LOCAL + MINE, first);
            UNROLL for (int k = 0; k < SPAN; k++) {
                if (to[k] >= 0 && to[k] < reach) hit[atomicAdd(hits, 1)] = to[k] * ROUND + k * LOCAL + MINE;
            }
            barrier();
            int found = hits, own[SPAN], rank[SPAN];
            UNROLL for (int k = 0; k < SPAN; k++) {
                rank[k] = 0;
                if (k * LOCAL + MINE < found) {
                    own[k] = hit[k * LOCAL + MINE];
                    for (int other = 0; other < found; other++) rank[k] += hit[other] < own[k] ? 1 : 0;
                }
            }
            barrier();
            UNROLL for (int k = 0; k < SPAN; k++) {
                if (k * LOCAL + MINE < found) hit[rank[k]] = own[k];
            }
            barrier();
            int h = 0, end = has ? found : 0;
            while (h < end) {
                int middle = (h + end) / 2;
                if (hit[middle] < mine * ROUND) h = middle + 1;
                else end = middle;
            }
            for (end = has ? found : 0; h < end && hit[h] < (mine + EACH) * ROUND; h += 8) {
                V entry[8];
                int row[8];
                UNROLL for (int c = 0; c < 8; c++) {
                    int next = hit[min(h + c, end - 1)];
                    row[c] = h + c < end ? next / ROUND - mine : EACH;
                    if (row[c] < EACH) entry[c] = ENTRY(from + next % ROUND);
                }
                UNROLL for (int k = 0; k < EACH; k++) {
                    UNROLL for (int c = 0; c < 8; c++) {
                        if (row[c] == k) made[k] = COMBINE(made[k], entry[c]);
                    }
                }
            }
            barrier();
        }
        UNROLL for (int k = 0; k < EACH; k++) {
            if (has && mine + k < reach) WRITE_OUT(first + mine + k, made[k]);
        }
#else
        for (int r = abreast; r < reach; r += ABREAST) {
#if SET
            tile[r * WIDTH + MINE % WIDTH] = 0u;
#else
            tile[r * WIDTH + MINE % WIDTH] = has ? bits_of(READ_SELF(first + r)) : 0u;
#endif
        }
        barrier();
        if (has) {
            for (int e = abreast; e < m; e += 4 * ABREAST) {
                int to[4];
                UNROLL for (int k = 0; k < 4; k++) {
                    to[k] = target(index_at, e + k * ABREAST, first);
                    if (to[k] >= reach) to[k] = -1;
                }
#if SET
                UNROLL for (int k = 0; k < 4; k++) {
                    if (to[k] >= 0) atomicMax(tile[to[k] * WIDTH + MINE % WIDTH], uint(e + k * ABREAST + 1));
                }
#else
                ACC entry[4];
                UNROLL for (int k = 0; k < 4; k++) {
                    if (to[k] >= 0) entry[k] = ENTRY(e + k * ABREAST);
                }
                UNROLL for (int k = 0; k < 4; k++) {
                    if (to[k] >= 0) join(to[k] * WIDTH + MINE % WIDTH, entry[k]);
                }
#endif
            }
        }
        barrier();
        if (has) {
            for (int start = abreast; start < reach; start += 4 * ABREAST) {
                V made[4];
                UNROLL for (int k = 0; k < 4; k++) {
                    int r = start + k * ABREAST;
                    if (r < reach) {
                        uint bits = tile[r * WIDTH + MINE % WIDTH];
#if SET
                        if (bits != 0u) made[k] = ENTRY(int(bits) - 1);
                        else made[k] = READ_SELF(first + r);
#else
                        made[k] = number_of(bits);
#endif
                    }
                }
                UNROLL for (int k = 0; k < 4; k++) {
                    int r = start + k * ABREAST;
                    if (r < reach) WRITE_OUT(first + r, made[k]);
                }
            }
        }
        barrier();
#endif
    }
}
