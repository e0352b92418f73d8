#version 450
#extension GL_GOOGLE_include_directive : enable
// out[row, c] = EPILOGUE(softmax over c of LOAD(x[row, c], row, c), row, c), or log_softmax, with
// sums in float.
//
// Buffers: x, out, and what EXTRA_BUFFERS declares.
// Offsets and strides are in elements. Up to three outer dims give the row; outer dim 0 is the
// innermost. Parameters from number 14 on are free for EXTRA_BUFFERS.
// Macros:
//   T_X, T_OUT  element types, those of elements.glslh
//   FROM_X(v)   converts an element of x to float
//   TO_OUT(v)   converts float to an element of out
//   TO_OUT4(v)  the same for a vec4
//   TEXEL_X     1: x is a uniform texel buffer (rows.glslh)
//   OUTER_DIMS  1 to 3
//   LOG         1: log_softmax
//   ZERO_ROWS   1: a row that is -inf everywhere gives 0 (softmax), rather than NaN
//   LOAD(v, row, col)      a float expression of an element, for a scale, a mask and so on
//   EPILOGUE(v, row, col)  what is stored
//   ROW_PER_SUBGROUP, ROW_PER_INVOCATION, SUBGROUP, LOCAL, WIDTH  rows.glslh; it also has the grid
//   VEC4        1: x and out are read and written as vec4. Both column strides are 1. Columns, other
//               strides and both offsets are multiples of 4
//   COLUMN      1: neighbouring rows have neighbouring elements. With VEC4 an invocation computes
//               four rows: outer dim 0 has stride 1, and its size, both column strides, the other
//               strides and both offsets are multiples of 4; the grid is that of rows / 4 rows
//   CACHE       n > 0: a row is read once, and kept in registers, n elements (vec4s if VEC4) per
//               invocation. Columns are at most n * invocations of a row (* 4 if VEC4).
//               0: rows of any length, read twice
//   EXP         the exponential function of results; default pv_exp. GLSL's own, which sums take, is 0
//               from -87.3 down on some devices, and loses digits of small numbers
//   AHEAD       if CACHE 0: elements (vec4s if VEC4) that an invocation reads before it uses the
//               first of them; default 1
#include "core/rows.glslh"
#include "core/elements.glslh"

#ifndef T_OUT
#define T_OUT float
#endif
#ifndef FROM_X
#define FROM_X(v) FLOAT_OF(T_X, v)
#endif
#ifndef TO_OUT
#define TO_OUT(v) ELEMENT_OF(T_OUT, v)
#endif
#ifndef TO_OUT4
#define TO_OUT4(v) QUAD_FROM(T_OUT, v)
#endif
#ifndef OUTER_DIMS
#define OUTER_DIMS 1
#endif
#ifndef LOG
#define LOG 0
#endif
#ifndef ZERO_ROWS
#define ZERO_ROWS 0
#endif
#ifndef LOAD
#define LOAD(v, row, col) (v)
#endif
#ifndef EPILOGUE
#define EPILOGUE(v, row, col) (v)
#endif
#ifndef EXTRA_BUFFERS
#define EXTRA_BUFFERS
#endif
#ifndef CACHE
#define CACHE 0
#endif
#ifndef COLUMN
#define COLUMN 0
#endif
#ifndef EXP
#define EXP pv_exp
#endif
#ifndef AHEAD
#define AHEAD 1
#endif

PARAM(0, x_offset)
PARAM(1, out_offset)
PARAM(2, rows)
PARAM(3, columns)
PARAM(6, x_stride_0)  // of the outer dims
PARAM(9, out_stride_0)
#if OUTER_DIMS > 1
PARAM(7, x_stride_1)
PARAM(10, out_stride_1)
PARAM(12, size_0)
#endif
#if OUTER_DIMS > 2
PARAM(8, x_stride_2)
PARAM(11, out_stride_2)
PARAM(13, size_1)
#endif

#if VEC4
BUFFER(1, out, QUAD_OF(T_OUT))
#else
BUFFER(1, out, T_OUT)
#endif
#if COLUMN || !VEC4
PARAM(4, x_column)  // strides along a row
PARAM(5, out_column)
#else
#define x_column 1
#define out_column 1
#endif
#define EXTRA_BINDING 2
EXTRA_BUFFERS

// V: the elements of one load, of EACH columns and ROWS rows. R: one number for each of these rows.
#if VEC4 && COLUMN
#define V vec4
#define R vec4
#define EACH 1
#define ROWS 4
#define SUM(v) (v)
#define LARGEST(v) (v)
#elif VEC4
#define V vec4
#define R float
#define EACH 4
#define ROWS 1
#define SUM(v) (((v).x + (v).y) + ((v).z + (v).w))
#define LARGEST(v) max(max((v).x, (v).y), max((v).z, (v).w))
#else
#define V float
#define R float
#define EACH 1
#define ROWS 1
#define SUM(v) (v)
#define LARGEST(v) (v)
#endif

#define MINUS_INF uintBitsToFloat(0xff800000u)

// Element `lane` of a vec4 is of row `row + lane`, or of column `col + lane`.
#if COLUMN
#define OF(DO, v, lane) DO(v, (row + lane), col)
#else
#define OF(DO, v, lane) DO(v, row, (col + lane))
#endif

V load(int base, int row, int col) {
#if VEC4
    X4 v = READ4_X(base + col * x_column);
    return vec4(OF(LOAD, FROM_X(v.x), 0), OF(LOAD, FROM_X(v.y), 1), OF(LOAD, FROM_X(v.z), 2), OF(LOAD, FROM_X(v.w), 3));
#else
    float v = FROM_X(READ_X(base + col * x_column));
    return LOAD(v, row, col);
#endif
}

void store(V v, int base, int row, int col) {
#if VEC4
    buf_out[(base + col * out_column) >> 2] =
        TO_OUT4(vec4(OF(EPILOGUE, v.x, 0), OF(EPILOGUE, v.y, 1), OF(EPILOGUE, v.z, 2), OF(EPILOGUE, v.w, 3)));
#else
    buf_out[base + col * out_column] = TO_OUT(EPILOGUE(v, row, col));
#endif
}

// Nothing is subtracted from a row of -inf. Its exponentials exp(-inf - 0) are 0, as they should be.
float subtrahend(float largest) { return largest < -3.4028234e38 ? 0.0 : largest; }

// 0 * (1 / 0) and -inf - log(0) are NaN, but a compiler may take x * (1 / x) for 1 and log(exp(x))
// for x.
float last_step(float total) {
#if LOG
    return total == 0.0 ? uintBitsToFloat(0x7fc00000u) : pv_log(total);
#elif ZERO_ROWS
    return total == 0.0 ? 0.0 : 1.0 / total;
#else
    return total == 0.0 ? uintBitsToFloat(0x7fc00000u) : 1.0 / total;
#endif
}
#if VEC4 && COLUMN
vec4 subtrahend(vec4 v) { return vec4(subtrahend(v.x), subtrahend(v.y), subtrahend(v.z), subtrahend(v.w)); }
vec4 last_step(vec4 v) { return vec4(last_step(v.x), last_step(v.y), last_step(v.z), last_step(v.w)); }
#endif

#if CACHE
#if SUBGROUP || ROW_PER_SUBGROUP
R shuffle_xor(R v, uint d) { return subgroupShuffleXor(v, d); }
#endif
R add(R a, R b) { return a + b; }
DEFINE_JOIN(R, max_all, max)
DEFINE_JOIN(R, sum_all, add)
#else
// The largest element, and the sum of exp(element - largest).
struct Pair {
    R most, sum;
};
Pair join(Pair a, Pair b) {
    R most = max(a.most, b.most), s = subtrahend(most);
    return Pair(most, a.sum * pv_exp_term(a.most - s) + b.sum * pv_exp_term(b.most - s));
}
#if SUBGROUP || ROW_PER_SUBGROUP
Pair shuffle_xor(Pair v, uint d) { return Pair(subgroupShuffleXor(v.most, d), subgroupShuffleXor(v.sum, d)); }
#endif
DEFINE_JOIN(Pair, join_all, join)

// The pair with n more elements.
#define TAKE(pair, v, n)                                                    \
    {                                                                       \
        R before = pair.most;                                               \
        UNROLL for (int k = 0; k < n; k++) pair.most = max(pair.most, LARGEST(v[k])); \
        R less = subtrahend(pair.most);                                     \
        pair.sum *= pv_exp_term(before - less);                             \
        UNROLL for (int k = 0; k < n; k++) {                                \
            V e = pv_exp_term(v[k] - less);                                 \
            pair.sum += SUM(e);                                             \
        }                                                                   \
    }
#endif

#if LOG
#define RESULT(v) ((v) - s - last)
#else
#define RESULT(v) (EXP((v) - s) * last)
#endif

// An invocation's elements of a row.
#define OWN ceil(columns, EACH * TEAM_LANES)
#if CACHE
LOOPS(loop(ceil(rows / ROWS, workgroups * TEAM), 2 * JOIN_LOOPS))
#else
LOOPS(loop(ceil(rows / ROWS, workgroups * TEAM), 2 * (loop(OWN / AHEAD) + loop(min(OWN, AHEAD - 1))) + JOIN_LOOPS + OWN * EACH * functions))
#endif

void main() {
    int tasks = rows / ROWS;
    for (int task = ROW_FIRST; ROW_MORE(task, tasks); task += ROW_STEP) {
        int row = min(task, tasks - 1) * ROWS;
        bool live = task < tasks;
        int base = x_offset, out_base = out_offset;
#if OUTER_DIMS > 1
        int q = row / size_0, i = row - q * size_0;
        base += i * x_stride_0;
        out_base += i * out_stride_0;
#if OUTER_DIMS > 2
        int p = q / size_1;
        i = q - p * size_1;
        base += i * x_stride_1 + p * x_stride_2;
        out_base += i * out_stride_1 + p * out_stride_2;
#else
        base += q * x_stride_1;
        out_base += q * out_stride_1;
#endif
#else
        base += row * x_stride_0;
        out_base += row * out_stride_0;
#endif
        R s, total;
#if CACHE
        V kept[CACHE];
        V most = V(MINUS_INF);
        UNROLL for (int k = 0; k < CACHE; k++) {
            int col = EACH * (LANE + k * LANES);
            kept[k] = V(MINUS_INF);
            if (col < columns) kept[k] = load(base, row, col);
            most = max(most, kept[k]);
        }
        s = subtrahend(max_all(LARGEST(most)));
        V sum = V(0.0);
        UNROLL for (int k = 0; k < CACHE; k++) {
#if LOG
            sum += pv_exp_term(kept[k] - s);
#else
            kept[k] = EXP(kept[k] - s);
            sum += kept[k];
#endif
        }
        total = sum_all(SUM(sum));
#else
        Pair mine = Pair(R(MINUS_INF), R(0.0));
        int at = EACH * LANE;
#if AHEAD > 1
        for (; at + (AHEAD - 1) * EACH * LANES < columns; at += AHEAD * EACH * LANES) {
            V v[AHEAD];
            UNROLL for (int k = 0; k < AHEAD; k++) v[k] = load(base, row, at + k * EACH * LANES);
            TAKE(mine, v, AHEAD)
        }
#endif
        for (; at < columns; at += EACH * LANES) {
            V v[1] = V[1](load(base, row, at));
            TAKE(mine, v, 1)
        }
        mine = join_all(mine);
        s = subtrahend(mine.most);
        total = mine.sum;
#endif
        R last = last_step(total);
        if (!live) continue;
#if CACHE
        UNROLL for (int k = 0; k < CACHE; k++) {
            int col = EACH * (LANE + k * LANES);
#if LOG
            if (col < columns) store(RESULT(kept[k]), out_base, row, col);
#else
            if (col < columns) store(kept[k] * last, out_base, row, col);
#endif
        }
#else
        // In reverse: the elements that were read last may still be in a cache.
        at -= EACH * LANES;
#if AHEAD > 1
        for (; at >= (AHEAD - 1) * EACH * LANES; at -= AHEAD * EACH * LANES) {
            V v[AHEAD];
            UNROLL for (int k = 0; k < AHEAD; k++) v[k] = load(base, row, at - k * EACH * LANES);
            UNROLL for (int k = 0; k < AHEAD; k++) store(RESULT(v[k]), out_base, row, at - k * EACH * LANES);
        }
#endif
        for (; at >= 0; at -= EACH * LANES) {
            V v = load(base, row, at);
            store(RESULT(v), out_base, row, at);
        }
#endif
    }
}
