#version 450
#extension GL_GOOGLE_include_directive : enable
// out[o] = EPILOGUE(FINISH(COMBINE over r of LOAD(x[o, r]), n), o): sum, mean, amax, prod, any, all, argmax, var...
//
// Bindings: 0 x, 1 out (if ARG 2: 1 values, 2 indices), then what EXTRA_BUFFERS declares.
// Parameters (sizes and strides in elements; outer dim 0 is the innermost, the fastest to vary in the output; those of
// dims that OUTER_DIMS and REDUCE_DIMS leave out are not declared):
//   0 offset of x  1 offset of out  2 number of outputs
//   3, 4 sizes of the reduction dims r0 (outer) and r1 (inner)  5, 6 their strides in x
//   7, 8, 9, 10 strides in x of the outer dims 0, 1, 2, 3  11, 12, 13 sizes of the outer dims 0, 1, 2
//   14 offset of the indices (if ARG 2)
//   15 length of a part (if SPLIT), or number of elements that were reduced in all (if PARTS)
//   16 and above are free for EXTRA_BUFFERS.
// Macros:
//   T_X, T_OUT, ACC          element types, and the type that is computed in
//   FROM_X(v), TO_OUT(v)     conversions, by default ACC(v) and T_OUT(v). For an int64 output on a device without
//                            64-bit integers: T_OUT ivec2, TO_OUT(v) ivec2(v, v >> 31)
//   OUTER_DIMS 1..4, REDUCE_DIMS 1..2 (1: r1 only; r0 is 1)
//   INIT, COMBINE(a, b)      an identity and an operation; the order of elements is not kept
//   LOAD(v), FINISH(a, n)    n = number of elements reduced. `o` names the output's index in both
//   EPILOGUE(v, o)           what is stored; EXTRA_BUFFERS declares what it reads
//   ARG 1: stores the index r0 * size(r1) + r1 of the best element, 2: the best element, and the index (T_INDEX,
//          TO_INDEX) in binding 2. ARG_BETTER(a, b) is a > b (argmax; default) or a < b; of equals the first is taken,
//          and NaN is better than all else, as in torch.
//   VARIANCE 1: FINISH gets the sum of squared distances from the mean (ACC float; LOAD applies first). Needs
//          SPLIT 0, and VEC4 0 if COLUMN.
//   SPLIT s > 0: a row is cut into s parts of `parameter 15` elements (the last ones may be shorter); out is partial
//          results, [outputs / s, s], or [s, outputs / s] if COLUMN; needs REDUCE_DIMS 1. A second dispatch reduces
//          those. An invocation should not do more than 65535 rounds of its loops in all (a round is an element, or a
//          vec4): llvmpipe leaves them after that many.
//   PARTS 1: x is such partial results; n is parameter 15.
//   TEXEL_X 1                x is a uniform texel buffer: rows.glslh
//   ROW_PER_SUBGROUP, ROW_PER_INVOCATION, WIDTH, SUBGROUP, LOCAL: rows.glslh, where the grid stands (rows = outputs).
//          VEC4 1: x is read as vec4 along r1: its stride is 1, and its size, all other strides, offset of x and part
//          length are multiples of 4.
//   COLUMN 1: one invocation makes one output, neighbours read neighbouring addresses if outer dim 0 has stride 1.
//          VEC4 1: four outputs an invocation: outer dim 0 has stride 1; its size, all other strides and both offsets
//          are multiples of 4. Grid: as for ROW_PER_INVOCATION, with rows = outputs, or outputs / 4 if VEC4.
#ifndef COLUMN
#define COLUMN 0
#endif
#if COLUMN
#undef ROW_PER_INVOCATION
#define ROW_PER_INVOCATION 1
#endif
#include "rows.glslh"
#include "math.glslh"

#ifndef T_OUT
#define T_OUT float
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
#ifndef OUTER_DIMS
#define OUTER_DIMS 1
#endif
#ifndef REDUCE_DIMS
#define REDUCE_DIMS 1
#endif
#ifndef INIT
#define INIT ACC(0)
#endif
#ifndef COMBINE
#define COMBINE(a, b) ((a) + (b))
#endif
#ifndef LOAD
#define LOAD(v) (v)
#endif
#ifndef FINISH
#define FINISH(a, n) (a)
#endif
#ifndef EPILOGUE
#define EPILOGUE(v, o) (v)
#endif
#ifndef EXTRA_BUFFERS
#define EXTRA_BUFFERS
#endif
#ifndef ARG
#define ARG 0
#endif
#ifndef ARG_BETTER
#define ARG_BETTER(a, b) ((a) > (b))
#endif
#ifndef T_INDEX
#define T_INDEX int
#endif
#ifndef TO_INDEX
#define TO_INDEX(v) T_INDEX(v)
#endif
#ifndef VARIANCE
#define VARIANCE 0
#endif
#ifndef SPLIT
#define SPLIT 0
#endif
#ifndef PARTS
#define PARTS 0
#endif
#if VARIANCE && (SPLIT || (COLUMN && VEC4))
#error VARIANCE needs SPLIT 0, and VEC4 0 if COLUMN
#endif

PARAM_0(x_offset)
PARAM_1(out_offset)
PARAM_2(outputs)
#if REDUCE_DIMS > 1
PARAM_3(size_r0)
PARAM_5(stride_r0)
#else
#define size_r0 1
#endif
PARAM_4(size_r1)
#if VEC4 && !COLUMN
#define stride_r1 1
#else
PARAM_6(stride_r1)
#endif
PARAM_7(stride_0)
#if OUTER_DIMS > 1
PARAM_8(stride_1)
PARAM_11(size_0)
#endif
#if OUTER_DIMS > 2
PARAM_9(stride_2)
PARAM_12(size_1)
#endif
#if OUTER_DIMS > 3
PARAM_10(stride_3)
PARAM_13(size_2)
#endif
#if ARG == 2
PARAM_14(index_offset)
#endif
#if SPLIT
PARAM_15(part)
#elif PARTS
PARAM_15(reduced)
#endif

layout(set = 0, binding = 1) buffer BufOut { T_OUT buf_out[]; };
#if ARG == 2
layout(set = 0, binding = 2) buffer BufIndex { T_INDEX buf_index[]; };
#endif
EXTRA_BUFFERS

// Elements that an invocation sums before it adds to its total: sums of long rows lose less that way.
#define BLOCK 64

int o;

#if ARG
struct State {
    ACC v;
    int i;
};

State initial() { return State(ACC(0), -1); }

bool is_nan(float v) { return pv_isnan(v); }
bool is_nan(int v) { return false; }
#if HAS_FLOAT64
bool is_nan(double v) { return pv_isnan(v); }
#endif
#if HAS_INT64
bool is_nan(int64_t v) { return false; }
#endif

State join(State a, State b) {
    if (b.i < 0) return a;
    if (a.i < 0) return b;
    bool nan_a = is_nan(a.v), nan_b = is_nan(b.v);
    bool better = nan_a != nan_b ? nan_b : !nan_a && ARG_BETTER(b.v, a.v);
    bool worse = nan_a != nan_b ? nan_a : !nan_a && ARG_BETTER(a.v, b.v);
    if (better || (!worse && b.i < a.i)) return b;
    return a;
}

// Elements come in the order of their indices.
State take(State s, ACC v, int r) {
    ACC e = LOAD(v);
    return s.i < 0 || ARG_BETTER(e, s.v) || (is_nan(e) && !is_nan(s.v)) ? State(e, r) : s;
}
#if SUBGROUP || ROW_PER_SUBGROUP
State shuffle_xor(State s, uint d) { return State(subgroupShuffleXor(s.v, d), subgroupShuffleXor(s.i, d)); }
#endif
#else
#define State ACC
#define initial() INIT
#define join(a, b) COMBINE(a, b)
#define shuffle_xor(s, d) subgroupShuffleXor(s, d)
#if VARIANCE
int pass;
ACC mean;
State take(State s, ACC v, int r) {
    ACC distance = LOAD(v) - mean;
    return s + (pass == 0 ? distance : distance * distance);
}
#else
State take(State s, ACC v, int r) { return COMBINE(s, LOAD(v)); }
#endif
#endif

DEFINE_JOIN(State, join_all, join)

int outer_base(int i) {
    int at = x_offset;
#if OUTER_DIMS > 1
    int q = i / size_0;
    at += (i - q * size_0) * stride_0;
#if OUTER_DIMS > 2
    i = q;
    q = i / size_1;
    at += (i - q * size_1) * stride_1;
#if OUTER_DIMS > 3
    i = q;
    q = i / size_2;
    return at + (i - q * size_2) * stride_2 + q * stride_3;
#else
    return at + q * stride_2;
#endif
#else
    return at + q * stride_1;
#endif
#else
    return at + i * stride_0;
#endif
}

void store(State s, int at, int n) {
    o = at;
#if ARG
#if ARG == 2
    buf_out[out_offset + o] = TO_OUT(EPILOGUE(s.v, o));
    buf_index[index_offset + o] = TO_INDEX(s.i);
#else
    buf_out[out_offset + o] = TO_OUT(EPILOGUE(s.i, o));
#endif
#else
    buf_out[out_offset + o] = TO_OUT(EPILOGUE(FINISH(s, n), o));
#endif
}

#if COLUMN && VEC4
// Four neighbouring outputs.
struct States {
    State a, b, c, d;
};

States scan(int base, int from, int to) {
    States total = States(initial(), initial(), initial(), initial());
    for (int r0 = 0; r0 < size_r0; r0++) {
#if REDUCE_DIMS > 1
        int start = base + r0 * stride_r0;
#else
        int start = base;
#endif
        for (int r = from; r < to;) {
            States s = States(initial(), initial(), initial(), initial());
            int end = min(to, r + BLOCK);
            for (; r < end; r++) {
                X4 v = READ4_X(start + r * stride_r1);
                int i = r0 * size_r1 + r;
                s = States(take(s.a, FROM_X(v.x), i), take(s.b, FROM_X(v.y), i), take(s.c, FROM_X(v.z), i),
                           take(s.d, FROM_X(v.w), i));
            }
            total = States(join(total.a, s.a), join(total.b, s.b), join(total.c, s.c), join(total.d, s.d));
        }
    }
    return total;
}
#elif ROW_PER_INVOCATION
State scan(int base, int from, int to) {
    State total = initial();
    for (int r0 = 0; r0 < size_r0; r0++) {
#if REDUCE_DIMS > 1
        int start = base + r0 * stride_r0;
#else
        int start = base;
#endif
        for (int r = from; r < to;) {
            State s = initial();
            int end = min(to, r + BLOCK);
#if VEC4
            for (; r < end; r += 4) {
                X4 v = READ4_X(start + r);
                int i = r0 * size_r1 + r;
                s = take(take(s, FROM_X(v.x), i), FROM_X(v.y), i + 1);
                s = take(take(s, FROM_X(v.z), i + 2), FROM_X(v.w), i + 3);
            }
#else
            for (; r < end; r++) s = take(s, FROM_X(READ_X(start + r * stride_r1)), r0 * size_r1 + r);
#endif
            total = join(total, s);
        }
    }
    return total;
}
#else
int address(int base, int r) {
#if REDUCE_DIMS > 1
    int r0 = r / size_r1;
    return base + r0 * stride_r0 + (r - r0 * size_r1) * stride_r1;
#else
    return base + r * stride_r1;
#endif
}

// The invocation's part of the elements from..to of a row, r0 and r1 counted as one.
State scan(int base, int from, int to) {
    State total = initial();
    const int each = VEC4 == 1 ? 4 : 1;
    for (int r = from + each * LANE; r < to;) {
        State s = initial();
        int end = min(to, r + BLOCK * LANES);
        for (; r < end; r += each * LANES) {
#if VEC4
            X4 v = READ4_X(address(base, r));
            s = take(take(s, FROM_X(v.x), r), FROM_X(v.y), r + 1);
            s = take(take(s, FROM_X(v.z), r + 2), FROM_X(v.w), r + 3);
#else
            s = take(s, FROM_X(READ_X(address(base, r))), r);
#endif
        }
        total = join(total, s);
    }
    return total;
}
#endif

void main() {
#if COLUMN && VEC4
    const int each = 4;
#else
    const int each = 1;
#endif
#if ROW_PER_INVOCATION
    int length = size_r1;
#else
    int length = size_r0 * size_r1;
#endif
#if PARTS
    int n = reduced;
#else
    int n = size_r0 * size_r1;
#endif
    for (int first = ROW_FIRST * each; ROW_MORE(first, outputs); first += ROW_STEP * each) {
        int i = min(first, outputs - each);
        o = i;
#if SPLIT
#if COLUMN
        int in_all = outputs / SPLIT, which = i / in_all, row = i - which * in_all;
#else
        int row = i / SPLIT, which = i - row * SPLIT;
#endif
        int base = outer_base(row), from = min(length, which * part), to = min(length, from + part);
#else
        int base = outer_base(i), from = 0, to = length;
#endif
#if COLUMN && VEC4
        States s = scan(base, from, to);
        store(s.a, i, n);
        store(s.b, i + 1, n);
        store(s.c, i + 2, n);
        store(s.d, i + 3, n);
#else
#if VARIANCE
        pass = 0;
        mean = ACC(0);
        ACC sum = join_all(scan(base, from, to));
        pass = 1;
        mean = sum / ACC(n);
#endif
        State s = join_all(scan(base, from, to));
        if (LANE == 0 && first < outputs) store(s, i, n);
#endif
    }
}
