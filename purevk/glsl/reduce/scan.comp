#version 450
#extension GL_GOOGLE_include_directive : enable
// out[row, i] = COMBINE over j <= i of x[row, j], in this order: cumsum, cumprod, logcumsumexp,
// cummax, cummin.
//
// Buffers: x, out, and index (if ARG) or totals (those of the parts, if TOTALS).
// Offsets and strides are in elements. Outer dim 0 is the innermost.
// Macros:
//   T_X, T_OUT      element types
//   ACC             type of the arithmetic
//   FROM_X(v)       converts an element of x to ACC
//   TO_OUT(v)       converts ACC to an element of out
//   INIT            the identity of COMBINE. With ARG: what every element replaces
//   COMBINE(a, b)   an associative operation; a comes before b
//   ARG             1: also stores the index of the last of the best elements
//   BEATS(b, a)     with ARG: whether b replaces a
//   T_INDEX         with ARG: type of the indices
//   INDEX_PAIRS     1: the indices are int64, written as pairs of words; needs VEC4
//   LOGARITHM       1: the logarithm of the running sum of exponentials; ACC is float
//   TOTALS          1: rows are cut into parts that are scanned independently. The result of each
//                   part goes to totals[row, part]
//   ROW_PER_INVOCATION  1: one invocation walks along a row alone
//   ROW_PER_SUBGROUP    1: a subgroup has a row, and its lanes have neighbouring elements
//   WIDTH           rows that a workgroup has at once (rows.glslh); needs TOTALS 0
//   COLUMN          1: with WIDTH, neighbouring rows have neighbouring elements. With VEC4 a vector
//                   is one element of four rows
//   VEC4            1: x, out and the indices are read and written as vec4. T_X is float, float16_t
//                   or int. Vectors lie along the row, or (COLUMN) along outer dim 0. There the
//                   stride is 1, and the size, all other strides and all offsets are multiples of 4
//   ITEMS           elements per invocation and iteration (vec4s if ROW_PER_SUBGROUP and VEC4). A
//                   multiple of 4 if VEC4 and a workgroup has one row
//   LOCAL           invocations of a workgroup, a power of 2
//   SUBGROUP        1: uses subgroup operations (rows.glslh)
// Grid: rows.glslh, with rows = rows * parts, or rows / 4 if COLUMN and VEC4.
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
#ifndef INIT
#define INIT ACC(0)
#endif
#ifndef COMBINE
#define COMBINE(a, b) ((a) + (b))
#endif
#ifndef ARG
#define ARG 0
#endif
#ifndef BEATS
#define BEATS(b, a) ((b) >= (a))
#endif
#ifndef LOGARITHM
#define LOGARITHM 0
#endif
#ifndef COLUMN
#define COLUMN 0
#endif
#ifndef INDEX_PAIRS
#define INDEX_PAIRS 0
#endif
#ifndef TOTALS
#define TOTALS 0
#endif
#ifndef ITEMS
#define ITEMS 4
#endif
#ifndef T_INDEX
#define T_INDEX int
#endif

PARAM(0, x_offset)
PARAM(1, out_offset)
PARAM(2, rows)
PARAM(3, row_length)
PARAM(4, x_step)  // strides along a row
PARAM(5, out_step)
PARAM(6, x_0)  // strides of the outer dims
PARAM(7, x_1)
PARAM(8, x_2)
PARAM(9, x_3)
PARAM(10, out_0)
PARAM(11, out_1)
PARAM(12, out_2)
PARAM(13, out_3)
PARAM(14, size_0)  // of the outer dims
PARAM(15, size_1)
PARAM(16, size_2)
#if TOTALS
PARAM(17, part)  // length of one
PARAM(18, parts)  // of a row
#endif
#if ARG
PARAM(19, index_offset)
#endif

#if VEC4
BUFFER(1, out, VEC4_OF(T_OUT))
#else
BUFFER(1, out, T_OUT)
#endif
#if ARG && VEC4
BUFFER(2, index, ivec4)
#elif ARG
BUFFER(2, index, T_INDEX)
#elif TOTALS
BUFFER(2, totals, ACC)
#endif

#if ARG
struct State {
    ACC v;
    int i;
};
State initial() { return State(INIT, -1); }
State first(ACC v, int i) { return State(v, i); }
bool is_nan(float v) { return pv_isnan(v); }
#if HAS_FLOAT64
bool is_nan(double v) { return pv_isnan(v); }
#endif
bool is_nan(int v) { return false; }
#if HAS_INT64
bool is_nan(int64_t v) { return false; }
#endif
// NaN replaces everything, and only NaN replaces NaN. Every element replaces the initial state. States
// behind the last element are never stored.
State join(State a, State b) {
    return is_nan(b.v) || (!is_nan(a.v) && BEATS(b.v, a.v)) ? b : a;
}
#if ROW_PER_SUBGROUP
State shuffle(State s, uint from) { return State(subgroupShuffle(s.v, from), subgroupShuffle(s.i, from)); }
#endif
#define RESULT(s) (s).v
#elif LOGARITHM
// The largest element, and the sum of exp(element - largest).
struct State {
    float most, sum;
};
State initial() { return State(-PV_INF, 0.0); }
State first(float v, int i) { return State(v, 1.0); }
State join(State a, State b) {
    float share = pv_exp_term(a.most == b.most ? 0.0 : -abs(a.most - b.most));
    return State(max(a.most, b.most), b.most > a.most ? b.sum + a.sum * share : a.sum + b.sum * share);
}
#if ROW_PER_SUBGROUP
State shuffle(State s, uint from) { return State(subgroupShuffle(s.most, from), subgroupShuffle(s.sum, from)); }
#endif
float logarithm(float sum) { return pv_isnan(sum) ? sum : log(sum); }  // a sum is 1 at least
#define RESULT(s) ((s).most + logarithm((s).sum))
#else
#define State ACC
#define initial() INIT
#define first(v, i) (v)
#define join(a, b) COMBINE(a, b)
#define shuffle(s, from) subgroupShuffle(s, from)
#define RESULT(s) (s)
#endif

#if VEC4
void put4(State a, State b, State c, State d, int at) {
    buf_out[(out_offset + at) >> 2] = VEC4_OF(T_OUT)(VEC4_OF(ACC)(RESULT(a), RESULT(b), RESULT(c), RESULT(d)));
#if INDEX_PAIRS
    buf_index[(index_offset + at) >> 1] = ivec4(a.i, 0, b.i, 0);
    buf_index[((index_offset + at) >> 1) + 1] = ivec4(c.i, 0, d.i, 0);
#elif ARG
    buf_index[(index_offset + at) >> 2] = ivec4(a.i, b.i, c.i, d.i);
#endif
}
#else
void put(State s, int at) {
    buf_out[out_offset + at] = TO_OUT(RESULT(s));
#if ARG
    buf_index[index_offset + at] = T_INDEX(s.i);
#endif
}
#endif

// The states of one row, or of four rows.
#if COLUMN && VEC4
struct States {
    State a, b, c, d;
};
States none() { return States(initial(), initial(), initial(), initial()); }
States joined(States s, States t) { return States(join(s.a, t.a), join(s.b, t.b), join(s.c, t.c), join(s.d, t.d)); }
#define ROWS 4
#else
#define States State
#define none() initial()
#define joined(s, t) join(s, t)
#define ROWS 1
#endif

#if !ROW_PER_INVOCATION && !ROW_PER_SUBGROUP
shared States shared_state[LOCAL];

// The join of the states of all invocations before this one. `all` is set to the join of all states.
States before(States mine, out States all) {
    int at = int(gl_LocalInvocationIndex), lane = LANE;
    shared_state[at] = mine;
    barrier();
    for (int step = 1; step < LANES; step *= 2) {
        States other = none();
        if (lane >= step) other = shared_state[at - step * WIDTH];
        barrier();
        mine = joined(other, mine);
        if (lane >= step) shared_state[at] = mine;
        barrier();
    }
    all = shared_state[(LANES - 1) * WIDTH + SIDE];
    States made = none();
    if (lane > 0) made = shared_state[at - WIDTH];
    barrier();
    return made;
}
#endif

#if !ROW_PER_INVOCATION && !ROW_PER_SUBGROUP
#if LOGARITHM
// Joins the elements of an invocation at once, with one exponential per element.
State join_all(float v[ITEMS], int count) {
    float most = -PV_INF, sum = 0.0;
    UNROLL for (int k = 0; k < ITEMS; k++) most = max(most, k < count ? v[k] : -PV_INF);
    float less = pv_isinf(most) ? 0.0 : most;
    UNROLL for (int k = 0; k < ITEMS; k++) sum += k < count ? pv_exp_term(v[k] - less) : 0.0;
    return State(most, sum);
}
#endif

#if VEC4 && COLUMN
#define ITEM(v, j) States(first(FROM_X((v).x), j), first(FROM_X((v).y), j), first(FROM_X((v).z), j), first(FROM_X((v).w), j))
#define ITEM_TYPE X4
#else
#define ITEM(v, j) first(v, j)
#define ITEM_TYPE ACC
#endif

// Joins the elements of this invocation, from j on; `to` is the end of the row.
States join_items(ITEM_TYPE v[ITEMS], int j, int to) {
#if LOGARITHM && VEC4 && COLUMN
    float a[ITEMS], b[ITEMS], c[ITEMS], d[ITEMS];
    UNROLL for (int k = 0; k < ITEMS; k++) {
        a[k] = FROM_X(v[k].x);
        b[k] = FROM_X(v[k].y);
        c[k] = FROM_X(v[k].z);
        d[k] = FROM_X(v[k].w);
    }
    return States(join_all(a, to - j), join_all(b, to - j), join_all(c, to - j), join_all(d, to - j));
#elif LOGARITHM
    return join_all(v, to - j);
#else
    States s = none();
    UNROLL for (int k = 0; k < ITEMS; k++)
        if (j + k < to) s = joined(s, ITEM(v[k], j + k));
    return s;
#endif
}
#endif

#if ROW_PER_SUBGROUP
#if VEC4
#define EACH 4
#else
#define EACH 1
#endif

// Joins the elements from j on to `left`, one after the other, and stores the results. `left` is set to
// the join of all elements of the subgroup.
void take(State s[EACH], inout State left, int j, int to, int out_base) {
    uint lane = gl_SubgroupInvocationID;
    UNROLL for (int k = 1; k < EACH; k++) s[k] = join(s[k - 1], s[k]);
    State sum = s[EACH - 1];
    for (uint step = 1; step < gl_SubgroupSize; step *= 2) {
        State other = shuffle(sum, lane >= step ? lane - step : lane);
        if (lane >= step) sum = join(other, sum);
    }
    State mine = shuffle(sum, max(lane, 1u) - 1u);
    mine = lane > 0 ? join(left, mine) : left;
    left = join(left, shuffle(sum, gl_SubgroupSize - 1u));
    if (j >= to) return;
#if VEC4
    put4(join(mine, s[0]), join(mine, s[1]), join(mine, s[2]), join(mine, s[3]), out_base + j);
#else
    put(join(mine, s[0]), out_base + j * out_step);
#endif
}
#endif

#if TOTALS
#define LENGTH part
#define TASKS (rows * parts)
#else
#define LENGTH row_length
#define TASKS (rows / ROWS)
#endif
#if ROW_PER_INVOCATION
LOOPS(loop(ceil(TASKS, workgroups * TEAM), loop(LENGTH)))
#elif ROW_PER_SUBGROUP
LOOPS(loop(ceil(TASKS, workgroups * TEAM), loop(ceil(LENGTH, ITEMS * EACH * subgroup_size), ITEMS * loop(log2(subgroup_size)))))
#else
LOOPS(loop(ceil(TASKS, workgroups * TEAM), loop(ceil(LENGTH, ITEMS * TEAM_LANES), loop(log2(TEAM_LANES)))))
#endif

void main() {
#if TOTALS
    int tasks = rows * parts;
#else
    int tasks = rows / ROWS;
#endif
    for (int task = ROW_FIRST; ROW_MORE(task, tasks); task += ROW_STEP) {
        int i = min(task, tasks - 1) * ROWS;
        bool live = task < tasks;
#if TOTALS
        int row = i / parts, from = (i - row * parts) * part, to = min(row_length, from + part);
#else
        int row = i, from = 0, to = row_length;
#endif
        int q1 = row / size_0, q2 = q1 / size_1, q3 = q2 / size_2;
        int c0 = row - q1 * size_0, c1 = q1 - q2 * size_1, c2 = q2 - q3 * size_2;
        int x_base = x_offset + c0 * x_0 + c1 * x_1 + c2 * x_2 + q3 * x_3;
        int out_base = c0 * out_0 + c1 * out_1 + c2 * out_2 + q3 * out_3;
        States carry = none();
#if ROW_PER_INVOCATION
        for (int j = from; j < to; j++) {
            State e = first(FROM_X(READ_X(x_base + j * x_step)), j);
            carry = j == from ? e : join(carry, e);
            put(carry, out_base + j * out_step);
        }
#elif ROW_PER_SUBGROUP
        for (int start = from; start < to; start += ITEMS * EACH * LANES) {
#if VEC4
            X4 v[ITEMS];
            UNROLL for (int k = 0; k < ITEMS; k++) {
                int j = start + (k * LANES + LANE) * EACH;
                v[k] = READ4_X(x_base + min(j, to - EACH));
            }
#else
            ACC v[ITEMS];
            UNROLL for (int k = 0; k < ITEMS; k++) v[k] = FROM_X(READ_X(x_base + min(start + k * LANES + LANE, to - 1) * x_step));
#endif
            UNROLL for (int k = 0; k < ITEMS; k++) {
                int j = start + (k * LANES + LANE) * EACH;
                State s[EACH];
#if VEC4
                s[0] = first(FROM_X(v[k].x), j);
                s[1] = first(FROM_X(v[k].y), j + 1);
                s[2] = first(FROM_X(v[k].z), j + 2);
                s[3] = first(FROM_X(v[k].w), j + 3);
#else
                s[0] = first(v[k], j);
#endif
                take(s, carry, j, to, out_base);
            }
        }
#else
        for (int start = from; start < to; start += ITEMS * LANES) {
            int mine = start + LANE * ITEMS;
#if VEC4 && COLUMN
            X4 v[ITEMS];
            UNROLL for (int k = 0; k < ITEMS; k++) v[k] = READ4_X(x_base + min(mine + k, to - 1) * x_step);
#else
            ACC v[ITEMS];
#if VEC4
            UNROLL for (int k = 0; k < ITEMS; k += 4) {
                X4 four = READ4_X(x_base + min(mine + k, to - 4));
                v[k] = FROM_X(four.x);
                v[k + 1] = FROM_X(four.y);
                v[k + 2] = FROM_X(four.z);
                v[k + 3] = FROM_X(four.w);
            }
#else
            UNROLL for (int k = 0; k < ITEMS; k++) v[k] = FROM_X(READ_X(x_base + min(mine + k, to - 1) * x_step));
#endif
#endif
            // The elements are joined twice: registers hold the elements, not the results.
            States all, left = join_items(v, mine, to);
            left = joined(carry, before(left, all));
#if VEC4 && !COLUMN
            UNROLL for (int k = 0; k < ITEMS; k += 4) {
                if (!live || mine + k >= to) continue;
                State a = join(left, first(v[k], mine + k)), b = join(a, first(v[k + 1], mine + k + 1));
                State c = join(b, first(v[k + 2], mine + k + 2));
                left = join(c, first(v[k + 3], mine + k + 3));
                put4(a, b, c, left, out_base + mine + k);
            }
#else
            UNROLL for (int k = 0; k < ITEMS; k++) {
                if (!live || mine + k >= to) continue;
                left = joined(left, ITEM(v[k], mine + k));
                int at = out_base + (mine + k) * out_step;
#if VEC4
                put4(left.a, left.b, left.c, left.d, at);
#else
                put(left, at);
#endif
            }
#endif
            carry = joined(carry, all);
        }
#endif
#if TOTALS
        if (LANE == 0) buf_totals[i] = RESULT(carry);
#endif
    }
}
