#version 450
#extension GL_GOOGLE_include_directive : enable
// out[o] = EPILOGUE(FINISH(COMBINE over r of LOAD(x[o, r]), n), o): sum, mean, amax, prod, any,
// all, argmax, var...
//
// Buffers: x, out, index (if ARG is 2: out has the values), and what EXTRA_BUFFERS declares.
// Offsets and strides (in x) are in elements. Of the reduced dims, r0 is the outer and r1 the inner
// one. Outer dim 0 is the innermost of the output. Parameters from number 16 on are free for
// EXTRA_BUFFERS.
// Macros:
//   T_X, T_OUT     element types
//   ACC            type of the arithmetic
//   FROM_X(v)      converts an element of x to ACC; default ACC(v)
//   TO_OUT(v)      converts ACC to an element of out; default T_OUT(v). For an int64 output on a
//                  device without 64-bit integers: T_OUT ivec2, TO_OUT(v) ivec2(v, v >> 31)
//   OUTER_DIMS     dims of the output, 1 to 4
//   REDUCE_DIMS    reduced dims, 1 or 2. 1: only r1; r0 is 1
//   INIT           the identity of COMBINE. With ARG: the worst element
//   COMBINE(a, b)  an operation on two elements; the order of elements is not kept
//   LOAD(v)        what is done to each element first
//   FINISH(a, n)   what is done to the result of n elements last; `o` is the output's index
//   EPILOGUE(v, o) what is stored; `o` is the output's index
//   ARG            1: stores the index r0 * size(r1) + r1 of the best element
//                  2: stores the best element, and its index in binding 2
//                  Of equal elements the first is best. NaN is better than all else, as in torch
//   ARG_BETTER(a, b)  with ARG: a > b (argmax; default) or a < b
//   T_INDEX, TO_INDEX(v)  with ARG 2: type of the indices, and the conversion to it
//   VARIANCE       1: FINISH gets the sum of squared distances from the mean, of numbers that are to be
//                  multiplied by `unscale`; ACC is float
//   LOGARITHM      1: FINISH gets the logarithm of the sum of exponentials; ACC is float
//   AHEAD          elements, or vec4s, that an invocation reads before it uses the first of them;
//                  default 1
//   SPLIT          s > 0: a row is cut into s parts of `part` elements; the last ones may be
//                  shorter. out has partial results: [outputs / s, s], or [s, outputs / s] if
//                  COLUMN. A second dispatch (PARTS) reduces those. Needs REDUCE_DIMS 1, no ARG
//                  and no VARIANCE
//   PARTS          1: x has such partial results, and n is `reduced`
//   TEXEL_X        1: x is a uniform texel buffer (rows.glslh)
//   ROW_PER_SUBGROUP, ROW_PER_INVOCATION, WIDTH, SUBGROUP, LOCAL  rows.glslh, with rows = outputs;
//                  it also has the grid
//   COLUMN         1: neighbouring outputs have neighbouring elements if outer dim 0 has stride 1.
//                  One invocation computes one output, or (VEC4) four. The grid is that of
//                  ROW_PER_INVOCATION, with rows = outputs, or outputs / 4 if VEC4. With WIDTH w > 1
//                  a workgroup computes w of them, and local_size_x / w invocations share each
//   VEC4           1: x is read as vec4. Without COLUMN along r1: its stride is 1, and its size, all
//                  other strides, the offset of x and the length of parts are multiples of 4. With
//                  COLUMN along outer dim 0: its stride is 1, and its size, all other strides and
//                  both offsets are multiples of 4
// An invocation should run at most 65535 iterations of its loops: old llvmpipe ends loops there.
#ifndef COLUMN
#define COLUMN 0
#endif
#if COLUMN && !defined(WIDTH)
#undef ROW_PER_INVOCATION
#define ROW_PER_INVOCATION 1
#endif
#include "core/rows.glslh"
#include "core/math.glslh"

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
#ifndef LOGARITHM
#define LOGARITHM 0
#endif
#ifndef AHEAD
#define AHEAD 1
#endif
#ifndef SPLIT
#define SPLIT 0
#endif
#ifndef PARTS
#define PARTS 0
#endif
#if SPLIT && (ARG || VARIANCE)
#error ARG and VARIANCE need SPLIT 0
#endif

PARAM(0, x_offset)
PARAM(1, out_offset)
PARAM(2, outputs)
#if REDUCE_DIMS > 1
PARAM(3, size_r0)
PARAM(5, stride_r0)
#else
#define size_r0 1
#endif
PARAM(4, size_r1)
#if VEC4 && !COLUMN
#define stride_r1 1
#else
PARAM(6, stride_r1)
#endif
PARAM(7, stride_0)
#if OUTER_DIMS > 1
PARAM(8, stride_1)
PARAM(11, size_0)
#endif
#if OUTER_DIMS > 2
PARAM(9, stride_2)
PARAM(12, size_1)
#endif
#if OUTER_DIMS > 3
PARAM(10, stride_3)
PARAM(13, size_2)
#endif
#if ARG == 2
PARAM(14, index_offset)
#endif
#if SPLIT
PARAM(15, part)  // length of one
#elif PARTS
PARAM(15, reduced)  // elements in all
#endif

BUFFER(1, out, T_OUT)
#if ARG == 2
BUFFER(2, index, T_INDEX)
#define EXTRA_BINDING 3
#else
#define EXTRA_BINDING 2
#endif
EXTRA_BUFFERS

// Elements that an invocation sums before it adds to its total. Sums of long rows are more accurate
// that way.
#define BLOCK 64

int o;

#if ARG
struct State {
    ACC v;
    int i;
};

// The worst element, at the index r of the first element. It is the result if all elements are as bad.
#define initial_at(r) State(INIT, r)
#define initial() initial_at(0x7fffffff)

bool is_nan(float v) { return pv_isnan(v); }
bool is_nan(int v) { return false; }
#if HAS_FLOAT64
bool is_nan(double v) { return pv_isnan(v); }
#endif
#if HAS_INT64
bool is_nan(int64_t v) { return false; }
#endif

State join(State a, State b) {
    bool nan_a = is_nan(a.v), nan_b = is_nan(b.v);
    bool equal = nan_a ? nan_b : a.v == b.v;
    return equal && b.i < a.i || !nan_a && (nan_b || ARG_BETTER(b.v, a.v)) ? b : a;
}

// Elements come in the order of their indices.
State take(State s, ACC v, int r) {
    ACC e = LOAD(v);
    return (ARG_BETTER(e, s.v) || is_nan(e)) && !is_nan(s.v) ? State(e, r) : s;
}
#if SUBGROUP || ROW_PER_SUBGROUP
State shuffle_xor(State s, uint d) { return State(subgroupShuffleXor(s.v, d), subgroupShuffleXor(s.i, d)); }
#endif
#elif VARIANCE
// The first element of each row. It is subtracted from all elements, so that sums keep the digits of
// numbers that are far from 0. A row whose sum of squares is no normal number is read once more, with
// its elements times `down`, or its differences times `up`.
#if COLUMN && VEC4
#define OF_EACH vec4
#else
#define OF_EACH float
#endif
OF_EACH pivot, down, up;
float unscale;
const float DOWN = 8.271806125530277e-25, UP = 4.951760157141521e27;  // 2^-80 and 2^92

// Sets the factors of a row by its sum of squares. Returns whether it has to be read once more.
bool rescale(float squares, inout float pivot, out float down, out float up) {
    bool large = !(squares < PV_FLT_MAX), small = squares < DOWN;
    down = large ? DOWN : 1.0;
    up = small ? UP : 1.0;
    pivot *= down;
    return large || small;
}

// Whether any invocation says so of those that join their elements.
#if ROW_PER_INVOCATION
bool any_of_row(bool one) { return one; }
#elif ROW_PER_SUBGROUP
bool any_of_row(bool one) { return subgroupShuffle(uint(one), 0u) != 0u; }
#else
shared int any_flag;
bool any_of_row(bool one) {
    if (gl_LocalInvocationIndex == 0u) any_flag = 0;
    barrier();
    if (one) any_flag = 1;
    barrier();
    return any_flag != 0;
}
#endif
// How many elements, their mean less the pivot, and the sum of their squared distances from the mean.
struct State {
    float n, mean, squares;
};
State initial() { return State(0.0, 0.0, 0.0); }
State join(State a, State b) {
    float n = a.n + b.n, share = b.n / max(n, 1.0), apart = b.mean - a.mean;
    return State(n, a.mean + apart * share, a.squares + b.squares + apart * apart * a.n * share);
}
State take(State s, ACC v, int r) { return join(s, State(1.0, LOAD(v), 0.0)); }
#if SUBGROUP || ROW_PER_SUBGROUP
State shuffle_xor(State s, uint d) {
    return State(subgroupShuffleXor(s.n, d), subgroupShuffleXor(s.mean, d), subgroupShuffleXor(s.squares, d));
}
#endif
#define RESULT(s) (s).squares
#elif LOGARITHM
// The largest element, and the sum of exp(element - subtrahend).
struct State {
    float most, sum;
};
State initial() { return State(-PV_INF, 0.0); }
// Infinity minus itself is NaN: nothing is subtracted where the largest element is infinite.
float subtrahend(float most) { return pv_isinf(most) ? 0.0 : most; }
State join(State a, State b) {
    float most = max(a.most, b.most), s = subtrahend(most);
    return State(most, a.sum * pv_exp_term(a.most - s) + b.sum * pv_exp_term(b.most - s));
}
State take(State s, ACC v, int r) {
    ACC e = LOAD(v);
    return join(s, State(e, pv_isinf(e) ? pv_exp_term(e) : 1.0));
}
#if SUBGROUP || ROW_PER_SUBGROUP
State shuffle_xor(State s, uint d) { return State(subgroupShuffleXor(s.most, d), subgroupShuffleXor(s.sum, d)); }
#endif
#define RESULT(s) (subtrahend((s).most) + pv_log((s).sum))
#else
#define State ACC
#define initial() INIT
#define join(a, b) COMBINE(a, b)
#define shuffle_xor(s, d) subgroupShuffleXor(s, d)
State take(State s, ACC v, int r) { return COMBINE(s, LOAD(v)); }
#endif
#ifndef RESULT
#define RESULT(s) (s)
#endif
#ifndef initial_at
#define initial_at(r) initial()
#endif

// A vec4 of a row has four elements of one output. A vec4 of columns has one element of four outputs.
#if VEC4 && !COLUMN
#define EACH 4
#else
#define EACH 1
#endif
#define BATCH (AHEAD * EACH)
#define OFFSET(k) ((k) / EACH * EACH * LANES + (k) % EACH)

// Element k of a batch is element r + OFFSET(k) of the row.
State take_batch(State s, ACC v[BATCH], int r) {
#if VARIANCE
    float sum = 0.0, squares = 0.0;
    UNROLL for (int k = 0; k < BATCH; k++) {
        v[k] = LOAD(v[k]);
        sum += v[k];
    }
    float mean = sum * (1.0 / float(BATCH));
    UNROLL for (int k = 0; k < BATCH; k++) squares += (v[k] - mean) * (v[k] - mean);
    return join(s, State(float(BATCH), mean, squares));
#elif LOGARITHM
    float most = s.most;
    UNROLL for (int k = 0; k < BATCH; k++) {
        v[k] = LOAD(v[k]);
        most = max(most, v[k]);
    }
    float less = subtrahend(most), sum = s.sum * pv_exp_term(s.most - less);
    UNROLL for (int k = 0; k < BATCH; k++) sum += pv_exp_term(v[k] - less);
    return State(most, sum);
#else
    UNROLL for (int k = 0; k < BATCH; k++) s = take(s, v[k], r + OFFSET(k));
    return s;
#endif
}

// The state of what an invocation computes: one output, or four neighbouring ones.
#if COLUMN && VEC4
struct States {
    State a, b, c, d;
};
States all_initial() { return States(initial(), initial(), initial(), initial()); }
States all_initial_at(int r) { return States(initial_at(r), initial_at(r), initial_at(r), initial_at(r)); }
States each_joined(States s, States t) { return States(join(s.a, t.a), join(s.b, t.b), join(s.c, t.c), join(s.d, t.d)); }
#else
#define States State
#define all_initial() initial()
#define all_initial_at(r) initial_at(r)
#define each_joined(s, t) join(s, t)
#endif

DEFINE_JOIN(States, join_all, each_joined)

// An element as it is reduced; with COLUMN and VEC4, that of output `lane`.
#if VARIANCE && COLUMN && VEC4
#define ELEMENT(v, lane) ((FROM_X(v) * down.lane - pivot.lane) * up.lane)
#elif VARIANCE
#define ELEMENT(v, lane) ((FROM_X(v) * down - pivot) * up)
#else
#define ELEMENT(v, lane) FROM_X(v)
#endif

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
    buf_out[out_offset + o] = TO_OUT(EPILOGUE(FINISH(RESULT(s), n), o));
#endif
}

int address(int base, int r) {
#if REDUCE_DIMS > 1 && !ROW_PER_INVOCATION
    int r0 = r / size_r1;
    return base + r0 * stride_r0 + (r - r0 * size_r1) * stride_r1;
#else
    return base + r * stride_r1;
#endif
}

// Reduces the invocation's share of the elements from..to of a row. They are indices over r0 and r1
// together, or, if one invocation has the row, over r1.
States scan(int base, int from, int to) {
    States total = all_initial();
#if REDUCE_DIMS > 1 && ROW_PER_INVOCATION
    for (int r0 = 0; r0 < size_r0; r0++) {
        int before = r0 * size_r1, start = base + r0 * stride_r0;
#else
    {
        const int before = 0;
        int start = base;
#endif
        for (int r = from + EACH * LANE; r < to;) {
            States s = all_initial_at(before + r);
            int end = min(to, r + BLOCK * LANES);
#if AHEAD > 1
            for (; r + (AHEAD - 1) * EACH * LANES < end; r += BATCH * LANES) {
#if VEC4
                X4 v[AHEAD];
                UNROLL for (int k = 0; k < AHEAD; k++) v[k] = READ4_X(address(start, r + k * EACH * LANES));
#endif
                ACC e[BATCH];
#if VEC4 && COLUMN
                UNROLL for (int k = 0; k < AHEAD; k++) e[k] = ELEMENT(v[k].x, x);
                s.a = take_batch(s.a, e, before + r);
                UNROLL for (int k = 0; k < AHEAD; k++) e[k] = ELEMENT(v[k].y, y);
                s.b = take_batch(s.b, e, before + r);
                UNROLL for (int k = 0; k < AHEAD; k++) e[k] = ELEMENT(v[k].z, z);
                s.c = take_batch(s.c, e, before + r);
                UNROLL for (int k = 0; k < AHEAD; k++) e[k] = ELEMENT(v[k].w, w);
                s.d = take_batch(s.d, e, before + r);
#else
#if VEC4
                UNROLL for (int k = 0; k < AHEAD; k++) {
                    e[4 * k] = ELEMENT(v[k].x, x);
                    e[4 * k + 1] = ELEMENT(v[k].y, y);
                    e[4 * k + 2] = ELEMENT(v[k].z, z);
                    e[4 * k + 3] = ELEMENT(v[k].w, w);
                }
#else
                UNROLL for (int k = 0; k < AHEAD; k++) e[k] = ELEMENT(READ_X(address(start, r + k * LANES)), x);
#endif
                s = take_batch(s, e, before + r);
#endif
            }
#endif
            for (; r < end; r += EACH * LANES) {
                int i = before + r;
#if VEC4
                X4 v = READ4_X(address(start, r));
#if COLUMN
                s = States(take(s.a, ELEMENT(v.x, x), i), take(s.b, ELEMENT(v.y, y), i), take(s.c, ELEMENT(v.z, z), i),
                           take(s.d, ELEMENT(v.w, w), i));
#else
                s = take(take(s, ELEMENT(v.x, x), i), ELEMENT(v.y, y), i + 1);
                s = take(take(s, ELEMENT(v.z, z), i + 2), ELEMENT(v.w, w), i + 3);
#endif
#else
                s = take(s, ELEMENT(READ_X(address(start, r)), x), i);
#endif
            }
            total = each_joined(total, s);
        }
    }
    return total;
}

#if COLUMN && VEC4
#define EACH_LOAD 4
#define TASKS (outputs / 4)
#define OWN ceil(LENGTH, TEAM_LANES)
#elif VEC4
#define EACH_LOAD 4
#define TASKS outputs
#define OWN ceil(LENGTH, 4 * TEAM_LANES)
#else
#define EACH_LOAD 1
#define TASKS outputs
#define OWN ceil(LENGTH, TEAM_LANES)
#endif
#if SPLIT
#define LENGTH part
#elif ROW_PER_INVOCATION
#define LENGTH size_r1
#else
#define LENGTH (size_r0 * size_r1)
#endif
#if VEC4 && !COLUMN
#define BLOCK_LOADS (BLOCK / 4)
#else
#define BLOCK_LOADS BLOCK
#endif
// Blocks, each with the ends of its loops and what batches leave of it; and batches.
#if AHEAD > 1
#define BLOCK_LOOPS (loop(ceil(OWN, BLOCK_LOADS), 2 + min(OWN, AHEAD - 1)) + OWN / AHEAD + OWN * EACH_LOAD * functions)
#else
#define BLOCK_LOOPS (loop(ceil(OWN, BLOCK_LOADS), 1) + OWN + OWN * EACH_LOAD * functions)
#endif
#define PASSES (1 + VARIANCE)
#if REDUCE_DIMS > 1 && ROW_PER_INVOCATION
LOOPS(loop(ceil(TASKS, workgroups * TEAM), loop(PASSES, loop(size_r0, BLOCK_LOOPS) + JOIN_LOOPS)))
#else
LOOPS(loop(ceil(TASKS, workgroups * TEAM), loop(PASSES, BLOCK_LOOPS + JOIN_LOOPS)))
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
    int tasks = outputs / each;
    for (int task = ROW_FIRST; ROW_MORE(task, tasks); task += ROW_STEP) {
        int i = min(task, tasks - 1) * each;
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
#if VARIANCE
#if VEC4 && COLUMN
        X4 first = READ4_X(base);
        pivot = vec4(FROM_X(first.x), FROM_X(first.y), FROM_X(first.z), FROM_X(first.w));
#elif VEC4
        pivot = FROM_X(READ4_X(base).x);
#else
        pivot = FROM_X(READ_X(base));
#endif
        down = up = OF_EACH(1.0);
        States s;
        ROLL for (int pass = 0; pass < 2; pass++) {
            s = join_all(scan(base, from, to));
            if (pass > 0) break;
#if VEC4 && COLUMN
            bool more = rescale(s.a.squares, pivot.x, down.x, up.x);
            more = rescale(s.b.squares, pivot.y, down.y, up.y) || more;
            more = rescale(s.c.squares, pivot.z, down.z, up.z) || more;
            more = rescale(s.d.squares, pivot.w, down.w, up.w) || more;
#else
            bool more = rescale(s.squares, pivot, down, up);
#endif
            if (!any_of_row(more)) break;
        }
#define UNSCALE(down, up) unscale = 1.0 / (down * up);
#else
        States s = join_all(scan(base, from, to));
#define UNSCALE(down, up)
#endif
        if (LANE == 0 && task < tasks) {
#if COLUMN && VEC4
            UNSCALE(down.x, up.x)
            store(s.a, i, n);
            UNSCALE(down.y, up.y)
            store(s.b, i + 1, n);
            UNSCALE(down.z, up.z)
            store(s.c, i + 2, n);
            UNSCALE(down.w, up.w)
            store(s.d, i + 3, n);
#else
            UNSCALE(down, up)
            store(s, i, n);
#endif
        }
    }
}
