#version 450
#extension GL_GOOGLE_include_directive : enable
// Entries that are written to, or joined with, the elements that an index gives along one dim, and all other elements copied:
// x, out: (outer, n, inner), index, source: (outer, m, inner). A workgroup makes some of the n of some columns.
//
// ROWS 0: every entry has an index of its own. What becomes of the elements is kept in shared memory while the entries are
//         read: the joined bits, or (SET) the number of the last entry. WIDTH neighbouring columns at a time.
// ROWS 1: all columns have the index of the first. The entries of a workgroup's rows are found, in their order, and then whole
//         rows are read and written; WIDTH invocations have a row, each of them one column or (VEC4) four.
//
// Bindings: 0 x, 1 index, then the source (if SOURCE), then out.
// Parameters: 0 outer  1 n  2 inner  3 m, then the offset and the strides along outer, n or m, and inner of
//   4 x  8 out  12 index  16 source; 20 parts of n  21 parts of inner
// Macros:
//   T_X, ACC, FROM_X(v), TO_OUT(v)  type of the elements, the type that is computed in, and conversions
//   T_INDEX, LOCAL, ROWS, WIDTH, SET, COMBINE(a, b)
//   REACH        how many of the n a workgroup makes; if ROWS a multiple of LOCAL / WIDTH
//   INTEGERS     defined if ACC is int, where elements are joined in shared memory
//   SOURCE       1: entries are in a buffer; 0: all of them are VALUE
// Specialization constant 100: LOCAL.
#include "rows.glslh"
#include "math.glslh"

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
#ifndef T_INDEX
#define T_INDEX int
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
#ifndef REACH
#define REACH 64
#endif
#ifndef SOURCE
#define SOURCE 1
#endif

PARAM_0(outer)
PARAM_1(n)
PARAM_2(inner)
PARAM_3(m)
PARAM_4(x_offset)
PARAM_5(x_outer)
PARAM_6(x_along)
PARAM_7(x_inner)
PARAM_8(out_offset)
PARAM_9(out_outer)
PARAM_10(out_along)
PARAM_11(out_inner)
PARAM_12(index_offset)
PARAM_13(index_outer)
PARAM_14(index_along)
PARAM_15(index_inner)
PARAM_16(source_offset)
PARAM_17(source_outer)
PARAM_18(source_along)
PARAM_19(source_inner)
PARAM_20(parts)
PARAM_21(blocks)

layout(set = 0, binding = 1) readonly buffer BufIndex { T_INDEX buf_index[]; };
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
layout(set = 0, binding = 2) readonly buffer BufSource { T_ITEM buf_source[]; };
layout(set = 0, binding = 3) buffer BufOut { T_ITEM buf_out[]; };
#define ENTRY(e) READ_ITEM(buf_source, source_at + (e) * source_along)
#else
layout(set = 0, binding = 2) buffer BufOut { T_ITEM buf_out[]; };
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

// The element that entry e is for, counted from the first of this workgroup; -1 if there is no such entry.
int target(int index_at, int e, int first) {
    if (e >= m) return -1;
    T_INDEX given = buf_index[index_at + e * index_along];
    if (given < T_INDEX(0)) given += T_INDEX(n);
    return (given < T_INDEX(0) ? 0 : given >= T_INDEX(n) ? n - 1 : int(given)) - first;
}

#if ROWS
#define EACH (REACH / ABREAST)  /* rows of an invocation */
#define ROUND (4 * LOCAL)
#if SET
shared int last[REACH];
#else
shared int hits, counts[REACH];
shared int hit[ROUND], in_order[ROUND];  // row * ROUND + entry
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
    uint old = tile[at];
    for (;;) {
        uint was = atomicCompSwap(tile[at], old, bits_of(COMBINE(number_of(old), v)));
        if (was == old) break;
        old = was;
    }
}
#endif
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
        for (int from = 0; from == 0 || from < m; from += ROUND) {
            for (int r = MINE; r < REACH; r += LOCAL) counts[r] = 0;
            if (MINE == 0) hits = 0;
            barrier();
            int to[4];
            UNROLL for (int k = 0; k < 4; k++) to[k] = target(index_at, from + k * LOCAL + MINE, first);
            UNROLL for (int k = 0; k < 4; k++) {
                if (to[k] >= 0 && to[k] < reach) {
                    atomicAdd(counts[to[k]], 1);
                    hit[atomicAdd(hits, 1)] = to[k] * ROUND + k * LOCAL + MINE;
                }
            }
            barrier();
            for (int h = MINE; h < hits; h += LOCAL) {
                int rank = 0, own = hit[h];
                for (int other = 0; other < hits; other++) rank += hit[other] < own ? 1 : 0;
                in_order[rank] = own;
            }
            barrier();
            if (has) {
                V made[EACH];
                UNROLL for (int k = 0; k < EACH; k++) {
                    int r = k * ABREAST + abreast;
                    if (r < reach) {
                        if (from == 0) made[k] = READ_SELF(first + r);
                        else if (counts[r] > 0) made[k] = READ_OUT(first + r);
                    }
                }
                int h = 0, before = 0;
                UNROLL for (int k = 0; k < EACH; k++) {
                    int r = k * ABREAST + abreast;
                    if (r < reach) {
                        for (; before < r; before++) h += counts[before];
                        for (int end = h + counts[r], at = h; at < end; at += 4) {
                            V entry[4];
                            UNROLL for (int c = 0; c < 4; c++) {
                                if (at + c < end) entry[c] = ENTRY(from + in_order[at + c] % ROUND);
                            }
                            UNROLL for (int c = 0; c < 4; c++) {
                                if (at + c < end) made[k] = COMBINE(made[k], entry[c]);
                            }
                        }
                        if (from == 0 || counts[r] > 0) WRITE_OUT(first + r, made[k]);
                    }
                }
            }
            barrier();
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
